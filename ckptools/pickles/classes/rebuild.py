"""Rebuild what a pickle's calls make: a short list of known shapes by our own code, and `Opaque` for the rest.

Nothing here looks a name up: a dotted name selects a function of this package by a table, or nothing.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.model.values import (
    NUMPY_CODES,
    Device,
    Global,
    NumpyArray,
    NumpyDtype,
    NumpyScalar,
    Opaque,
    Size,
    TorchName,
)
from ckptools.pickles.machine_state import SAFE_INT, MachineState, PickleError
from ckptools.pickles.objects import MAX_NDIM, RECORD, array_data, array_shape, build_array, build_dtype

STATELESS = (int, float, complex, str, bytes, type(None))
"""Types without `__setstate__` and attributes, so that no pickler gives them a state; Python's refuses it too."""


def call(m: MachineState, function: Any, args: Any) -> Any:
    """Return what calling `function(*args)` stands for."""
    if not isinstance(function, Global) or not isinstance(args, tuple):
        return Opaque("a call of something that is no name", (function, args))
    rebuild = REBUILD.get(function.dotted)
    if rebuild is not None:
        rebuilt = rebuild(m, args)
        if rebuilt is not None:
            return rebuilt
    return Opaque(function.dotted, args)


def build(target: Any, state: Any) -> None:
    """Give `target` the state that its `__setstate__` would have got."""
    if isinstance(target, Opaque):
        target.state = state
    elif isinstance(target, NumpyArray):
        build_array(target, state)
    elif isinstance(target, NumpyDtype):
        build_dtype(target, state)
    elif isinstance(target, OrderedDict) and isinstance(state, dict):
        # nn.Module.state_dict() carries the versions of its modules in this attribute.
        metadata = state.get("_metadata")
        if isinstance(metadata, dict):
            target._metadata = metadata  # type: ignore[attr-defined]
        others = {key: value for key, value in state.items() if value is not metadata}
        if others:
            target._other_attributes = others  # type: ignore[attr-defined]
    elif isinstance(target, STATELESS):
        raise PickleError(f"an odd pickle: it gives a state to a value of type {type(target).__name__}")
    # Any other state (of a dict or list subclass, say) has no place in what we build; the values are whole.


Rebuild = Callable[[MachineState, tuple[Any, ...]], Any]
REBUILD: dict[str, Rebuild] = {}


def rebuilds(*names: str) -> Callable[[Rebuild], Rebuild]:
    """Register the function that stands in for calls of `names`; it returns None to leave them opaque."""

    def register(function: Rebuild) -> Rebuild:
        REBUILD.update(dict.fromkeys(names, function))
        return function

    return register


def python_names(*names: str) -> tuple[str, ...]:
    """The spellings of a builtin in pickles of Python 2 and 3."""
    return tuple(f"{module}.{name}" for name in names for module in ("builtins", "__builtin__"))


# -- Python --------------------------------------------------------------------------------------------------


@rebuilds("collections.OrderedDict")
def _ordered_dict(m: MachineState, args: tuple[Any, ...]) -> Any:
    pairs = args[0] if args else []
    if not isinstance(pairs, list):
        return None
    m.spend(8 + 4 * len(pairs))
    if not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        return None
    return OrderedDict((m.key(k), v) for k, v in pairs)


@rebuilds("collections.defaultdict")
def _defaultdict(_: MachineState, args: tuple[Any, ...]) -> Any:
    made_by = {"dict": dict, "list": list, "int": int, "float": float, "set": set}
    factory = args[0] if args else None
    if factory is None:
        return defaultdict(None)
    known = isinstance(factory, Global) and factory.module in ("builtins", "__builtin__")
    return defaultdict(made_by[factory.name]) if known and factory.name in made_by else None


@rebuilds("collections.Counter")
def _counter(m: MachineState, args: tuple[Any, ...]) -> Any:
    counts = args[0] if args else {}
    if not isinstance(counts, dict):
        return None
    m.spend(8 + len(counts))
    return Counter(counts)


def _number_or_text(*names: str, kind: type) -> None:
    @rebuilds(*python_names(*names))
    def made(_: MachineState, args: tuple[Any, ...]) -> Any:
        return kind() if not args else args[0] if len(args) == 1 and type(args[0]) is kind else None


for _kind, _names in ((int, ("int", "long")), (float, ("float",)), (bool, ("bool",)), (str, ("str", "unicode"))):
    _number_or_text(*_names, kind=_kind)


@rebuilds(*python_names("list"))
def _list(m: MachineState, args: tuple[Any, ...]) -> Any:
    items = args[0] if len(args) == 1 else None if args else []
    if not isinstance(items, (list, tuple)):
        return None
    m.spend(8 + len(items))
    return list(items)


@rebuilds(*python_names("tuple"))
def _tuple(m: MachineState, args: tuple[Any, ...]) -> Any:
    made = _list(m, args)
    return None if made is None else tuple(made)


@rebuilds(*python_names("dict"))
def _dict(m: MachineState, args: tuple[Any, ...]) -> Any:
    pairs = args[0] if len(args) == 1 else None if args else {}
    if isinstance(pairs, dict):
        m.spend(8 + 4 * len(pairs))
        return dict(pairs)
    made = _ordered_dict(m, args) if isinstance(pairs, list) else None
    return None if made is None else dict(made)


