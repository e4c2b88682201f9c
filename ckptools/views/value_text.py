"""Any value of a tree in a few words of bounded length, whatever the value holds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from ckptools.contents.leaves import MAX_BITS, is_brief
from ckptools.dtypes import short
from ckptools.model.tensor import Tensor
from ckptools.model.values import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Opaque, TorchName, scalar
from ckptools.text import clip, number, plural, printable, shape

MAX_ITEMS = 6
"""Items of a list or dict that are shown in a line."""


def described(value: Any) -> str | None:
    """A description of a value that has no text of its own: a tensor, an array, bytes, a class; else None."""
    if isinstance(value, Tensor):
        return f"{short(value.dtype)} tensor {shape(value.shape)}"
    if isinstance(value, (NumpyArray, NumpyScalar)):
        dims = shape(value.shape) if isinstance(value, NumpyArray) else ""
        return f"numpy {value.dtype} {dims}".strip()
    if isinstance(value, (bytes, bytearray)):
        return plural(len(value), "byte")
    if isinstance(value, Opaque):
        return f"<{value.name}{_arguments(value)}>"
    if isinstance(value, Global):
        return f"<{value.dotted}>"
    if isinstance(value, (TorchName, Device, NumpyDtype)):
        return str(value)
    if type(value) is int and value.bit_length() > MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    return None


def _arguments(value: Opaque) -> str:
    return f"({', '.join(value_text(a, 40) for a in value.args)})" if value.args and is_brief(value) else ""


def value_text(value: Any, width: int = 80, depth: int = 2) -> str:
    """A value in one line of at most `width` characters, safe to print."""
    return clip(printable(_shown(scalar(value), width, depth)), width)


def _shown(value: Any, width: int, depth: int) -> str:
    description = described(value)
    if description is not None:
        return description
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return repr(clip(value, width))
    if isinstance(value, Mapping):
        return _mapping(value, width, depth)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _sequence(value, width, depth)
    return str(value)


def _mapping(value: Mapping[Any, Any], width: int, depth: int) -> str:
    if not depth:
        return "{" + plural(len(value), "value") + "}"
    some = islice(value.items(), MAX_ITEMS)
    return "{" + _joined([f"{key_name(k)}: {value_text(v, width, depth - 1)}" for k, v in some], len(value)) + "}"


def _sequence(value: Any, width: int, depth: int) -> str:
    first, last = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
    if not depth:
        return first + plural(len(value), "value") + last
    return first + _joined([value_text(v, width, depth - 1) for v in islice(value, MAX_ITEMS)], len(value)) + last


def _joined(texts: list[str], total: int) -> str:
    return ", ".join(texts + ([f"{total - len(texts)} more"] if total > len(texts) else []))


def key_name(key: Any) -> str:
    """A dict key as text: a string as it is, anything else as a value."""
    return key if isinstance(key, str) else value_text(key)
