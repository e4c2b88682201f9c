"""Tensors as torch pickles them, described: shape, dtype, and where in which file the elements lie.

Sources: torch/_utils.py (`_rebuild_tensor_v2` and its siblings), torch/_tensor.py (`_rebuild_from_type_v2`),
torch/serialization.py (persistent ids). Offsets, sizes and strides are in elements there and here.

Every number is checked against the storage in Python integers, which do not wrap, before anything uses it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import prod
from typing import Any

from ckptools.dtypes import ITEMSIZE, QUANTIZED
from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor
from ckptools.model.values import Global, NumpyArray, Opaque, describe_for_error
from ckptools.pickles.classes import sharded_tensor
from ckptools.pickles.classes.rebuild import call, dtype_of, rebuilds
from ckptools.pickles.machine_state import MachineState, PickleError, UnusualError
from ckptools.pickles.objects import MAX_NDIM, Storage, attributes_in

Args = tuple[Any, ...]

WHY_NOT = {
    "sparse": "a sparse tensor; ckptools shows it and does not write it",
    "quantized": "a quantized tensor; ckptools shows it and does not write it",
}


def ints(value: Any, what: str) -> Ints:
    """Return a tuple of a few 64-bit ints that are not negative.

    Raises:
        ValueError: it holds something else.
    """
    ok = isinstance(value, (list, tuple)) and len(value) <= MAX_NDIM
    if not ok or not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        raise ValueError(f"the {what} of a tensor are {describe_for_error(value)}")
    return tuple(value)


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
    (start,) = ints((offset,), "storage offset")
    if len(shape) != len(strides):
        raise ValueError(f"a tensor with {len(shape)} sizes and {len(strides)} strides")
    width = ITEMSIZE[dtype]
    room = storage.numel * ITEMSIZE[storage.dtype] // width
    last = start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if prod(shape) and last >= room:
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
    span = (at, storage.numel * ITEMSIZE[storage.dtype])
    where = at + start * width if prod(shape) else at
    source = Source(path, where, dtype, shape, strides, record, span, crc)
    return Tensor(shape, dtype, (Shard(Box.whole(shape), None, source),))


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
    """A plain tensor with Python attributes on it; its values are all there."""
    placed = sharded_tensor.placed(tensor, attributes_in(state), m.meshes)
    return replace(placed, attributes=state) if state and placed is tensor else placed


def _wrapper_subclass(m: MachineState, cls: Global, inner: Args, state: Any) -> Tensor | Opaque:
    """Describe a tensor subclass that holds other tensors."""
    shape, dtype = ints(inner[2], "sizes"), dtype_of(inner[1])
    if dtype is None:
        return _opaque(cls, None, state)
    requires_grad = len(inner) > 7 and inner[7] is True
    if cls.name in ("ShardedTensor", "DTensor"):
        tensor = _sharded(m, cls.name, shape, dtype, state)
    else:
        tensor = _of_class(cls, shape, dtype, _state(state))
    return replace(tensor, requires_grad=requires_grad)


def _sharded(m: MachineState, kind: str, shape: Ints, dtype: str, state: Any) -> Tensor:
    """Describe a ShardedTensor or DTensor; one that contradicts itself has no shards, and takes no other with it."""
    try:
        if kind == "ShardedTensor":
            return sharded_tensor.describe(m, shape, dtype, state)
        from ckptools.pickles.classes import dtensor

        return dtensor.describe(m, shape, dtype, state)
    except (PickleError, UnusualError):  # that is about the pickle, not about this tensor
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        why = str(error) if type(error) is ValueError else f"a {kind} whose state is malformed"
        return Tensor(shape, dtype, (), "unreadable", contradictions=((None, why),))


def _of_class(cls: Global, shape: Ints, dtype: str, state: dict[str, Any]) -> Tensor:
    from ckptools.pickles.classes.tensor_classes import of_class

    return of_class(cls.dotted, shape, dtype, state)


def _state(state: Any) -> dict[str, Any]:
    """The attributes of a tensor; a state without names is one of its own."""
    return attributes_in(state) or ({"state": state} if state else {})


def _opaque(cls: Global, base: Any, state: Any) -> Opaque:
    opaque = Opaque(cls.dotted, (base,))
    opaque.state = state
    return opaque