@rebuilds(*python_names("range", "xrange"))
def _range(_: MachineState, args: tuple[Any, ...]) -> Any:
    ok = len(args) == 3 and all(type(n) is int and abs(n) < SAFE_INT for n in args) and args[2]
    return range(*args) if ok else None


@rebuilds(*python_names("slice"))
def _slice(_: MachineState, args: tuple[Any, ...]) -> Any:
    ok = len(args) == 3 and all(n is None or (type(n) is int and abs(n) < SAFE_INT) for n in args)
    return slice(*args) if ok else None


@rebuilds(*python_names("set"))
def _set(m: MachineState, args: tuple[Any, ...]) -> Any:
    items = args[0] if args else []
    if not isinstance(items, (list, tuple)):
        return None
    m.spend(8 + 4 * len(items))
    return set(map(m.key, items))


@rebuilds(*python_names("frozenset"))
def _frozenset(m: MachineState, args: tuple[Any, ...]) -> Any:
    made = _set(m, args)
    return None if made is None else frozenset(made)


@rebuilds(*python_names("complex"))
def _complex(_: MachineState, args: tuple[Any, ...]) -> Any:
    return complex(*args) if len(args) <= 2 and all(type(a) in (int, float) for a in args) else None


@rebuilds(*python_names("bytearray"))
def _bytearray(m: MachineState, args: tuple[Any, ...]) -> Any:
    # bytearray(), bytearray(bytes), and protocol 2's bytearray(text, "latin-1").
    data = _encode(m, (args[0], "latin1")) if args[1:] == ("latin-1",) else args[0] if len(args) == 1 else b""
    if not isinstance(data, bytes) or len(args) > 2:
        return None
    m.spend(len(data) // 8)
    return bytearray(data)


@rebuilds(*python_names("bytes"))
def _bytes(_: MachineState, args: tuple[Any, ...]) -> Any:
    return None if args else b""


@rebuilds("_codecs.encode")
def _encode(m: MachineState, args: tuple[Any, ...]) -> Any:
    # How protocol 2 spells bytes.
    if len(args) != 2 or args[1] != "latin1" or not isinstance(args[0], str):
        return None
    m.spend(len(args[0]) // 8)
    return m.repeated.values.of_bytes(args[0].encode("latin1"))


@rebuilds("array.array", "array._array_reconstructor")
def _array_of_numbers(m: MachineState, args: tuple[Any, ...]) -> Any:
    """Rebuild an `array.array` from its code and a list (protocol 2), or from its class, code, format and bytes.

    Source: Modules/arraymodule.c, `array___reduce_ex__` and `enum machine_format_code`.
    """
    if len(args) == 2 and isinstance(args[0], str) and args[0] in ARRAY_CODES and isinstance(args[1], list):
        code, dtype, values = args[0], ARRAY_CODES[args[0]], args[1]
        m.spend(len(values))
        try:
            data = struct.pack(f"<{len(values)}{NUMPY_CODES[dtype[1:]]}", *values)
        except struct.error:
            return None
    elif len(args) == 4 and isinstance(args[0], Global) and isinstance(args[3], bytes):
        cls, code, form, data = args
        known = isinstance(code, str) and code in ARRAY_CODES and form in range(len(ARRAY_FORMATS))
        if cls.dotted != "array.array" or not known:
            return None
        dtype = ARRAY_FORMATS[form]
        m.spend(len(data) // 8)
    else:
        return None
    width = int(dtype[2:])
    whole = len(data) % width == 0
    return NumpyArray(dtype, (len(data) // width,), False, data, f"array.array({code!r})") if whole else None


ARRAY_CODES = {
    "b": "|i1", "B": "|u1", "h": "<i2", "H": "<u2", "i": "<i4", "I": "<u4", "l": "<i8", "L": "<u8", "q": "<i8",
    "Q": "<u8", "f": "<f4", "d": "<f8",
}  # fmt: skip
"""numpy's spelling of the type codes of `array.array`, as 64-bit Linux and macOS have them."""

ARRAY_FORMATS = (
    "|u1", "|i1", "<u2", ">u2", "<i2", ">i2", "<u4", ">u4", "<i4", ">i4", "<u8", ">u8", "<i8", ">i8", "<f4", ">f4",
    "<f8", ">f8",
)  # fmt: skip
"""numpy's spelling of the formats in which an `array.array` is pickled."""


@rebuilds("datetime.timedelta")
def _timedelta(_: MachineState, args: tuple[Any, ...]) -> Any:
    return timedelta(*args) if len(args) == 3 and all(type(a) is int for a in args) else None


@rebuilds("datetime.timezone")
def _timezone(_: MachineState, args: tuple[Any, ...]) -> Any:
    offset, *name = args or (None,)
    ok = isinstance(offset, timedelta) and len(name) <= 1 and all(isinstance(n, str) for n in name)
    return timezone(offset, *name) if ok else None


@rebuilds("datetime.datetime")
def _datetime(_: MachineState, args: tuple[Any, ...]) -> Any:
    raw, *zone = args or (None,)
    if not isinstance(raw, bytes) or len(raw) != 10 or not _is_zone(zone):
        return None
    # Layout of datetime.__reduce__: year (2 bytes), month, day, hour, minute, second, microseconds (3 bytes).
    year, month, micro = raw[0] << 8 | raw[1], raw[2] & 0x7F, int.from_bytes(raw[7:], "big")
    return datetime(year, month, raw[3], raw[4], raw[5], raw[6], micro, *zone, fold=raw[2] >> 7)


@rebuilds("datetime.time")
def _time(_: MachineState, args: tuple[Any, ...]) -> Any:
    raw, *zone = args or (None,)
    if not isinstance(raw, bytes) or len(raw) != 6 or not _is_zone(zone):
        return None
    return time(raw[0] & 0x7F, raw[1], raw[2], int.from_bytes(raw[3:], "big"), *zone, fold=raw[0] >> 7)


def _is_zone(zone: list[Any]) -> bool:
    return not zone or (len(zone) == 1 and isinstance(zone[0], timezone))


@rebuilds("datetime.date")
def _date(_: MachineState, args: tuple[Any, ...]) -> Any:
    raw = args[0] if len(args) == 1 else None
    return date(raw[0] << 8 | raw[1], raw[2], raw[3]) if isinstance(raw, bytes) and len(raw) == 4 else None


@rebuilds(*python_names("getattr"))
def _getattr(m: MachineState, args: tuple[Any, ...]) -> Any:
    # How protocol 2 names a class inside of another, and Python 3.11 a member of an enum. Still only a name.
    owner, attribute = args if len(args) == 2 else (None, None)
    if not isinstance(owner, Global) or not isinstance(attribute, str) or not attribute.isidentifier():
        return None
    return m.name(owner.module, f"{owner.name}.{attribute}")


# -- torch's small types -------------------------------------------------------------------------------------


@rebuilds("torch.Size")
def _size(_: MachineState, args: tuple[Any, ...]) -> Any:
    sizes = args[0] if len(args) == 1 else ()
    ok = isinstance(sizes, (list, tuple)) and len(sizes) <= MAX_NDIM and all(type(n) is int for n in sizes)
    return Size(sizes) if ok else None


@rebuilds("torch.device")
def _device(_: MachineState, args: tuple[Any, ...]) -> Any:
    kind, index = (*args, None)[:2] if args else (None, None)
    ok = isinstance(kind, str) and (index is None or type(index) is int)
    return Device(kind, index) if ok else None


@rebuilds("torch.serialization._get_layout")
def _layout(_: MachineState, args: tuple[Any, ...]) -> Any:
    return TorchName(args[0].removeprefix("torch.")) if args and isinstance(args[0], str) else None


@rebuilds("torch.torch_version.TorchVersion")
def _version(_: MachineState, args: tuple[Any, ...]) -> Any:
    return args[0] if len(args) == 1 and isinstance(args[0], str) else None


def dtype_of(value: Any) -> str | None:
    """Return the dtype that a global such as `torch.float32` names; None for one that is newer than this."""
    name = value.name if isinstance(value, (Global, TorchName)) else None
    return name if name in ITEMSIZE else None


# -- numpy ---------------------------------------------------------------------------------------------------

_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")


@rebuilds(*(f"{module}._reconstruct" for module in _NUMPY))
def _reconstruct(_: MachineState, args: tuple[Any, ...]) -> Any:
    cls = args[0].dotted if args and isinstance(args[0], Global) else ""
    return NumpyArray("|u1", (0,), False, b"", "" if cls == "numpy.ndarray" else cls)


@rebuilds("numpy.dtype")
def _numpy_dtype(_: MachineState, args: tuple[Any, ...]) -> Any:
    if args and isinstance(args[0], Global) and args[0].dotted in (RECORD, "numpy.rec.record"):
        return NumpyDtype(RECORD)  # its state has the fields
    return NumpyDtype(f"|{args[0]}") if args and isinstance(args[0], str) and len(args[0]) < 16 else None


@rebuilds("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")
def _frombuffer(m: MachineState, args: tuple[Any, ...]) -> Any:
    """Rebuild an array as protocol 5 spells it: data, dtype, shape, order."""
    data, dtype, shape, order = args if len(args) == 4 else (None, None, None, None)
    if not isinstance(data, (bytes, bytearray)) or not isinstance(dtype, NumpyDtype):
        return None
    m.spend(len(data) // 8)
    sizes = array_shape(shape)
    objects = (dtype, bytes(data)) if dtype.record else ()
    return NumpyArray(dtype.dtype, sizes, order == "F", array_data(sizes, dtype.dtype, bytes(data)), objects=objects)


@rebuilds(*(f"{module}.scalar" for module in _NUMPY))
def _scalar(_: MachineState, args: tuple[Any, ...]) -> Any:
    dtype, data = (*args, None, None)[:2]
    known = isinstance(dtype, NumpyDtype) and isinstance(data, bytes)
    return NumpyScalar(dtype.dtype, data, dtype.record) if known else None
