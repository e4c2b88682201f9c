"""Writer of a pickle: the tree of a `.pt`, in torch.save's form (protocol 2), with objects of torch's own classes.

Only names from the fixed list below are ever written, so the result calls nothing but torch's own rebuilders and
the constructors of the source's values.
"""

from __future__ import annotations

import struct
from ast import literal_eval
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from itertools import chain
from typing import Any

from ckptools.consolidate.writers.loadable import BytesTensor
from ckptools.dtypes import ITEMSIZE, LEGACY_STORAGE
from ckptools.model.regions import contiguous_strides
from ckptools.model.tensor import Tensor
from ckptools.model.values import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Size, TorchName

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

    def _float(self, value: float) -> None:
        self._out += b"G" + struct.pack(">d", value)

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
    """The way to write a value as the call of a function with these arguments."""
    return lambda emitter, value: emitter._call(module, name, *args(value))


def _numpy_spelling(dtype: str) -> Any:
    """The argument of `numpy.dtype`: a text, or of a dtype with fields the dict or pair that its text spells."""
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
    # Without a state: that of texts and times has sizes and units, which numpy uses unchecked.
    (NumpyDtype, _calls("numpy", "dtype", lambda v: (_numpy_spelling(v.dtype), False, True))),
)
