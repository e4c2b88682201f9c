"""Describe tensors as torch pickles them: shape, dtype, and the place of the elements in a file.

Sources: torch/_utils.py (`_rebuild_tensor_v2` and its siblings), torch/_tensor.py (`_rebuild_from_type_v2`),
torch/serialization.py (persistent ids). Offsets, sizes and strides are in elements there and here.

Every number is checked against the storage in Python integers, which do not wrap, before it is used.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date, datetime, time, timedelta, timezone
from functools import lru_cache
from itertools import islice
from operator import mul
from typing import Any

from ckptools.dtypes import ITEMSIZE, QUANTIZED
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Encoded, Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import (
    NUMPY_CODES,
    Device,
    Global,
    NumpyArray,
    NumpyDtype,
    NumpyScalar,
    Opaque,
    Size,
    TorchName,
    describe_for_error,
)
from ckptools.pickles.classes import sharded
from ckptools.pickles.classes.codings import Attributes, coding_of, sizes_in
from ckptools.pickles.machine_state import SAFE_INT, MachineState, PickleError, UnusualError
from ckptools.pickles.objects import (
    MAX_NDIM,
    RECORD,
    Storage,
    array_data,
    array_shape,
    attributes_in,
    build_array,
    build_dtype,
)
from ckptools.text import clip, clip_middle, first_few
from ckptools.text import shape as shape_text

# -- rebuild the objects of a pickle's calls: supported ones by code of this package, all others as `Opaque` -----------
# No name is looked up in Python: a dotted name selects a function of this package from a table, or nothing.


STATELESS = (int, float, complex, str, bytes, type(None))
"""Types without `__setstate__` and attributes, so that no pickler gives them a state; Python's refuses it too."""


def call(m: MachineState, function: Any, args: Any) -> Any:
    """Return the object that calling `function(*args)` would make, or an `Opaque` for it."""
    if not isinstance(function, Global) or not isinstance(args, tuple):
        return Opaque("a call of something that is no name", (function, args))
    rebuild = REBUILD.get(function.dotted)
    if rebuild is not None:
        rebuilt = rebuild(m, args)
        if rebuilt is not None:
            return rebuilt
    return Opaque(function.dotted, args)


def build(target: Any, state: Any) -> None:
    """Give `target` the state that a pickle would pass to its `__setstate__`."""
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
    # Any other state (of a dict or list subclass, say) has no place in the rebuilt object; the values are complete.


Rebuild = Callable[[MachineState, tuple[Any, ...]], Any]
REBUILD: dict[str, Rebuild] = {}


def rebuilds(*names: str) -> Callable[[Rebuild], Rebuild]:
    """Register the function that rebuilds calls of `names`; it returns None to leave a call opaque."""

    def register(function: Rebuild) -> Rebuild:
        REBUILD.update(dict.fromkeys(names, function))
        return function

    return register


def python_names(*names: str) -> tuple[str, ...]:
    """The names of a builtin in pickles of Python 2 and 3."""
    return tuple(f"{module}.{name}" for name in names for module in ("builtins", "__builtin__"))


# -- Python ------------------------------------------------------------------------------------------------------------


@rebuilds("collections.OrderedDict")
def _ordered_dict(m: MachineState, args: tuple[Any, ...]) -> Any:
    if not args:
        m.spend(8)
        return OrderedDict()
    pairs = args[0]
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
    # Protocol 2 writes bytes this way.
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
"""numpy's dtypes of the type codes of `array.array`, as on 64-bit Linux and macOS."""

ARRAY_FORMATS = (
    "|u1", "|i1", "<u2", ">u2", "<i2", ">i2", "<u4", ">u4", "<i4", ">i4", "<u8", ">u8", "<i8", ">i8", "<f4", ">f4",
    "<f8", ">f8",
)  # fmt: skip
"""numpy's dtypes of the formats in which an `array.array` is pickled."""


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
    # Protocol 2 names a nested class this way, and Python 3.11 a member of an enum. It is still only a name.
    owner, attribute = args if len(args) == 2 else (None, None)
    if not isinstance(owner, Global) or not isinstance(attribute, str) or not attribute.isidentifier():
        return None
    return m.name(owner.module, f"{owner.name}.{attribute}")


# -- torch's small types -----------------------------------------------------------------------------------------------


