"""Which tensors figures are taken of: those of the model, unless a section is named."""

from __future__ import annotations

from dataclasses import replace

from ckptools.checks.statistics.reading import Part, of_rank
from ckptools.contents.entries import Entry
from ckptools.contents.selection import Selection
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Shard, Tensor
from ckptools.text import plural
from ckptools.training_state.sections import sections_of_kind


def tensors_chosen(ck: Checkpoint, selection: Selection) -> list[Entry]:
    """The tensors that were asked for; where no section is named, those of the model, if there is one.

    Raises:
        UsageError: there is no such section.
    """
    section = selection.section or ("model" if sections_of_kind(ck, "model") else "")
    return _tensors(ck, replace(selection, section=section))


def elsewhere(ck: Checkpoint, selection: Selection) -> str:
    """Where there are tensors that match, when none of the model does; empty where nothing matches."""
    found = _tensors(ck, selection)
    kinds = list(dict.fromkeys(entry.kind for entry in found))
    return f"{plural(len(found), 'tensor')} elsewhere: --section {' or '.join(kinds)}" if found else ""


def _tensors(ck: Checkpoint, selection: Selection) -> list[Entry]:
    return [entry for entry in selection.of(ck) if isinstance(entry.value, Tensor)]


def parts_of(ck: Checkpoint, selection: Selection, per_rank: bool = False) -> list[Part]:
    """What figures are taken of: the tensors that were asked for, or what each rank holds of them.

    Raises:
        UsageError: there is no such section.
    """
    wholes = [Part(entry.name, entry.section, entry.value) for entry in tensors_chosen(ck, selection)]
    return [part for whole in wholes for part in _of_each_rank(whole)] if per_rank else wholes


def _of_each_rank(whole: Part) -> list[Part]:
    """What each rank holds of a tensor; the whole where the files do not tell which rank does."""
    own: dict[int, list[Shard]] = {}
    for shard in whole.tensor.shards:
        if shard.rank is not None:
            own.setdefault(shard.rank, []).append(shard)
    return [of_rank(whole, rank, shards) for rank, shards in sorted(own.items())] or [whole]
