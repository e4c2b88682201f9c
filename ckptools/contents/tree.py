"""Every key of a checkpoint as a row: kind, shape, dtype, size and layout of tensors, short values; none are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from math import prod
from struct import calcsize, unpack
from typing import Any

from ckptools.contents.pickled_bytes import pickled_text
from ckptools.contents.record import KeyRow, Keys, KeySection, Totals
from ckptools.keys.entries import EVERYTHING, Entry, Selection, asks_for_private, entries_of, is_private
from ckptools.keys.rank_leaves import LONG, fingerprint
from ckptools.keys.sharding import placement
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows
from ckptools.model.tensor import Tensor
from ckptools.model.values import (
    NUMPY_CODES,
    Device,
    Global,
    NumpyArray,
    NumpyDtype,
    NumpyScalar,
    Opaque,
    TorchName,
    scalar,
)
from ckptools.text import MAX_BITS, clip, plural, shape
from ckptools.training_state.judgement import verdict_of
from ckptools.training_state.section_size import storage_identity
from ckptools.training_state.sections import sections_of, sections_of_kind

MAX_FULL = 10_000
"""At most this many items of a list or array, or characters of a text, are shown in full."""

MAX_TEXT = 200
"""At most this many characters are a short text."""

TYPES = (
    (Tensor, "tensor"), (bool, "bool"), (int, "int"), (float, "float"), (str, "str"), ((bytes, bytearray), "bytes"),
    (Mapping, "dict"), (list, "list"), (tuple, "tuple"), ((set, frozenset), "set"), (timedelta, "timedelta"),
    (date, "date"), (NumpyArray, "array"), (NumpyScalar, "number"), (Global, "class"), (time, "time"), (range, "range"),
    (complex, "complex"), (slice, "slice"), ((TorchName, Device, NumpyDtype), "name"),
)  # fmt: skip


SHOWN_AS_TEXT = (date, time, complex, range, slice, TorchName, Device, NumpyDtype)
"""Short values that JSON has no form for."""


def keys_of(ck: Checkpoint, wanted: Selection = EVERYTHING, private: bool = False) -> Keys:
    """List the selected keys of a checkpoint with the facts of each.

    Private values, whose names begin with `_`, come on request, or if a glob spells the name.

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
    shown = (as_data(value), "", "") if short else (None, "", described(value))
    return KeyRow(entry.name, entry.section, entry.kind, type_of(value), shape, dtype, 0, 0, "", *shown)


def tied_names(ck: Checkpoint) -> dict[str, str]:
    """Names of tied tensors, each with the name of the first key of its section that has the same bytes."""
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
    """Totals over some keys; tied tensors count once."""
    tensors = [row for row in rows if row.type == "tensor"]
    once = {row.storage: row for row in tensors}.values() if any(row.tied for row in tensors) else tensors
    return Totals(len(tensors), sum(row.params for row in once), sum(row.bytes for row in once))


def _sections(ck: Checkpoint, rows: Sequence[KeyRow]) -> Iterator[KeySection]:
    only_model = len(sections_of_kind(ck, "model")) == 1
    of: dict[str, list[KeyRow]] = {}
    for row in rows:
        of.setdefault(row.section, []).append(row)
    for section in sections_of(ck):
        if section.name in of:
            prefix = "" if only_model and section.kind == "model" else section.name
            yield KeySection(section.name, section.kind, prefix, *totals(of.pop(section.name)))


# -- values -----------------------------------------------------------------------------------------------------------


def type_of(value: Any) -> str:
    """The type of a value in a word: `tensor`, `int`, `list`; `object` for a class that is not rebuilt."""
    value = scalar(value)
    if value is None:
        return "null"
    return next((name for kinds, name in TYPES if isinstance(value, kinds)), "object")


def is_short(value: Any) -> bool:
    """Whether a value fits in a row."""
    value = scalar(value)
    if isinstance(value, (list, tuple)):
        return len(value) <= LONG and all(map(_is_short_scalar, value))
    return (isinstance(value, Mapping) and not value) or _is_short_scalar(value)


def _is_short_scalar(value: Any) -> bool:
    value = scalar(value)
    if type(value) is int:
        return value.bit_length() <= MAX_BITS
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return value is None or isinstance(value, (bool, float, timedelta, *SHOWN_AS_TEXT))


def as_data(value: Any) -> Any:
    """A short value for JSON: seconds for a timedelta, the name for a dtype, a list for a tuple."""
    value = scalar(value)
    if isinstance(value, (list, tuple)):
        return [as_data(item) for item in value]
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, SHOWN_AS_TEXT) else value


def full_value(value: Any) -> Any:
    """A whole value for JSON; None for an object of a foreign class, or if it is too large.

    An array becomes its elements in the order of the file, bytes become hexadecimal digits.
    """
    value = scalar(value)
    if isinstance(value, NumpyArray):
        return _elements(value)
    if isinstance(value, (list, tuple)):
        return [as_data(v) if _is_short_scalar(v) else described(v) for v in value] if len(value) <= MAX_FULL else None
    if isinstance(value, (str, bytes, bytearray)) and len(value) <= MAX_FULL:
        return value if isinstance(value, str) else value.hex()
    return as_data(value) if is_short(value) else None


def _elements(array: NumpyArray) -> list[Any] | None:
    code, count = NUMPY_CODES.get(array.dtype.lstrip("<>|=")), prod(array.shape)
    order = ">" if array.dtype.startswith(">") else "<"
    if code is None or count > MAX_FULL or calcsize(f"{order}{count}{code}") != len(array.data):
        return None
    return list(unpack(f"{order}{count}{code}", array.data))


def described(value: Any) -> str:
    """Describe a value that is not short: `625 integers, crc 5f2c90ab`, `numpy <u4 [624]`, the name of a class."""
    value = scalar(value)
    crc = fingerprint(value)
    behind = "" if crc is None else f", crc {crc:08x}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return plural(len(value), "value" if crc is None else "integer") + behind
    if isinstance(value, NumpyArray):
        return f"numpy {value.dtype} {shape(value.shape)}{behind}"
    if isinstance(value, (bytes, bytearray)):
        inside = pickled_text(value)
        return plural(len(value), "byte") + (f", a pickle of {inside}" if inside else "")
    if isinstance(value, str):
        return f"{len(value)} characters: {clip(value, MAX_TEXT)}"
    if isinstance(value, int):
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, Opaque):
        return clip(value.name, MAX_TEXT)
    other = value.dotted if isinstance(value, Global) else f"numpy {getattr(value, 'dtype', type(value).__name__)}"
    return clip(other, MAX_TEXT)