@rebuilds("torch.Size")
def _size(_: MachineState, args: tuple[Any, ...]) -> Any:
    sizes = args[0] if len(args) == 1 else ()
    ok = isinstance(sizes, (list, tuple)) and len(sizes) <= MAX_NDIM and {*map(type, sizes)} <= INT
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
    """The dtype that a global such as `torch.float32` names; None for an unknown dtype."""
    name = value.name if isinstance(value, (Global, TorchName)) else None
    return name if name in ITEMSIZE else None


# -- numpy -------------------------------------------------------------------------------------------------------------

_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")


@rebuilds(*(f"{module}._reconstruct" for module in _NUMPY))
def _reconstruct(_: MachineState, args: tuple[Any, ...]) -> Any:
    cls = args[0].dotted if args and isinstance(args[0], Global) else ""
    return NumpyArray("|u1", (0,), False, b"", "" if cls == "numpy.ndarray" else cls)


@rebuilds("numpy.dtype")
def _numpy_dtype(_: MachineState, args: tuple[Any, ...]) -> Any:
    if args and isinstance(args[0], Global) and args[0].dotted in (RECORD, "numpy.rec.record"):
        return NumpyDtype(RECORD)  # its state lists the fields
    return NumpyDtype(f"|{args[0]}") if args and isinstance(args[0], str) and len(args[0]) < 16 else None


@rebuilds("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")
def _frombuffer(m: MachineState, args: tuple[Any, ...]) -> Any:
    """Rebuild an array as protocol 5 pickles it: data, dtype, shape, order."""
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


# -- subclasses of `torch.Tensor`: find their inner tensors in the pickled attributes ----------------------------------
# A wrapper is replaced by the plain tensor inside it. Quantized classes hold codes and scales, which `codings` can
# decode. The inner tensors of any other class are listed and not used.
#
# Source: torchao 0.18.0 (float8/fsdp_utils.py, prototype/quantized_training, prototype/moe_training/tensor.py).


TORCHAO = "torchao."
"""The package of the supported classes; their modules have moved from version to version."""

WRAPPERS = {
    "WeightWithDynamicFloat8CastTensor": "_tensor",
    "Int8MixedPrecisionTrainingLinearWeight": "_data",
    "BitNetTrainingLinearWeight": "_data",
    "MXFP8TrainingWeightWrapperTensor": "_data",
    "Float8TrainingWeightWrapperTensor": "_data",
    "ScaledGroupedMMTensor": "_data",
    "LinearActivationQuantizedTensor": "original_weight_tensor",
}
"""Classes that change computations with a tensor but not its values, with the attribute that holds the tensor."""

WITHOUT_RULE = (
    "Int4Tensor", "Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor", "Int4OpaqueTensor",
    "IntxOpaqueTensor", "Float8OpaqueTensor",
)  # fmt: skip
"""Classes of torchao without `dequantize()`: only the kernels for one kind of processor define their packing."""

MAX_PARTS = 32
"""At most this many inner tensors are listed."""

MAX_VISITED = 10_000
"""Values in an object's state that are searched for tensors."""

MAX_NAME = 80
"""Characters of a name."""


def of_class(name: str, shape: Ints, dtype: str, state: Attributes) -> Tensor:
    """Describe a tensor of a subclass by its class and its inner tensors.

    Args:
        name: dotted name of the class.
        shape: sizes that the class reports.
        dtype: dtype that the class reports.
        state: its attributes, with inner tensors already described.
    """
    last = name.rpartition(".")[2]
    known = name.startswith(TORCHAO)
    inside = state.get(WRAPPERS[last]) if known and last in WRAPPERS else None
    if isinstance(inside, Tensor) and (inside.shape, inside.dtype) == (shape, dtype):
        return replace(inside, attributes={"class": name})
    parts = tuple(_parts(state))
    found = coding_of(name, shape, dtype, state)
    if not parts:
        return Tensor(shape, dtype, (), "unreadable", note=_unknown(name, ()))
    stated = () if found else sizes_in(state.get("block_size")) or ()
    encoded = Encoded(name, parts, found, shape, Box.whole(shape), stated)
    tensor = Tensor(shape, dtype, (Shard(encoded.box, None, None, None, encoded),), "quantized", note=note_on(encoded))
    return tensor if found else replace(tensor, kind="unreadable")


