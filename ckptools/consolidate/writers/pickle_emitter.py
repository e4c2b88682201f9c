"""Writer of a pickle: the tree of a `.pt`, in torch.save's form (protocol 2), with objects of torch's own classes.

Only names from the fixed list below are ever written, so the result calls nothing but torch's own rebuilders and
the constructors of the source's values.
"""

from __future__ import annotations

import re
import struct
from ast import literal_eval
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from itertools import chain
from math import prod
from typing import Any

from ckptools.dtypes import ITEMSIZE, LEGACY_STORAGE
from ckptools.model.regions import contiguous_strides
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Size, TorchName
from ckptools.option import spelled
from ckptools.text import KeyPath, clip, fqn_of, plural

# -- convert a tree for plain `torch.load(path)`: a value that it does not accept becomes the nearest accepted value ---
# From torch 2.6 on, torch.load accepts only types on its own list: tensors, torch's small types, numbers, text, dicts
# and the like, nothing of numpy or datetime. `Loadable.note` names every conversion.
#
# A file states a dtype of numpy in a few letters. Only letters for numbers and text are passed to numpy; other dtypes
# (times, records, extended precision) have no counterpart in torch.
# Source: torch/_weights_only_unpickler.py of torch 2.6 and 2.13; c10/core/Device.cpp for the kinds of devices.


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
    """Copy a tree into one that plain torch.load accepts; `left_out` has the key paths left out, with the reason."""

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
            if isinstance(node, frozenset):
                self._note("frozenset", "a set", path)
            return {self._key(item, path) for item in node}
        return self._leaf(node, path)

    def note(self) -> str:
        """The conversions in one line; empty if there were none."""
        kinds = [_counted(kind, what, paths) for (kind, what), paths in self._became.items()]
        if not kinds:
            return ""
        return f"so that plain torch.load reads it, {', '.join(kinds)}; {spelled('keep-types', True)} keeps them"

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
                self.left_out[path] = (
                    f"{kind}, which plain torch.load does not make; {spelled('keep-types', True)} keeps it"
                )
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
    elif isinstance(node, Device) and not (node.type in DEVICES and (node.index is None or 0 <= node.index < 128)):
        yield f"device of type {node.type:.20}", "text", str(node)
    elif isinstance(node, Size) and any(not -(1 << 63) <= n < 1 << 63 for n in node):
        yield "size beyond 64 bits", "a tuple", tuple(node)


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
    """Convert an array of numbers to a tensor, or an array of text to a nested list; None for other dtypes."""
    letters = array.dtype.lstrip("<>|=")
    if letters in TORCH_DTYPE:
        return BytesTensor(TORCH_DTYPE[letters], array.shape, _little_endian(array))
    if TEXT.fullmatch(letters) and int(letters[1:]):
        return _nested_text(array, letters)
    return None


def _python_value(scalar: NumpyScalar) -> Any:
    """Convert a scalar to a number or text of Python; None if Python has no equivalent."""
    array = NumpyArray(scalar.dtype, (1,), False, scalar.data)
    if scalar.dtype.lstrip("<>|=") in TORCH_DTYPE:
        try:
            return _made(array).tolist()[0]
        except ValueError:
            return None  # The data has not as many bytes as the dtype.
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


# -- the pickle --------------------------------------------------------------------------------------------------------


ALLOWED_BY_TORCH = frozenset(
    {"_codecs.encode", "__builtin__.bytearray", "__builtin__.set", "__builtin__.complex"}
    | {"collections.OrderedDict", "collections.Counter"}
)
"""Names outside torch that `torch.load(weights_only=True)` accepts; source: torch/_weights_only_unpickler.py."""


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of one of torch's classes, created without a call, then given its state: attributes, or an argument.

    May be a key of a dict.
    """

    module: str
    name: str
    state: Any


@dataclass(frozen=True, slots=True)
class Call:
    """The result of calling one of torch's functions or classes, such as a member of an enum."""

    module: str
    name: str
    args: tuple[Any, ...]


def _no_tensors(_: Tensor | BytesTensor) -> str:
    raise TypeError("a tensor in a pickle that has no storages")


