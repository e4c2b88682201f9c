"""Every key of a checkpoint as a row: kind, shape, dtype, size and layout; structure only, no values are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptools.contents.entries import Entry, entries_of
from ckptools.contents.private_values import asks_for_private, is_private
from ckptools.contents.selection import EVERYTHING, Selection
from ckptools.contents.sharding import placement
from ckptools.contents.values import as_data, described, is_short, type_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.keys import KeyRow, Keys, SectionRow, Totals
from ckptools.model.rows import Rows
from ckptools.model.tensor import Tensor
from ckptools.model.values import NumpyArray
from ckptools.training_state.sections import sections_of, sections_of_kind, storage_identity
from ckptools.training_state.verdict import verdict_of


def keys_of(ck: Checkpoint, wanted: Selection = EVERYTHING, private: bool = False) -> Keys:
    """The keys of a checkpoint that are wanted, each with what is known of it.

    Args:
        ck: the checkpoint.
        wanted: which of its keys.
        private: also those of values whose names begin with `_`, which are left out unless a glob spells such a name.

    Raises:
        UsageError: it has no such section.
    """
    chosen = wanted.of(ck)
    asked = private or asks_for_private(wanted.include)
    listed = [entry for entry in chosen if asked or not is_private(entry)]
    rows = Rows(key_rows(ck, listed))
    sections = Rows(_sections(ck, rows))
    return Keys(ck.path, ck.name, verdict_of(ck).whole, *totals(rows), len(chosen) - len(listed), sections, rows)


def key_rows(ck: Checkpoint, entries: Iterable[Entry]) -> Iterator[KeyRow]:
    """A row for each of some entries of a checkpoint."""
    tied = tied_names(ck)
    for entry in entries:
        if isinstance(entry.value, Tensor):
            yield _tensor_row(entry, entry.value, tied.get(entry.name, ""))
        else:
            yield _value_row(entry)


def _tensor_row(entry: Entry, tensor: Tensor, tied: str) -> KeyRow:
    known = tensor.shape, tensor.dtype, tensor.numel, tensor.nbytes, placement(tensor)
    return KeyRow(entry.name, entry.section, entry.kind, "tensor", *known, None, tied, tensor.note)


def _value_row(entry: Entry) -> KeyRow:
    value, short = entry.value, is_short(entry.value)
    shape, dtype = (value.shape, value.dtype) if isinstance(value, NumpyArray) else (None, "")
    told = (as_data(value), "", "") if short else (None, "", described(value))
    return KeyRow(entry.name, entry.section, entry.kind, type_of(value), shape, dtype, 0, 0, "", *told)


def tied_names(ck: Checkpoint) -> dict[str, str]:
    """Names of tensors whose bytes an earlier key of their section has too, each with the name of the first."""
    first: dict[tuple[str, object], str] = {}
    found: dict[str, str] = {}
    for entry in entries_of(ck):
        identity = storage_identity(entry.value) if isinstance(entry.value, Tensor) else None
        if identity is not None:
            name = first.setdefault((entry.section, identity), entry.name)
            if name != entry.name:
                found[entry.name] = name
    return found


def totals(rows: Iterable[KeyRow]) -> Totals:
    """What some keys have together; of tied tensors only one counts."""
    tensors = [row for row in rows if row.type == "tensor"]
    once = {row.storage: row for row in tensors}.values() if any(row.tied for row in tensors) else tensors
    return Totals(len(tensors), sum(row.params for row in once), sum(row.bytes for row in once))


def _sections(ck: Checkpoint, rows: Sequence[KeyRow]) -> Iterator[SectionRow]:
    only_model = len(sections_of_kind(ck, "model")) == 1
    of: dict[str, list[KeyRow]] = {}
    for row in rows:
        of.setdefault(row.section, []).append(row)
    for section in sections_of(ck):
        if section.name in of:
            prefix = "" if only_model and section.kind == "model" else section.name
            yield SectionRow(section.name, section.kind, prefix, *totals(of.pop(section.name)))