def note_on(encoded: Encoded) -> str:
    """Why a tensor of a class is not written unchanged, and what to do, if possible."""
    names = [name for name, _ in encoded.parts]
    if encoded.coding is None:
        return _unknown(encoded.name, names, encoded.stated)
    library, _, rest = encoded.name.partition(".")
    coding = f"{library} {rest.rpartition('.')[2]} ({', '.join(names)})"
    return f"quantized as {coding}: consolidate --dequantize writes its values"


def _unknown(name: str, parts: Any, blocks: Ints = ()) -> str:
    inside = f", which holds {first_few(parts)}" if parts else ""
    inside += f" for blocks of {shape_text(blocks[:MAX_NDIM])}" if parts and blocks else ""
    silent = name.startswith(TORCHAO) and name.rpartition(".")[2] in WITHOUT_RULE
    why = "torchao has no dequantize() for it" if silent else "ckptools does not know how its values are made"
    return f"a tensor of class {clip_middle(name, MAX_NAME)}{inside}; {why}"


def _parts(state: Attributes) -> Iterator[tuple[str, Source]]:
    """The inner tensors with their sources, by attribute path; at most `MAX_PARTS`."""
    stack = [(clip(str(name), MAX_NAME), value) for name, value in reversed(list(state.items()))]
    seen: set[int] = set()
    given = 0
    while stack and given < MAX_PARTS and len(seen) < MAX_VISITED:
        name, node = stack.pop()
        if isinstance(node, Tensor):
            for part in _places(name, node):
                given += 1
                yield part
        elif isinstance(node, (dict, list, tuple, Opaque)) and id(node) not in seen:
            seen.add(id(node))
            inner = node.fields if isinstance(node, Opaque) else node
            items = inner.items() if isinstance(inner, dict) else enumerate(inner)
            stack += reversed([(clip(f"{name}.{key}", MAX_NAME), child) for key, child in items])


def _places(name: str, tensor: Tensor) -> Iterator[tuple[str, Source]]:
    for shard in tensor.found[:MAX_PARTS]:
        if shard.source is not None:
            yield name, shard.source
        elif shard.encoded is not None:
            yield from ((f"{name}.{inner}", source) for inner, source in shard.encoded.parts)


# -- tensors and their storages ----------------------------------------------------------------------------------------


Args = tuple[Any, ...]

INT = frozenset((int,))

WHY_NOT = {
    "sparse": "a sparse tensor; ckptools shows it and does not write it",
    "quantized": "a quantized tensor; ckptools shows it and does not write it",
}


