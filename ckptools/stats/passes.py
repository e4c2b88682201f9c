"""Read the bytes of many tensors once, in threads: each tensor by itself, or several tensors region by region.

A tensor that cannot be read is noted, and the others are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import prod
from threading import Event
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ckptools.dtypes import ITEMSIZE, NO_NUMBERS, is_floating, short
from ckptools.errors import ReadError, original_of
from ckptools.files.opening import OpenFiles
from ckptools.keys.entries import Entry, Selection, tensor_entries
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover, cover_problem, repeat_problem
from ckptools.model.problems import Code
from ckptools.model.records import grouped
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.option import spelled
from ckptools.tensor_io import fetch_ahead
from ckptools.tensor_io.dcp_items import with_source
from ckptools.tensor_io.elements import Piece, pieces_of, raw_bands, side_by_side
from ckptools.tensor_io.fetch_ahead import Progress, in_ranks, parts_of_all, thread_count
from ckptools.tensor_io.numbers import Raw, decoded, halves
from ckptools.tensor_io.read import extent
from ckptools.tensor_io.slicing import bands_of
from ckptools.text import plural
from ckptools.training_state.models import the_models
from ckptools.training_state.sections import Section, SectionKind, sections_of_kind

# -- select the tensors to read, and one copy of each region -----------------------------------------------------------


class MeasuredPart(NamedTuple):
    """A tensor to compute statistics of, or one rank's part of it: a tensor with the shards of that rank.

    Attributes:
        rank: rank of the part; None for a whole tensor.
        kind: of its section.
    """

    name: str
    section: str
    tensor: Tensor
    rank: int | None = None
    kind: SectionKind = "model"

    @classmethod
    def of(cls, entry: Entry) -> MeasuredPart:
        """Make a part of the whole tensor of a key."""
        return cls(entry.name, entry.section, entry.value, kind=entry.kind)

    @property
    def numel(self) -> int:
        """Number of elements that the shape states."""
        return self.tensor.numel if self.rank is None else sum(s.box.numel for s in self.tensor.shards)

    @property
    def nbytes(self) -> int:
        """Number of bytes that shape and dtype state."""
        return self.numel * ITEMSIZE[self.tensor.dtype]


def tensors_chosen(ck: Checkpoint, selection: Selection) -> list[Entry]:
    """Find the selected tensors; if no section is selected, only those of the model to look at, if there is a model.

    Raises:
        UsageError: the selected section does not exist; or nothing says which of several models was trained.
    """
    if selection.section not in ("", "model") or not sections_of_kind(ck, "model"):
        return _tensors(ck, selection)
    names = {section.name for section in the_models(ck)}
    return [e for e in _tensors(ck, replace(selection, section="model")) if e.section in names]


def elsewhere(ck: Checkpoint, selection: Selection) -> str:
    """Name sections with matching tensors, for when no tensor of the model matches; empty if nothing matches."""
    found = _tensors(ck, selection)
    kinds = list(dict.fromkeys(entry.section if entry.kind == "model" else entry.kind for entry in found))
    return f"{plural(len(found), 'tensor')} elsewhere: {spelled('section')} {' or '.join(kinds)}" if found else ""


def _tensors(ck: Checkpoint, selection: Selection) -> list[Entry]:
    return [entry for entry in selection.of(ck) if isinstance(entry.value, Tensor)]


def by_parameter(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Map each parameter to its only entry, leaving out parameters with several entries."""
    found = grouped(entries, lambda entry: entry.parameter)
    return {parameter: own[0] for parameter, own in found.items() if len(own) == 1}


def parts_of(ck: Checkpoint, selection: Selection, per_rank: bool = False) -> list[MeasuredPart]:
    """Make parts of the selected tensors: whole tensors, or one part per rank."""
    wholes = [MeasuredPart.of(entry) for entry in tensors_chosen(ck, selection)]
    return [part for whole in wholes for part in of_each_rank(whole)] if per_rank else wholes


