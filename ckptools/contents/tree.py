"""`tree`: make a row for every key, with short values, and dtype, shape and layout of tensors; reads no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from itertools import islice
from math import prod
from pathlib import Path
from struct import calcsize, unpack
from typing import Any

from ckptools.contents.record import KeyRow, Keys, KeySection, Totals
from ckptools.display.tables import object_text, value_text
from ckptools.errors import CkptoolsError
from ckptools.keys.entries import (
    EVERYTHING,
    LONG,
    Entry,
    Selection,
    asks_for_private,
    entries_of,
    fingerprint,
    is_plain,
    is_private,
    is_run,
    leaves_of,
)
from ckptools.keys.sharding import placement
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows, grouped
from ckptools.model.tensor import Tensor
from ckptools.model.tree import (
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
from ckptools.rules.verdict import verdict_of
from ckptools.text import MAX_BITS, KeyPath, clip, fqn_of, plural, shape
from ckptools.training_state.models import prefix_of
from ckptools.training_state.sections import sections_of, storage_identity

# -- bytes in a checkpoint that `pickle.dumps` or `torch.save` wrote: position of a data loader, extra state of a module
# Transformer Engine saves the scales and amax histories of FP8 in `_extra_state`: an `io.BytesIO` with a torch.save
# archive, or, in later versions, a uint8 tensor with a pickle.
# Sources: torch/nn/modules/module.py (`get_extra_state`); Transformer Engine, pytorch/module/base.py.


MAX_BYTES = 1 << 20
"""Longer bytes are not parsed."""

EXTRA_STATE = "_extra_state"
"""Ending of the key of a module's extra state."""

BYTES_IO = "_io.BytesIO"

MOST = 12
"""At most this many values of pickled bytes are shown in a line."""


def pickled_text(data: bytes | bytearray) -> str:
    """List the values in pickled bytes, such as `step 2, epoch 0`; "" for other bytes. The pickle is not run.

    Source: torchtitan/components/dataloader.py, `ParallelAwareDataloader.state_dict`.
    """
    if not (2 < len(data) <= MAX_BYTES and data[:1] == b"\x80" and data[-1:] == b"."):
        return ""
    from ckptools.pickles.archive import load_all
    from ckptools.pickles.machine import Machine

    try:
        tree = load_all(Machine(bytes(data)), Path())
    except CkptoolsError:
        return ""
    shown = [_brief(fqn_of(path), value) for path, value in islice(leaves_of(tree), MOST + 1)]
    return ", ".join(shown[:MOST]) + (" and more" if len(shown) > MOST else "")


def _brief(name: str, value: Any) -> str:
    value = scalar(value)
    if isinstance(value, (list, tuple)) and is_run(value) and len(value) > MOST:
        shown = plural(len(value), "value")
    else:
        brief = is_plain(value) or is_run(value)
        shown = clip(repr(value), 40) if brief else clip(getattr(value, "name", type(value).__name__), 40)
    return f"{clip(name, 60)} {shown}".strip()


# -- each value in an extra state -------------------------------------------------------------------------------------


MAX_INSIDE = 1000
"""At most this many values of one extra state get rows."""

MAX_TOTAL = 64 << 20
"""At most this many bytes of extra states are parsed for one table."""


def with_inside(entries: Iterable[Entry], original: Path) -> Iterator[tuple[Entry, bool]]:
    """Yield `(entry, False)` for each entry, and after an extra state `(value, True)` for each value in it.

    An extra state is an `io.BytesIO`, whose own fields are then left out, or a uint8 tensor named `_extra_state`.
    Errors about its contents name the file `original`.
    """
    above: KeyPath = ()
    left = MAX_TOTAL
    for entry in entries:
        if above and entry.path[: len(above)] == above:
            continue
        yield entry, False
        data = _saved_in(entry) if left > 0 else None
        left -= len(data or b"")
        inside = [] if data is None else _inside(entry, data, original)
        above = entry.path if inside else ()
        yield from ((found, True) for found in inside)


def _inside(entry: Entry, data: bytes, original: Path) -> list[Entry]:
    from ckptools.pickles.archive import tree_in

    found = islice(leaves_of(tree_in(data, original)), MAX_INSIDE)
    below = (entry._replace(name=fqn_of((entry.name, *path)), parameter="", value=value) for path, value in found)
    return [inside for inside in below if inside.name != entry.name]


def _saved_in(entry: Entry) -> bytes | None:
    """Return the bytes of an extra state; None for other values, and if the bytes cannot be read."""
    value = entry.value
    if isinstance(value, Opaque) and value.name == BYTES_IO:
        data = value.state[0] if isinstance(value.state, tuple) and value.state else None
        return data if isinstance(data, bytes) and len(data) <= MAX_BYTES else None
    named = bool(entry.path) and str(entry.path[-1]).endswith(EXTRA_STATE)
    if not named or not isinstance(value, Tensor) or value.dtype != "uint8" or not 0 < value.numel <= MAX_BYTES:
        return None
    from ckptools.tensor_io.read import to_numpy  # imports numpy

    try:
        return bytes(to_numpy(value))
    except CkptoolsError:
        return None


# -- rows of keys ------------------------------------------------------------------------------------------------------


MAX_FULL = 10_000
"""At most this many items of a list or array, or characters of a text, are shown in full."""

MAX_TEXT = 200
"""A text of at most this many characters is short."""