def ints(value: Any, what: str) -> Ints:
    """Check that a value is a tuple of a few nonnegative 64-bit ints, and return it.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, (list, tuple)) and len(value) <= MAX_NDIM:
        for n in value:
            if type(n) is not int or not 0 <= n < 1 << 63:
                break
        else:
            return tuple(value)
    raise ValueError(f"the {what} of a tensor are {describe_for_error(value)}")


@rebuilds("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
def _rebuild_tensor(m: MachineState, args: Args) -> Any:
    """Args: storage, offset, size, stride, requires_grad, hooks, then dtype (v3 only) and metadata."""
    storage, offset, size, stride, requires_grad, _, *rest = (*args, False, None) if len(args) == 4 else args
    if not isinstance(storage, Storage):
        raise ValueError("a tensor without a storage")
    m.loose_storages -= 1
    dtype: str | None = storage.dtype
    if rest and isinstance(rest[0], Global):
        dtype, rest = dtype_of(rest[0]), rest[1:]
    if dtype is None:
        return None
    tensor = strided_tensor(m, storage, offset, size, stride, dtype)
    if rest and isinstance(rest[0], dict) and any(rest[0].values()):
        bits = ", ".join(describe_for_error(k).strip("'") for k, v in islice(rest[0].items(), 4) if v)
        tensor = replace(tensor, kind="unreadable", note=f"a lazy view ({bits}) whose values are not what is stored")
    return replace(tensor, requires_grad=True) if requires_grad is True else tensor


def strided_tensor(m: MachineState, storage: Storage, offset: Any, size: Any, stride: Any, dtype: str) -> Tensor:
    """Describe a strided view of a storage as a tensor of one shard.

    Raises:
        ValueError: the view does not lie in the storage.
    """
    shape, strides = ints(size, "sizes"), ints(stride, "strides")
    start = offset if type(offset) is int and 0 <= offset < 1 << 63 else ints((offset,), "storage offset")[0]
    if len(shape) != len(strides):
        raise ValueError(f"a tensor with {len(shape)} sizes and {len(strides)} strides")
    width, nbytes = ITEMSIZE[dtype], storage.numel * ITEMSIZE[storage.dtype]
    room = nbytes // width
    last = start + sum(map(mul, shape, strides)) - sum(strides)  # for each dimension its last index, times its stride
    filled = 0 not in shape
    if filled and last >= room:
        raise ValueError(
            f"a tensor reads element {describe_for_error(last)} of storage "
            f"{describe_for_error(storage.key)}, which has {room}"
        )
    if dtype in QUANTIZED:
        return Tensor(shape, dtype, (), "quantized", note=WHY_NOT["quantized"])
    if m.locate is None:
        return Tensor(shape, dtype, (), "unreadable", note="its storage is not in this file")
    located = m.locate(storage)
    if located is None:  # behind the cut of its file
        return Tensor(shape, dtype, (Shard(Box.whole(shape), None, None),))
    path, at, record, crc = located
    where = at + start * width if filled else at
    source = Source(path, where, dtype, shape, strides, record, (at, nbytes), crc)
    return Tensor(shape, dtype, (Shard(_whole_box(shape), None, source),))


@lru_cache(maxsize=1024)
def _whole_box(shape: Ints) -> Box:
    """The box of a whole tensor; shared by all layers."""
    return Box.whole(shape)


@rebuilds("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
def _rebuild_parameter(m: MachineState, args: Args) -> Any:
    """Args: the tensor, requires_grad, hooks, then its Python attributes."""
    data, requires_grad, *rest = args
    if not isinstance(data, Tensor):
        return None
    data = _with_attributes(m, data, rest[1]) if len(rest) > 1 else data
    return replace(data, parameter=True, requires_grad=requires_grad is True)


@rebuilds("torch._utils._rebuild_device_tensor_from_cpu_tensor")
def _rebuild_from_cpu(m: MachineState, args: Args) -> Any:
    return replace(args[0], requires_grad=args[3] is True) if isinstance(args[0], Tensor) and len(args) > 3 else None


@rebuilds("torch._utils._rebuild_device_tensor_from_numpy", "torch._utils._rebuild_xla_tensor")
def _rebuild_from_numpy(m: MachineState, args: Args) -> Any:
    data, dtype = args[:2]
    if not isinstance(data, NumpyArray):
        return None
    known = dtype_of(dtype)
    note = "its values are a numpy array inside the pickle (an XLA or similar device tensor)"
    return known and Tensor(ints(data.shape, "sizes"), known, (), "unreadable", note=note, detail=data)


@rebuilds("torch._utils._rebuild_meta_tensor_no_storage")
def _rebuild_meta(m: MachineState, args: Args) -> Any:
    dtype, size, _, requires_grad = args[:4]
    known = dtype_of(dtype)
    note = "a meta tensor: a shape without values"
    return known and Tensor(ints(size, "sizes"), known, (), "meta", requires_grad=requires_grad is True, note=note)


@rebuilds("torch._utils._rebuild_sparse_tensor")
def _rebuild_sparse(m: MachineState, args: Args) -> Any:
    """Args: layout, then (indices, values, size[, coalesced]) or (compressed, plain indices, values, size)."""
    _layout, data = args
    if not isinstance(data, tuple) or len(data) > MAX_NDIM:
        return None
    values = next((d for d in reversed(data) if isinstance(d, Tensor)), None)
    size = next((d for d in data if isinstance(d, tuple)), ())
    if values is None:
        return None
    return Tensor(ints(size, "sizes"), values.dtype, (), "sparse", note=WHY_NOT["sparse"], detail=args)


@rebuilds("torch._utils._rebuild_qtensor")
def _rebuild_qtensor(m: MachineState, args: Args) -> Any:
    storage, _, size = args[:3]
    if not isinstance(storage, Storage):
        return None
    m.loose_storages -= 1
    return Tensor(ints(size, "sizes"), storage.dtype, (), "quantized", note=WHY_NOT["quantized"], detail=args)


@rebuilds("torch._utils._rebuild_nested_tensor")
def _rebuild_nested(m: MachineState, args: Args) -> Any:
    buffer = args[0]
    if not isinstance(buffer, Tensor):
        return None
    return replace(
        buffer, kind="unreadable", shards=(), note="a nested tensor; ckptools shows it and does not write it"
    )


@rebuilds("torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2")
def _rebuild_from_type(m: MachineState, args: Args) -> Any:
    """Args: the function that would rebuild, the tensor class, that function's arguments, the state."""
    function, cls, inner, *rest = args
    if not isinstance(cls, Global) or not isinstance(inner, tuple) or not isinstance(function, Global):
        return None
    state = rest[0] if rest else None
    if function.name == "_rebuild_wrapper_subclass":
        return _wrapper_subclass(m, cls, inner, state)
    base = call(m, function, inner)
    if cls.dotted in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return _with_attributes(m, base, state) if isinstance(base, Tensor) else base
    if not isinstance(base, Tensor):
        return _opaque(cls, base, state)
    if base.kind == "meta":  # a shape without values, whatever its class would make of them
        return replace(base, attributes={"class": cls.dotted})
    found = _of_class(cls, base.shape, base.dtype, {**_state(state), "data": base})
    return replace(found, requires_grad=base.requires_grad)


