"""Conversion of a tree for plain `torch.load(path)`: values that it does not accept become the nearest that it does.

From torch 2.6 on, torch.load accepts only types on its own list: tensors, torch's small types, numbers, text, dicts and
the like, nothing of numpy or datetime. `Loadable.note` names every conversion.

A file states a dtype of numpy in a few letters. Only letters for numbers and text are passed to numpy; other dtypes
(times, records, extended precision) have no counterpart in torch.
Source: torch/_weights_only_unpickler.py of torch 2.6 and 2.13; c10/core/Device.cpp for the kinds of devices.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from math import prod
from typing import Any

from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.model.values import Device, NumpyArray, NumpyDtype, NumpyScalar, Size, TorchName
from ckptools.text import clip, plural

LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn")
DEVICES = (
    "cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "xla", "lazy",
    "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone",
)  # fmt: skip
MAX_INT_BYTES = 255
"""The largest integers that fit the only opcode for long integers in torch.load."""

LEFT_OUT = object()
"""Stands for a value without a near equivalent."""

TORCH_DTYPE = {
    "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128",
    "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64",
    "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64", "b1": "bool", "?": "bool",
}  # fmt: skip
"""torch's name for numpy's letters and bytes."""

TEXT = re.compile(r"[US]\d{1,9}")


class Loadable:
    """Copy a tree into one that plain torch.load accepts; key paths in `left_out` are left out, for a reason."""

    def __init__(self) -> None:
        self.left_out: dict[KeyPath, str] = {}
        self._became: dict[tuple[str, str], list[KeyPath]] = {}

    def value(self, node: Any, path: KeyPath = ()) -> Any:
        """Copy the node at `path`; `LEFT_OUT` if it has no equivalent."""
        if isinstance(node, Tensor):
            return node
        if isinstance(node, dict):
            return self._dict(node, path)
        if type(node) in (list, tuple):
            # An index of a sequence has a meaning, so a left-out item becomes None.
            items = [self.value(item, (*path, i)) for i, item in enumerate(node)]
            return type(node)(None if item is LEFT_OUT else item for item in items)
        if isinstance(node, (set, frozenset)):
            return self._set(node, path)
        return self._leaf(node, path)

    def note(self) -> str:
        """The conversions in one line; empty if there were none."""
        kinds = [_counted(kind, what, paths) for (kind, what), paths in self._became.items()]
        return f"so that plain torch.load reads it, {', '.join(kinds)}; --keep-types keeps them" if kinds else ""

    def _note(self, kind: str, became: str, path: KeyPath) -> None:
        self._became.setdefault((kind, became), []).append(path)

    def _dict(self, node: dict[Any, Any], path: KeyPath) -> dict[Any, Any]:
        if isinstance(node, defaultdict):
            self._note("defaultdict", "a dict", path)
        copied: dict[Any, Any] = next((kind() for kind in (OrderedDict, Counter) if isinstance(node, kind)), {})
        if isinstance(copied, OrderedDict) and hasattr(node, "_metadata"):
            copied._metadata = self.value(node._metadata, (*path, "_metadata"))  # type: ignore[attr-defined]
        for old, value in node.items():
            place = (*path, old)
            key = self._key(old, place)
            if key in copied or (key is not old and key != old and key in node):
                self.left_out[place] = f"its key would be {key!r:.60}, as another one is"
                continue
            kept = self.value(value, place)
            if kept is not LEFT_OUT:
                copied[key] = kept
        return copied

    def _set(self, node: set[Any] | frozenset[Any], path: KeyPath) -> set[Any]:
        if isinstance(node, frozenset):
            self._note("frozenset", "a set", path)
        return {self._key(item, path) for item in node}

    def _key(self, node: Any, path: KeyPath) -> Any:
        """The hashable equivalent of a key or of an item of a set."""
        if type(node) is tuple:
            return tuple(self._key(item, path) for item in node)
        if isinstance(node, frozenset):
            self._note("frozenset", "a tuple", path)
            return tuple(self._key(item, path) for item in sorted(node, key=repr))
        kept = self._leaf(node, path)
        if kept is not LEFT_OUT and isinstance(kept, Hashable):
            return kept
        self.left_out.pop(path, None)
        self._note("odd key", "text", path)
        return repr(node)

    def _leaf(self, node: Any, path: KeyPath) -> Any:
        for kind, became, value in _nearest(node):
            if value is None:
                self.left_out[path] = f"{kind}, which plain torch.load does not make; --keep-types keeps it"
                return LEFT_OUT
            self._note(kind, became, path)
            return value
        return node


def _counted(kind: str, became: str, paths: list[KeyPath]) -> str:
    first, many = clip(fqn_of(paths[0]), 60), len(paths) > 1
    became = f"{became.removeprefix('a ')}s" if many and became.startswith("a ") else became
    return f"{plural(len(paths), kind)} became {became} ({first}{' …' if many else ''})"


def _nearest(node: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the kind of a value, the kind it becomes, and the new value or None; yield nothing if it may stay."""
    if type(node) is int and node.bit_length() // 8 + 1 > MAX_INT_BYTES:
        yield f"integer of over {MAX_INT_BYTES} bytes", "text", hex(node)
    elif isinstance(node, timedelta):
        yield "timedelta", "seconds", node.total_seconds()
    elif isinstance(node, (datetime, date, time)):
        yield type(node).__name__, "text", node.isoformat()
    elif isinstance(node, (range, slice, timezone)):
        yield type(node).__name__, "text", str(node)
    elif isinstance(node, NumpyArray):
        value = _torch_value(node)
        named = "numpy array" if value is not None else f"a numpy array of {node.dtype}"
        yield named, "a list" if isinstance(value, list) else "a tensor", value
    elif isinstance(node, NumpyScalar):
        value = _python_value(node)
        yield "numpy scalar" if value is not None else f"a numpy scalar of {node.dtype}", "Python's", value
    elif isinstance(node, NumpyDtype):
        yield "numpy dtype", "text", node.dtype
    elif isinstance(node, TorchName) and node.name not in LAYOUTS:
        yield f"torch.{node.name}", "text", f"torch.{node.name}"
    elif isinstance(node, Device) and not _is_known(node):
        yield f"device of type {node.type:.20}", "text", str(node)
    elif isinstance(node, Size) and any(not -(1 << 63) <= n < 1 << 63 for n in node):
        yield "size beyond 64 bits", "a tuple", tuple(node)