def parts_of_models(ck: Checkpoint, models: Iterable[Section]) -> list[MeasuredPart]:
    """Make parts of the tensors of some models; of every tensor of a checkpoint without a model."""
    names = {section.name for section in models}
    entries = (e for e in tensor_entries(ck) if not names or (e.kind == "model" and e.section in names))
    return [MeasuredPart.of(entry) for entry in entries]


def of_each_rank(whole: MeasuredPart) -> list[MeasuredPart]:
    """Split a tensor by rank; keep it whole if the ranks are unknown."""
    own: dict[int, list[Shard]] = {}
    for shard in whole.tensor.shards:
        if shard.rank is not None:
            own.setdefault(shard.rank, []).append(shard)
    return [of_rank(whole, rank, shards) for rank, shards in sorted(own.items())] or [whole]


def of_rank(whole: MeasuredPart, rank: int, shards: Iterable[Shard]) -> MeasuredPart:
    """Make the part of a tensor that consists of the given shards of one rank."""
    return whole._replace(tensor=replace(whole.tensor, shards=tuple(shards)), rank=rank)


class ReadableSources(NamedTuple):
    """Where the readable bytes of a part lie, one copy of each region, and why others cannot be read."""

    sources: tuple[Source, ...]
    problem: str = ""


def readable(part: MeasuredPart) -> ReadableSources:
    """Find where the bytes of a part lie, and why some cannot be read."""
    tensor = part.tensor
    reason = no_numbers(tensor) or (tensor.note if part.rank is None or tensor.encoded_as else "")
    if reason:
        return ReadableSources((), reason)
    try:
        shards = [with_source(shard) for shard in _one_per_box(tensor.shards)]
    except ReadError as error:
        return ReadableSources((), said(error))
    found = tuple(shard.source for shard in shards if shard.source is not None)
    if any(shard.encoded is not None for shard in shards):
        return ReadableSources((), "is stored as codes, of whose values no figures are made")
    if part.rank is not None:
        return ReadableSources(found, "" if len(found) == len(shards) else "no file here holds it")
    wrong = cover_problem(replace(tensor, shards=tuple(shards)), part.name)
    if wrong is None:
        return ReadableSources(found)
    return ReadableSources(found if wrong.kind is Code.TENSOR_GAP else (), wrong.message)


def readable_regions(part: MeasuredPart) -> tuple[Tensor | None, str]:
    """Locate the shards of a part that is read region by region, and say why some cannot be read.

    None in place of the tensor if none can, and if its strides repeat elements too often.
    """
    found = readable(part)
    tensor = located(part.tensor) if found.sources or not part.numel else None
    again = repeat_problem(tensor) if tensor is not None else ""
    return (None, again) if again else (tensor, found.problem)


def located(tensor: Tensor) -> Tensor:
    """Find where the bytes of every shard lie, if its file exists.

    Raises:
        ReadError: an item is damaged.
    """
    return replace(tensor, shards=tuple(map(with_source, tensor.shards)))


def no_numbers(tensor: Tensor) -> str:
    """Say why a tensor's bytes cannot be read as numbers; empty if they can."""
    if tensor.kind == "meta":
        return "was saved without values (meta)"
    if tensor.coded is not None and (tensor.are_codes or not is_floating(tensor.dtype)):
        return f"holds {tensor.coded.words}: no values, so nothing is judged"
    return f"{short(tensor.dtype)} is not decoded" if tensor.dtype in NO_NUMBERS else ""


def _one_per_box(shards: Iterable[Shard]) -> list[Shard]:
    """Choose one shard for each region, one with bytes if possible."""
    found: dict[Box, Shard] = {}
    for shard in shards:
        known = found.setdefault(shard.box, shard)
        if not known.is_here:
            found[shard.box] = shard
    return list(found.values())


def together(problems: Iterable[tuple[str, str]]) -> str:
    """Join problems, each `(name, problem)`; names that share a problem are listed together."""
    found = grouped((pair for pair in problems if pair[1]), lambda pair: pair[1])
    return "; ".join(f"{', '.join(name for name, _ in own)}: {problem}" for problem, own in found.items())