def _with_attributes(m: MachineState, tensor: Tensor, state: Any) -> Tensor:
    """A plain tensor with Python attributes; its values are complete."""
    placed = sharded.placed_sharded_tensor(tensor, attributes_in(state), m.meshes)
    return replace(placed, attributes=state) if state and placed is tensor else placed


def _wrapper_subclass(m: MachineState, cls: Global, inner: Args, state: Any) -> Tensor | Opaque:
    """Describe a tensor subclass that contains other tensors."""
    shape, dtype = ints(inner[2], "sizes"), dtype_of(inner[1])
    if dtype is None:
        return _opaque(cls, None, state)
    requires_grad = len(inner) > 7 and inner[7] is True
    if cls.name in ("ShardedTensor", "DTensor"):
        tensor = _sharded(m, cls.name, shape, dtype, state)
    else:
        tensor = _of_class(cls, shape, dtype, _state(state))
    return tensor if tensor.requires_grad == requires_grad else replace(tensor, requires_grad=requires_grad)


def _sharded(m: MachineState, kind: str, shape: Ints, dtype: str, state: Any) -> Tensor:
    """Describe a ShardedTensor or DTensor; one that contradicts itself has no shards, and the rest is still read."""
    try:
        if kind == "ShardedTensor":
            return sharded.describe_sharded_tensor(m, shape, dtype, state)
        return sharded.describe_dtensor(m, shape, dtype, state)
    except (PickleError, UnusualError):  # about the pickle, not this tensor
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        why = str(error) if type(error) is ValueError else f"a {kind} whose state is malformed"
        return Tensor(shape, dtype, (), "unreadable", contradictions=((None, why),))


def _of_class(cls: Global, shape: Ints, dtype: str, state: dict[str, Any]) -> Tensor:

    return of_class(cls.dotted, shape, dtype, state)


def _state(state: Any) -> dict[str, Any]:
    """The attributes of a tensor; a nameless state becomes a single attribute."""
    return attributes_in(state) or ({"state": state} if state else {})


def _opaque(cls: Global, base: Any, state: Any) -> Opaque:
    opaque = Opaque(cls.dotted, (base,))
    opaque.state = state
    return opaque


# -- tensors of Transformer Engine, which pickle as a call of a function with their parts as arguments -----------------
# `Float8Tensor` is decoded by the rule with which the library itself computes on a CPU. Classes with a scale for each
# block are decoded only by GPU kernels; here only their parts are listed.
#
# Source: Transformer Engine 1.3 to 2.20, `__reduce_ex__` and `_make_in_reduce_ex` of pytorch/float8_tensor.py, later
# pytorch/tensor/{float8,mxfp8,float8_blockwise,nvfp4,identity}_tensor.py; `DType` of
# common/include/transformer_engine/transformer_engine.h, common/util/pybind_helper.h.