def _is_known(device: Device) -> bool:
    return device.type in DEVICES and (device.index is None or 0 <= device.index < 128)


@dataclass(frozen=True, eq=False, slots=True)
class BytesTensor:
    """A tensor whose bytes are in memory, row-major and little-endian, not in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def _torch_value(array: NumpyArray) -> BytesTensor | list[Any] | None:
    """Convert an array of numbers to a tensor or one of text to a nested list; None for other dtypes."""
    letters = array.dtype.lstrip("<>|=")
    if letters in TORCH_DTYPE:
        return BytesTensor(TORCH_DTYPE[letters], array.shape, _little_endian(array))
    if TEXT.fullmatch(letters) and int(letters[1:]):
        return _nested_text(array, letters)
    return None


def _python_value(scalar: NumpyScalar) -> Any:
    """Convert a scalar to Python's own number or text; None if there is none."""
    array = NumpyArray(scalar.dtype, (1,), False, scalar.data)
    if scalar.dtype.lstrip("<>|=") in TORCH_DTYPE:
        try:
            return _made(array).tolist()[0]
        except ValueError:
            return None  # not as many bytes as the dtype has
    listed = _torch_value(array)
    return listed[0] if isinstance(listed, list) else None


def _little_endian(array: NumpyArray) -> bytes:
    """The bytes of an array of numbers, row-major."""
    if not array.fortran_order and not array.dtype.startswith(">"):
        return array.data
    made = _made(array)
    return bytes(made.astype(made.dtype.newbyteorder("<")).tobytes("C"))


def _made(array: NumpyArray) -> Any:
    """Make a numpy array of numbers; dtypes such as `<|` that numpy never writes are refused."""
    import numpy as np

    letters = array.dtype.lstrip("<>|=")
    order = "" if letters == "?" else ">" if array.dtype.startswith(">") else "<"
    flat = np.frombuffer(array.data, order + letters) if array.data else np.empty(0, order + letters)
    return flat.reshape(array.shape, order="F" if array.fortran_order else "C")


def _nested_text(array: NumpyArray, letters: str) -> list[Any] | None:
    """Decode an array of text, since numpy fails badly on invalid text; None for invalid text."""
    import numpy as np

    wide, width = letters[0] == "U", int(letters[1:]) * (4 if letters[0] == "U" else 1)
    pieces: list[Any] = [array.data[at : at + width] for at in range(0, len(array.data), width)]
    codec = "utf-32-be" if array.dtype.startswith(">") else "utf-32-le"
    try:
        words = [p.decode(codec, "surrogatepass").rstrip("\0") if wide else p.rstrip(b"\0") for p in pieces]
        nested = np.array([*words, None], object)[:-1].reshape(array.shape, order="F" if array.fortran_order else "C")
    except (UnicodeDecodeError, ValueError):
        return None
    found = nested.tolist()
    return found if isinstance(found, list) else [found]
