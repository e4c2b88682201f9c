"""Writer of a pickle: the tree of a `.pt`, in torch.save's form (protocol 2), with objects of torch's own classes.

Only names from the fixed list below are ever written, so the result calls nothing but torch's own rebuilders and
the constructors of the source's values.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
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
    """An object of one of torch's classes, created without a call, then given its state. May be a key of a dict.

    Attributes:
        module: of the class.
        name: of the class.
        state: the argument of its `__setstate__`, or its attributes.
    """

    module: str
    name: str
    state: Any


@dataclass(frozen=True, slots=True)
class Call:
    """The result of calling one of torch's functions or classes, such as a member of an enum.

    Attributes:
        module: of the function.
        name: of the function.
        args: positional arguments.
    """

    module: str
    name: str
    args: tuple[Any, ...]


StorageKey = Callable[[Tensor | BytesTensor], str]


class Emitter:
    """Write one pickle.

    Attributes:
        needs: dotted names in it that `torch.load(weights_only=True)` does not accept.
    """

    def __init__(self, storage_key: StorageKey | None = None) -> None:
        self._out = bytearray(b"\x80\x02")
        self._key = storage_key or _no_tensors
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

    # -- words ---------------------------------------------------------------------------------------------

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

    # -- plain values --------------------------------------------------------------------------------------

    def _none(self, _: None) -> None:
        self._out += b"N"

    def _bool(self, value: bool) -> None:
        self._out += b"\x88" if value else b"\x89"

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

    def _bytes(self, value: bytes) -> None:
        self._call("_codecs", "encode", value.decode("latin1"), "latin1")

    def _bytearray(self, value: bytearray) -> None:
        self._call("__builtin__", "bytearray", bytes(value))

    def _complex(self, value: complex) -> None:
        self._call("__builtin__", "complex", value.real, value.imag)

    def _timedelta(self, value: timedelta) -> None:
        self._call("datetime", "timedelta", value.days, value.seconds, value.microseconds)

    def _datetime(self, value: datetime) -> None:
        self._call("datetime", "datetime", *value.__reduce_ex__(4)[1])

    def _date(self, value: date) -> None:
        self._call("datetime", "date", *value.__reduce__()[1])

    # -- containers ----------------------------------------------------------------------------------------

    def _tuple(self, items: Iterable[Any]) -> None:
        self._out += b"("
        for item in items:
            self._value(item)
        self._out += b"t"

    def _list(self, items: Iterable[Any]) -> None:
        self._out += b"]("
        for item in items:
            self._value(item)
        self._out += b"e"

    def _items(self, mapping: Mapping[Any, Any]) -> None:
        self._out += b"("
        for key, value in mapping.items():
            self._value(key)
            self._value(value)
        self._out += b"u"

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

    def _counter(self, value: Counter[Any]) -> None:
        self._call("collections", "Counter", dict(value))

    def _set(self, value: set[Any]) -> None:
        self._call("__builtin__", "set", list(value))

    def _frozenset(self, value: frozenset[Any]) -> None:
        self._call("__builtin__", "frozenset", list(value))

    # -- torch and numpy -----------------------------------------------------------------------------------

    def _size(self, value: Size) -> None:
        self._call("torch", "Size", tuple(value))

    def _device(self, value: Device) -> None:
        self._call("torch", "device", value.type, *([] if value.index is None else [value.index]))

    def _torch_name(self, value: TorchName) -> None:
        self._call("torch.serialization", "_get_layout", f"torch.{value.name}")

    def _global(self, value: Global) -> None:
        self._name(value.module, value.name)

    def _instance(self, value: Instance) -> None:
        self._name(value.module, value.name)
        self._out += b")\x81"
        self._value(value.state)
        self._out += b"b"

    def _made(self, value: Call) -> None:
        self._call(value.module, value.name, *value.args)

    def _numpy_dtype(self, value: NumpyDtype) -> None:
        # Without a state: that of texts and times has sizes and units, which numpy uses unchecked.
        self._call("numpy", "dtype", value.dtype, False, True)

    def _numpy_array(self, value: NumpyArray) -> None:
        self._call("numpy._core.multiarray", "_reconstruct", Global("numpy", "ndarray"), (0,), b"b")
        self._tuple((1, value.shape, NumpyDtype(value.dtype), value.fortran_order, value.data))
        self._out += b"b"

    def _numpy_scalar(self, value: NumpyScalar) -> None:
        self._call("numpy._core.multiarray", "scalar", NumpyDtype(value.dtype), value.data)

    def _tensor(self, tensor: Tensor) -> None:
        if tensor.parameter:
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


def _no_tensors(_: Tensor | BytesTensor) -> str:
    raise TypeError("a tensor in a pickle that has no storages")


# The first match writes a value: subclasses before their bases.
_WRITERS: tuple[tuple[type, Callable[[Emitter, Any], None]], ...] = (
    (type(None), Emitter._none),
    (bool, Emitter._bool),
    (int, Emitter._int),
    (float, Emitter._float),
    (str, Emitter._text),
    (Tensor, Emitter._tensor),
    (BytesTensor, Emitter._plain_tensor),
    (Size, Emitter._size),
    (tuple, Emitter._tuple),
    (list, Emitter._list),
    (OrderedDict, Emitter._ordered_dict),
    (defaultdict, Emitter._defaultdict),
    (Counter, Emitter._counter),
    (dict, Emitter._dict),
    (bytes, Emitter._bytes),
    (bytearray, Emitter._bytearray),
    (complex, Emitter._complex),
    (timedelta, Emitter._timedelta),
    (datetime, Emitter._datetime),
    (date, Emitter._date),
    (set, Emitter._set),
    (frozenset, Emitter._frozenset),
    (Device, Emitter._device),
    (TorchName, Emitter._torch_name),
    (Global, Emitter._global),
    (Instance, Emitter._instance),
    (Call, Emitter._made),
    (NumpyArray, Emitter._numpy_array),
    (NumpyScalar, Emitter._numpy_scalar),
    (NumpyDtype, Emitter._numpy_dtype),
)