TRANSFORMER_ENGINE = "transformer_engine"
METHOD = "_make_in_reduce_ex"
"""The class method that pickles of 1.3 to 2.16 call; later ones call a function of the module."""

BLOCKS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
ARGUMENTS = {
    "Float8Tensor": ("data", "fp8_dtype", "scale_inv", "dtype", "shape", "transpose"),
    "MXFP8Tensor": (*BLOCKS, "fp8_dtype", "dtype", "shape"),
    "Float8BlockwiseQTensor": ("shape", *BLOCKS, "fp8_dtype", "dtype"),
    "NVFP4Tensor": ("shape", *BLOCKS, "amax_rowwise", "amax_columnwise", "fp4_dtype", "dtype"),
    "IdentityTensor": ("hp_data", "quantizer", "dtype", "shape"),
}
"""The leading arguments of each class, in order; more may follow."""

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
UP_TO_2_3, FROM_2_4 = {6: E4M3, 7: E5M2}, {7: E4M3, 8: E5M2}
"""torch's dtypes by the numbers of `DType`, which 2.4 shifted by inserting another dtype."""

SIZES_SINCE = 5
"""Number of arguments of a `Float8Tensor` from 2.0 on; earlier versions do not pass its sizes."""

MODULES = ("float8_tensor", "mxfp8_tensor", "float8_blockwise_tensor", "nvfp4_tensor", "identity_tensor")


def _spellings(module: str, name: str) -> list[str]:
    """The dotted names of the functions that rebuild tensors of a class."""
    homes = [f"{TRANSFORMER_ENGINE}.pytorch.tensor.{module}", f"{TRANSFORMER_ENGINE}.pytorch.{module}"]
    return [f"{home}.{maker}" for home in homes for maker in (f"{name}.{METHOD}", f"_make_{module}_in_reduce_ex")]


def _rebuild(name: str) -> Any:
    def rebuild(_: MachineState, args: tuple[Any, ...]) -> Tensor | None:
        given = dict(zip(ARGUMENTS[name], args, strict=False))
        dtype, stored = dtype_of(given.get("dtype")), [value for value in given.values() if isinstance(value, Tensor)]
        if dtype is None or not stored:
            return None
        shape = stored[0].shape if given.get("shape") is None else ints(given["shape"], "sizes")
        if name == "IdentityTensor":
            return stored[0] if (stored[0].shape, stored[0].dtype) == (shape, dtype) else None
        if name == "Float8Tensor" and isinstance(given.get("data"), Tensor):
            given["data"] = _as_numbers(given["data"], _fp8_dtype(given["fp8_dtype"], len(args)))
        return of_class(
            f"{TRANSFORMER_ENGINE}.{name}", shape, dtype, {key: v for key, v in given.items() if isinstance(v, Tensor)}
        )

    return rebuild


for _module, _name in zip(MODULES, ARGUMENTS, strict=True):
    rebuilds(*_spellings(_module, _name))(_rebuild(_name))


def _fp8_dtype(value: Any, arguments: int) -> str | None:
    """The torch dtype for a `DType`; None if it is unknown, or if versions with this form disagree.

    From 2.17 on its number is pickled as an argument, before that as the state of an enum of pybind11. In the latter
    form 7 means E5M2 in 2.0 to 2.3, and E4M3 in 2.4 to 2.16.
    """
    if not isinstance(value, Opaque) or not value.name.endswith(".DType"):
        return None
    if len(value.args) == 1:
        return FROM_2_4.get(value.args[0]) if type(value.args[0]) is int else None
    number = value.state if type(value.state) is int else 0
    if arguments < SIZES_SINCE:
        return UP_TO_2_3.get(number)
    meanings = {UP_TO_2_3.get(number), FROM_2_4.get(number)} - {None}
    return meanings.pop() if len(meanings) == 1 else None


def _as_numbers(data: Tensor, dtype: str | None) -> Tensor:
    """View bytes as elements of an 8-bit dtype; unchanged if the dtype is unknown."""
    if dtype is None or data.dtype != "uint8":
        return data
    shards = tuple(_as(shard, dtype) for shard in data.shards)
    return replace(data, dtype=dtype, shards=shards)


def _as(shard: Shard, dtype: str) -> Shard:
    return shard if shard.source is None else shard._replace(source=shard.source._replace(dtype=dtype))