def said(error: ReadError) -> str:
    """Word an error for a row: the file's name without its folder, and the reason."""
    return f"{original_of(error.path).name}: {error.reason}" if error.path else error.reason


# -- the pass ----------------------------------------------------------------------------------------------------------


PIECE = 16 << 20
"""Smallest piece of a tensor, in bytes, for one thread to work on."""

MAX_PIECES = 4096
"""At most about this many pieces for all tensors of a large checkpoint, to keep the list short."""

Result = TypeVar("Result")
Part = TypeVar("Part", bound="Piece | SharedRegion")

Values = npt.NDArray[Any]


@dataclass
class PassResult(Generic[Result]):
    """Results of the readable pieces of one tensor in order, and why others could not be read."""

    results: list[Result] = field(default_factory=list)
    problem: str = ""
    nbytes: int = 0


def _read_parts(
    parts: Sequence[tuple[int, Part]],
    read: Callable[[int, Part, OpenFiles, Event], Result],
    reads: Callable[[Part], Iterable[fetch_ahead.Part]],
    found: Sequence[PassResult[Result]],
    names: Sequence[str],
    jobs: int | None,
    progress: Progress | None,
) -> None:
    """Read the parts of rows in threads, and add each result or problem to its row.

    Each part comes with the number of its row. `read` reads a part, and stops early once the event is set; `reads`
    lists the part's byte ranges. `found` collects the results of each row. `progress` is called with the row's name.
    """
    given_up = Event()

    def one(work: tuple[int, Part]) -> tuple[Result | None, str]:
        number, part = work
        try:
            result = read(number, part, files, given_up)
        except ReadError as error:
            return None, said(error)
        if progress is not None:
            progress(part.nbytes, names[number])
        return result, ""

    with OpenFiles() as files:
        threads = thread_count(jobs)
        results = in_ranks(one, parts, threads, lambda p: p[1].nbytes, given_up.set, lambda p: reads(p[1]))
    for (number, part), (result, problem) in zip(parts, results, strict=True):
        row = found[number]
        row.problem = row.problem or problem
        if result is not None:
            row.results.append(result)
            row.nbytes += part.nbytes


# -- each tensor by itself ---------------------------------------------------------------------------------------------


def over(
    arrays: Sequence[Sequence[Source]],
    names: Sequence[str],
    collect: Callable[[int, Piece, Iterator[Raw]], Result],
    jobs: int | None,
    progress: Progress | None,
) -> list[PassResult[Result]]:
    """Read every array once, and collect its elements.

    An array is a list of byte ranges, with a name for `progress`. `collect` gets the number of an array and the bands
    of one of its pieces, and makes the piece's result.
    """
    found: list[PassResult[Result]] = [PassResult() for _ in arrays]
    pieces = list(_pieces(arrays, found))

    def read(number: int, piece: Piece, files: OpenFiles, given_up: Event) -> Result:
        with files.open(piece.source.path) as file:
            return collect(number, piece, takewhile(lambda _: not given_up.is_set(), raw_bands(piece, file)))

    def reads(piece: Piece) -> list[fetch_ahead.Part]:
        source = piece.source
        return [(source.path, source.offset, source.offset + extent(source))]

    _read_parts(pieces, read, reads, found, names, jobs, progress)
    return found


