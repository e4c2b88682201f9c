"""What is read for figures: the selected tensors, and each region once, however many ranks have replicas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ckptools.dtypes import ITEMSIZE, NO_NUMBERS, is_floating, short
from ckptools.errors import ReadError, original_of
from ckptools.keys.entries import Entry, Selection
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem
from ckptools.model.problems import Code
from ckptools.model.records import grouped
from ckptools.model.regions import Box
from ckptools.model.shard import Shard
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.dcp_items import with_source
from ckptools.text import plural
from ckptools.training_state.sections import SectionKind, sections_of_kind


class MeasuredPart(NamedTuple):
    """A tensor for which figures are computed, or one rank's part of it: the tensor with that rank's shards alone.

    `kind` is that of its section.
    """

    name: str
    section: str
    tensor: Tensor
    rank: int | None = None
    kind: SectionKind = "model"

    @property
    def numel(self) -> int:
        """Expected number of elements."""
        return self.tensor.numel if self.rank is None else sum(s.box.numel for s in self.tensor.shards)

    @property
    def nbytes(self) -> int:
        """Expected number of bytes."""
        return self.numel * ITEMSIZE[self.tensor.dtype]


def tensors_chosen(ck: Checkpoint, selection: Selection) -> list[Entry]:
    """The selected tensors; if no section is named, those of the model, if there is one.

    Raises:
        UsageError: there is no such section.
    """
    section = selection.section or ("model" if sections_of_kind(ck, "model") else "")
    return _tensors(ck, replace(selection, section=section))


def elsewhere(ck: Checkpoint, selection: Selection) -> str:
    """Sections with matching tensors if none of the model matches; empty if nothing matches."""
    found = _tensors(ck, selection)
    kinds = list(dict.fromkeys(entry.kind for entry in found))
    return f"{plural(len(found), 'tensor')} elsewhere: --section {' or '.join(kinds)}" if found else ""


def _tensors(ck: Checkpoint, selection: Selection) -> list[Entry]:
    return [entry for entry in selection.of(ck) if isinstance(entry.value, Tensor)]


def by_parameter(entries: Iterable[Entry]) -> dict[str, Entry]:
    """The only entry of each parameter, without parameters that have several."""
    found = grouped(entries, lambda entry: entry.parameter)
    return {parameter: own[0] for parameter, own in found.items() if len(own) == 1}


def parts_of(ck: Checkpoint, selection: Selection, per_rank: bool = False) -> list[MeasuredPart]:
    """The tensors of `tensors_chosen`, or each rank's parts of them."""
    chosen = tensors_chosen(ck, selection)
    wholes = [MeasuredPart(entry.name, entry.section, entry.value, kind=entry.kind) for entry in chosen]
    return [part for whole in wholes for part in _of_each_rank(whole)] if per_rank else wholes


def _of_each_rank(whole: MeasuredPart) -> list[MeasuredPart]:
    """Each rank's part of a tensor; the whole tensor if the ranks are unknown."""
    own: dict[int, list[Shard]] = {}
    for shard in whole.tensor.shards:
        if shard.rank is not None:
            own.setdefault(shard.rank, []).append(shard)
    return [of_rank(whole, rank, shards) for rank, shards in sorted(own.items())] or [whole]


def of_rank(whole: MeasuredPart, rank: int, shards: Iterable[Shard]) -> MeasuredPart:
    """The part of a tensor in some shards of a rank."""
    return whole._replace(tensor=replace(whole.tensor, shards=tuple(shards)), rank=rank)


class ReadableSources(NamedTuple):
    """The places of the readable bytes of a part, each region once, and why others cannot be read."""

    sources: tuple[Source, ...]
    problem: str = ""


def readable(part: MeasuredPart) -> ReadableSources:
    """Find the places of a part's elements, and why some cannot be read."""
    tensor = part.tensor
    reason = no_numbers(tensor) or (tensor.note if part.rank is None or tensor.encoded_as else "")
    if reason:
        return ReadableSources((), reason)
    try:
        shards = [with_source(shard) for shard in _one_per_box(tensor.shards)]
    except ReadError as error:
        return ReadableSources((), said(error))
    found = tuple(shard.source for shard in shards if shard.source is not None)
    if part.rank is not None:
        return ReadableSources(found, "" if len(found) == len(shards) else "no file here holds it")
    wrong = cover_problem(replace(tensor, shards=tuple(shards)), part.name)
    if wrong is None:
        return ReadableSources(found)
    return ReadableSources(found if wrong.kind is Code.TENSOR_GAP else (), wrong.message)


def located(tensor: Tensor) -> Tensor:
    """Add a source to every shard of a tensor whose bytes are here.

    Raises:
        ReadError: an item is damaged.
    """
    return replace(tensor, shards=tuple(map(with_source, tensor.shards)))


def no_numbers(tensor: Tensor) -> str:
    """Why the bytes of a tensor are no numbers; empty if they are."""
    if tensor.kind == "meta":
        return "was saved without values (meta)"
    if tensor.coded is not None and (tensor.are_codes or not is_floating(tensor.dtype)):
        return f"holds {tensor.coded.words}: no values, so nothing is judged"
    return f"{short(tensor.dtype)} is not decoded" if tensor.dtype in NO_NUMBERS else ""


def _one_per_box(shards: Iterable[Shard]) -> list[Shard]:
    """One shard for each region, if possible with its bytes here."""
    found: dict[Box, Shard] = {}
    for shard in shards:
        known = found.setdefault(shard.box, shard)
        if not known.is_here:
            found[shard.box] = shard
    return list(found.values())


def together(problems: Iterable[tuple[str, str]]) -> str:
    """Join the problems of several names; a problem that several share appears once."""
    found = grouped((pair for pair in problems if pair[1]), lambda pair: pair[1])
    return "; ".join(f"{', '.join(name for name, _ in own)}: {problem}" for problem, own in found.items())


def said(error: ReadError) -> str:
    """An error as the text of a row: the file's name without its folder, and the reason."""
    return f"{original_of(error.path).name}: {error.reason}" if error.path else error.reason