MAX_MEMBERS = 16
"""A set with at most this many values is spelled out."""

TYPES = (
    (Tensor, "tensor"), (bool, "bool"), (int, "int"), (float, "float"), (str, "str"), ((bytes, bytearray), "bytes"),
    (Mapping, "dict"), (list, "list"), (tuple, "tuple"), ((set, frozenset), "set"), (timedelta, "timedelta"),
    (date, "date"), (NumpyArray, "array"), (NumpyScalar, "number"), (Global, "class"), (time, "time"), (range, "range"),
    (complex, "complex"), (slice, "slice"), ((TorchName, Device, NumpyDtype), "name"),
)  # fmt: skip


SHOWN_AS_TEXT = (date, time, complex, range, slice, TorchName, Device, NumpyDtype)
"""Types of short values that JSON cannot express, and that become text."""


def keys_of(ck: Checkpoint, wanted: Selection = EVERYTHING, private: bool = False) -> Keys:
    """List the selected keys of a checkpoint.

    Values named `_...` are listed if `private`, or if a glob spells the name.

    Raises:
        UsageError: a selected section does not exist.
    """
    chosen = wanted.of(ck)
    asked = private or asks_for_private(wanted.include)
    listed = [entry for entry in chosen if asked or not is_private(entry)]
    rows = Rows(key_rows(ck, listed))
    sections = Rows(_sections(ck, rows))
    return Keys(ck.path, ck.name, verdict_of(ck).whole, *totals(rows), len(chosen) - len(listed), sections, rows)


def key_rows(ck: Checkpoint, entries: Iterable[Entry]) -> Iterator[KeyRow]:
    """Make a row for each given entry of a checkpoint."""
    tied = tied_names(ck)
    for entry in entries:
        if isinstance(entry.value, Tensor):
            yield _tensor_row(entry, entry.value, tied.get(entry.name, ""))
        else:
            value, short = entry.value, is_short(entry.value)
            shape, dtype = (value.shape, value.dtype) if isinstance(value, NumpyArray) else (None, "")
            shown = (as_data(value), "", "") if short else (None, "", described(value))
            yield KeyRow(entry.name, entry.section, entry.kind, type_of(value), shape, dtype, 0, 0, "", *shown)


def _tensor_row(entry: Entry, tensor: Tensor, tied: str) -> KeyRow:
    known = tensor.shape, tensor.dtype, tensor.numel, tensor.nbytes, placement(tensor)
    return KeyRow(entry.name, entry.section, entry.kind, "tensor", *known, None, tied, tensor.note)


def tied_names(ck: Checkpoint) -> dict[str, str]:
    """Map each tied tensor to the first key of its section with the same storage."""
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
    """Count tensors, elements and bytes of some keys; tied tensors count once."""
    tensors = [row for row in rows if row.type == "tensor"]
    once = {row.storage: row for row in tensors}.values() if any(row.tied for row in tensors) else tensors
    return Totals(len(tensors), sum(row.params for row in once), sum(row.bytes for row in once))


def _sections(ck: Checkpoint, rows: Sequence[KeyRow]) -> Iterator[KeySection]:
    of = grouped(rows, lambda row: row.section)
    for section in sections_of(ck):
        if section.name in of:
            yield KeySection(section.name, section.kind, prefix_of(ck, section), *totals(of.pop(section.name)))


# -- values ------------------------------------------------------------------------------------------------------------


def type_of(value: Any) -> str:
    """Name the type of a value in a word: `tensor`, `int`, `list`; `object` for classes that are not rebuilt."""
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
    """Convert a short value for JSON: a timedelta to seconds, a dtype to its name, a tuple to a list."""
    value = scalar(value)
    if isinstance(value, (list, tuple)):
        return [as_data(item) for item in value]
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, SHOWN_AS_TEXT) else value


def full_value(value: Any) -> Any:
    """Convert a whole value for JSON; None for an object of a foreign class, or if it is too large.

    An array becomes its elements in the order of the file, bytes become hexadecimal digits.
    """
    value = scalar(value)
    if isinstance(value, NumpyArray):
        code, count = NUMPY_CODES.get(value.dtype.lstrip("<>|=")), prod(value.shape)
        order = ">" if value.dtype.startswith(">") else "<"
        if code is None or count > MAX_FULL or calcsize(f"{order}{count}{code}") != len(value.data):
            return None
        return list(unpack(f"{order}{count}{code}", value.data))
    if isinstance(value, (list, tuple)):
        return [as_data(v) if _is_short_scalar(v) else described(v) for v in value] if len(value) <= MAX_FULL else None
    if isinstance(value, (str, bytes, bytearray)) and len(value) <= MAX_FULL:
        return value if isinstance(value, str) else value.hex()
    return as_data(value) if is_short(value) else None


def described(value: Any) -> str:
    """Describe a long value: `625 integers, crc 5f2c90ab`, `numpy <u4 [624]`, or the name of its class."""
    value = scalar(value)
    crc = fingerprint(value)
    behind = "" if crc is None else f", crc {crc:08x}"
    if isinstance(value, (set, frozenset)) and 0 < len(value) <= MAX_MEMBERS:
        return value_text(value, MAX_TEXT)
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
        return clip(object_text(value), MAX_TEXT)
    other = value.dotted if isinstance(value, Global) else f"numpy {getattr(value, 'dtype', type(value).__name__)}"
    return clip(other, MAX_TEXT)
