"""What a plain value is, and the value itself where it is short: as rows and JSON have it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta
from math import prod
from struct import calcsize, unpack
from typing import Any

from ckptools.contents.leaves import LONG, MAX_BITS, fingerprint
from ckptools.contents.pickled_bytes import pickled_text
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
from ckptools.text import clip, plural, shape

MAX_FULL = 10_000
"""Items of a list or array, and characters of a text, that are shown in full."""

MAX_TEXT = 200
"""Characters of a text that is short."""

TYPES = (
    (Tensor, "tensor"), (bool, "bool"), (int, "int"), (float, "float"), (str, "str"), ((bytes, bytearray), "bytes"),
    (Mapping, "dict"), (list, "list"), (tuple, "tuple"), ((set, frozenset), "set"), (timedelta, "timedelta"),
    (date, "date"), (NumpyArray, "array"), (NumpyScalar, "number"), (Global, "class"),
    ((TorchName, Device, NumpyDtype), "name"),
)  # fmt: skip


def type_of(value: Any) -> str:
    """What a value is, in a word: `tensor`, `int`, `list`; `object` of a class that is not rebuilt."""
    value = scalar(value)
    if value is None:
        return "null"
    return next((name for kinds, name in TYPES if isinstance(value, kinds)), "object")


def is_short(value: Any) -> bool:
    """Whether a value can stand in a row as it is."""
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
    return value is None or isinstance(value, (bool, float, timedelta, date, TorchName, Device, NumpyDtype))


def as_data(value: Any) -> Any:
    """A short value as JSON has it: seconds of a timedelta, the name of a dtype; a list of a tuple."""
    value = scalar(value)
    if isinstance(value, (list, tuple)):
        return [as_data(item) for item in value]
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, (date, TorchName, Device, NumpyDtype)) else value


def full_value(value: Any) -> Any:
    """A value with all that it holds, as JSON has it; None where that is an object of a foreign class, or too much.

    Of an array its elements in the order in which the file has them, of bytes their hexadecimal digits.
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
    """What a value that is not short is: `625 integers, crc 5f2c90ab`, `numpy <u4 [624]`, the name of a class."""
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
    return clip(_class_of(value), MAX_TEXT)


def _class_of(value: Any) -> str:
    if isinstance(value, Opaque):
        return value.name
    return value.dotted if isinstance(value, Global) else f"numpy {getattr(value, 'dtype', type(value).__name__)}"