class Emitter:
    """Write one pickle.

    Attributes:
        needs: dotted names in it that `torch.load(weights_only=True)` does not accept.
    """

    def __init__(self, storage_key: Callable[[Tensor | BytesTensor], str] = _no_tensors) -> None:
        self._out = bytearray(b"\x80\x02")
        self._key = storage_key
        self._memo: dict[Any, int] = {}
        self.needs: dict[str, None] = {}

    def dump(self, tree: Any) -> bytes:
        """Return the pickle of a tree. Recursion is bounded by the reader's depth budget."""
        self._value(tree)
        self._out += b"."
        return bytes(self._out)

    def _value(self, value: Any) -> None:
        for kind, write in _WRITERS:
            if isinstance(value, kind):
                write(self, value)
                return
        raise TypeError(f"no way to write a {type(value).__name__}")

    def _remembered(self, what: Any, opcodes: bytes) -> None:
        """Write `opcodes` the first time and a reference afterwards."""
        number = self._memo.get(what)
        if number is None:
            number = self._memo[what] = len(self._memo)
            self._out += opcodes + (b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number))
        else:
            self._out += b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)

    def _text(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self._remembered(("text", text), b"X" + struct.pack("<I", len(data)) + data)

    def _name(self, module: str, name: str) -> None:
        dotted = f"{module}.{name}"
        if module.split(".")[0] != "torch" and dotted not in ALLOWED_BY_TORCH:
            self.needs[dotted] = None
        self._remembered(("name", dotted), f"c{module}\n{name}\n".encode())

    def _call(self, module: str, name: str, *args: Any) -> None:
        self._name(module, name)
        self._tuple(args)
        self._out += b"R"

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self._out += b"K" + bytes([value])
        elif -(2**31) <= value < 2**31:
            self._out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            short = len(data) < 256
            self._out += (b"\x8a" + bytes([len(data)]) if short else b"\x8b" + struct.pack("<i", len(data))) + data

    def _all(self, begin: bytes, values: Iterable[Any], end: bytes) -> None:
        self._out += begin
        for value in values:
            self._value(value)
        self._out += end

    def _tuple(self, items: Iterable[Any]) -> None:
        self._all(b"(", items, b"t")

    def _list(self, items: Iterable[Any]) -> None:
        self._all(b"](", items, b"e")

    def _items(self, mapping: Mapping[Any, Any]) -> None:
        self._all(b"(", chain.from_iterable(mapping.items()), b"u")

    def _dict(self, value: dict[Any, Any]) -> None:
        self._out += b"}"
        self._items(value)

    def _ordered_dict(self, value: OrderedDict[Any, Any]) -> None:
        self._call("collections", "OrderedDict")
        self._items(value)
        if hasattr(value, "_metadata"):
            self._dict({"_metadata": value._metadata})
            self._out += b"b"

    def _defaultdict(self, value: defaultdict[Any, Any]) -> None:
        factory = value.default_factory
        self._call("collections", "defaultdict", *([Global("__builtin__", factory.__name__)] if factory else []))
        self._items(value)

    def _instance(self, value: Instance) -> None:
        self._name(value.module, value.name)
        self._out += b")\x81"
        self._value(value.state)
        self._out += b"b"

    def _numpy_array(self, value: NumpyArray) -> None:
        self._call("numpy._core.multiarray", "_reconstruct", Global("numpy", "ndarray"), (0,), b"b")
        self._tuple((1, value.shape, NumpyDtype(value.dtype), value.fortran_order, value.data))
        self._out += b"b"

    def _tensor(self, tensor: Tensor) -> None:
        if tensor.kind == "storage":
            self._storage(tensor, tensor.dtype in LEGACY_STORAGE)
        elif tensor.parameter:
            self._name("torch._utils", "_rebuild_parameter")
            self._out += b"("
            self._plain_tensor(tensor)
            self._value(tensor.requires_grad)
            self._ordered_dict(OrderedDict())
            self._out += b"tR"
        else:
            self._plain_tensor(tensor, tensor.requires_grad)

    def _plain_tensor(self, tensor: Tensor | BytesTensor, requires_grad: bool = False) -> None:
        typed = tensor.dtype in LEGACY_STORAGE
        self._name("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        self._out += b"("
        self._storage(tensor, typed)
        rest: tuple[Any, ...] = (0, tensor.shape, contiguous_strides(tensor.shape), requires_grad, OrderedDict())
        for value in rest:
            self._value(value)
        if not typed:
            self._name("torch", tensor.dtype)
        self._out += b"tR"

    def _storage(self, tensor: Tensor | BytesTensor, typed: bool) -> None:
        """Write torch's persistent id: `('storage', storage class, key, location, numel)`; bytes if it is untyped."""
        self._out += b"("
        self._text("storage")
        self._name(*(("torch", LEGACY_STORAGE[tensor.dtype]) if typed else ("torch.storage", "UntypedStorage")))
        self._text(self._key(tensor))
        self._text("cpu")
        self._int(tensor.numel * (1 if typed else ITEMSIZE[tensor.dtype]))
        self._out += b"tQ"


def _calls(module: str, name: str, args: Callable[[Any], Iterable[Any]]) -> Callable[[Emitter, Any], None]:
    """A function that writes a value as the call of `module.name` with the arguments that `args` makes of the value."""
    return lambda emitter, value: emitter._call(module, name, *args(value))


def _numpy_spelling(dtype: str) -> Any:
    """The argument of `numpy.dtype`: a text or, for a dtype with fields, the dict or pair that its text spells."""
    if dtype[:1] not in ("{", "("):
        return dtype
    made = literal_eval(dtype)
    return (Global(*made[0].split(".")), made[1]) if isinstance(made, tuple) and made[0] == "numpy.record" else made


# The first match writes a value: subclasses before their bases.
_WRITERS: tuple[tuple[type, Callable[[Emitter, Any], None]], ...] = (
    (type(None), lambda emitter, _: emitter._out.extend(b"N")),
    (bool, lambda emitter, v: emitter._out.extend(b"\x88" if v else b"\x89")),
    (int, Emitter._int),
    (float, lambda emitter, v: emitter._out.extend(b"G" + struct.pack(">d", v))),
    (str, Emitter._text),
    (Tensor, Emitter._tensor),
    (BytesTensor, Emitter._plain_tensor),
    (Size, _calls("torch", "Size", lambda v: (tuple(v),))),
    (tuple, Emitter._tuple),
    (list, Emitter._list),
    (OrderedDict, Emitter._ordered_dict),
    (defaultdict, Emitter._defaultdict),
    (Counter, _calls("collections", "Counter", lambda v: (dict(v),))),
    (dict, Emitter._dict),
    (bytes, _calls("_codecs", "encode", lambda v: (v.decode("latin1"), "latin1"))),
    (bytearray, _calls("__builtin__", "bytearray", lambda v: (bytes(v),))),
    (complex, _calls("__builtin__", "complex", lambda v: (v.real, v.imag))),
    (timedelta, _calls("datetime", "timedelta", lambda v: (v.days, v.seconds, v.microseconds))),
    (timezone, _calls("datetime", "timezone", lambda v: v.__getinitargs__())),
    (time, _calls("datetime", "time", lambda v: v.__reduce_ex__(4)[1])),
    (datetime, _calls("datetime", "datetime", lambda v: v.__reduce_ex__(4)[1])),
    (date, _calls("datetime", "date", lambda v: v.__reduce__()[1])),
    (set, _calls("__builtin__", "set", lambda v: (list(v),))),
    (frozenset, _calls("__builtin__", "frozenset", lambda v: (list(v),))),
    (range, _calls("__builtin__", "xrange", lambda v: (v.start, v.stop, v.step))),
    (slice, _calls("__builtin__", "slice", lambda v: (v.start, v.stop, v.step))),
    (Device, _calls("torch", "device", lambda v: (v.type,) if v.index is None else (v.type, v.index))),
    (TorchName, _calls("torch.serialization", "_get_layout", lambda v: (f"torch.{v.name}",))),
    (Global, lambda emitter, v: emitter._name(v.module, v.name)),
    (Instance, Emitter._instance),
    (Call, lambda emitter, v: emitter._call(v.module, v.name, *v.args)),
    (NumpyArray, Emitter._numpy_array),
    (NumpyScalar, _calls("numpy._core.multiarray", "scalar", lambda v: (NumpyDtype(v.dtype), v.data))),
    # Without a state: the state of texts and times has sizes and units, which numpy uses unchecked.
    (NumpyDtype, _calls("numpy", "dtype", lambda v: (_numpy_spelling(v.dtype), False, True))),
)