def _pieces(arrays: Sequence[Sequence[Source]], found: Sequence[PassResult[Result]]) -> Iterator[tuple[int, Piece]]:
    """Yield the pieces of every array, with its number; note a problem for an array that cannot be split."""
    total = sum(prod(s.shape) * ITEMSIZE[s.dtype] for sources in arrays for s in sources)
    limit = max(PIECE, total // MAX_PIECES)
    for number, sources in enumerate(arrays):
        for source in sources:
            try:
                yield from ((number, piece) for piece in pieces_of(source, limit))
            except ReadError as error:
                found[number].problem = said(error)


# -- several tensors, in regions that all of them have -----------------------------------------------------------------


class SharedRegion(NamedTuple):
    """A region to read from several tensors, with the shards of each that cover it without overlap."""

    box: Box
    shards: tuple[tuple[Shard, ...], ...]

    @property
    def dtypes(self) -> list[str]:
        """The dtype of each tensor."""
        return [own[0].source.dtype for own in self.shards if own[0].source is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the region in all tensors."""
        return self.box.numel * sum(ITEMSIZE[dtype] for dtype in self.dtypes)


def shared_regions(tensors: Sequence[Tensor]) -> list[SharedRegion]:
    """Find the regions of the first tensor's shards that the other tensors also have, each once.

    All tensors have one shape; two shards of one tensor are the same region or do not overlap.
    """
    first, *others = [{s.box: s for s in tensor.found if s.box.numel} for tensor in tensors]
    found = ((box, [_meeting(box, other) for other in others]) for box in first)
    covered = ((box, rest) for box, rest in found if all(_covers(box, shards) for shards in rest))
    return [SharedRegion(box, ((first[box],), *rest)) for box, rest in covered]


def _meeting(box: Box, shards: dict[Box, Shard]) -> tuple[Shard, ...]:
    """Find the shards that overlap a region; only one if it is the same region."""
    if box in shards:
        return (shards[box],)
    return tuple(shard for at, shard in shards.items() if at.intersect(box) is not None)


def _covers(box: Box, shards: Sequence[Shard]) -> bool:
    inner = [shard.box.intersect(box) for shard in shards]
    return cover(box.sizes, {part.seen_from(box) for part in inner if part is not None}).exact


def over_regions(
    regions: Sequence[Sequence[SharedRegion]],
    names: Sequence[str],
    collect: Callable[[int, SharedRegion, Iterator[tuple[int, list[Values]]]], Result],
    jobs: int | None,
    progress: Progress | None,
) -> list[PassResult[Result]]:
    """Read every region once, and collect its values.

    Each row has regions, and a name for `progress`. `collect` gets the number of a row, a region or part of one, and
    its bands, and makes a result. A band is the number of its first element in the region, in row-major order, and a
    flat array of numbers for each tensor.
    """
    found: list[PassResult[Result]] = [PassResult() for _ in regions]
    parts = [(n, region._replace(box=box)) for n, own in enumerate(regions) for region in own for box in _parts(region)]

    def read(number: int, region: SharedRegion, files: OpenFiles, given_up: Event) -> Result:
        dtypes = region.dtypes
        raw = side_by_side(region.box, list(zip(dtypes, region.shards, strict=True)), files)
        bands = takewhile(lambda _: not given_up.is_set(), raw)
        return collect(number, region, ((start, list(map(numbers, own, dtypes))) for start, own in bands))

    def reads(region: SharedRegion) -> list[fetch_ahead.Part]:
        shards = (shard for shards in region.shards for shard in shards)
        return parts_of_all(shard for shard in shards if shard.box.intersect(region.box) is not None)

    _read_parts(parts, read, reads, found, names, jobs, progress)
    return found


def _parts(region: SharedRegion) -> Iterator[Box]:
    return bands_of(region.box, max(PIECE * region.box.numel // max(region.nbytes, 1), 1))


def numbers(raw: Values, dtype: str) -> Values:
    """Convert raw elements to numbers that can be summed: complex ones to magnitudes, booleans to 0 and 1."""
    if dtype == "bool":
        flags: Values = raw != 0
        return flags.view("u1")
    if dtype == "complex32":
        return _magnitudes(raw.view("<f2").astype("<f4").view("<c8"))
    if dtype == "float16":
        return halves(raw)
    values: Values = decoded(raw, dtype)
    return _magnitudes(values) if values.dtype.kind == "c" else values


def _magnitudes(values: Values) -> Values:
    """Magnitudes of complex numbers; NaN if either part is NaN, even if the other is infinite."""
    found: Values = np.hypot(values.real.astype("f8"), values.imag.astype("f8"))
    found[np.isnan(values.real) | np.isnan(values.imag)] = np.nan
    return found
