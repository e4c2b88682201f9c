"""Tensors of Transformer Engine, which pickle as a call of a function with their parts as arguments.

`Float8Tensor` has values by the rule that the library itself computes by on a CPU. Of the classes with a scale for
each block only kernels for GPUs compute values; they are shown by their parts.

Source: Transformer Engine 1.3 to 2.20, `__reduce_ex__` and `_make_in_reduce_ex` of pytorch/float8_tensor.py, later
pytorch/tensor/{float8,mxfp8,float8_blockwise,nvfp4,identity}_tensor.py; `DType` of
common/include/transformer_engine/transformer_engine.h, common/util/pybind_helper.h.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.values import Opaque
from ckptools.pickles.classes.rebuild import dtype_of, rebuilds
from ckptools.pickles.classes.tensor_classes import of_class
from ckptools.pickles.classes.tensors import ints
from ckptools.pickles.machine_state import MachineState

LIBRARY = "transformer_engine"
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
"""What the arguments of each class are, in their order; more may follow."""

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
UP_TO_2_3, FROM_2_4 = {6: E4M3, 7: E5M2}, {7: E4M3, 8: E5M2}
"""torch's dtypes by the numbers of `DType`, in which 2.4 put another one before them."""

SIZES_SINCE = 5
"""Arguments of a `Float8Tensor` from 2.0 on; versions before do not give its sizes."""

MODULES = ("float8_tensor", "mxfp8_tensor", "float8_blockwise_tensor", "nvfp4_tensor", "identity_tensor")


def _spellings(module: str, name: str) -> list[str]:
    """The names of what rebuilds tensors of a class."""
    homes = [f"{LIBRARY}.pytorch.tensor.{module}", f"{LIBRARY}.pytorch.{module}"]
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
            f"{LIBRARY}.{name}", shape, dtype, {key: v for key, v in given.items() if isinstance(v, Tensor)}
        )

    return rebuild


for _module, _name in zip(MODULES, ARGUMENTS, strict=True):
    rebuilds(*_spellings(_module, _name))(_rebuild(_name))


def _fp8_dtype(value: Any, arguments: int) -> str | None:
    """The dtype of torch for a `DType`; None where it is none, or where versions that write this form disagree.

    From 2.17 on it pickles with its number as an argument, before that with it as the state of an enum of pybind11. Of
    those, 2.0 to 2.3 mean E5M2 by a 7, and 2.4 to 2.16 mean E4M3.
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
    """Bytes as elements of an 8-bit dtype; as they are where that is not known."""
    if dtype is None or data.dtype != "uint8":
        return data
    shards = tuple(_as(shard, dtype) for shard in data.shards)
    return replace(data, dtype=dtype, shards=shards)


def _as(shard: Shard, dtype: str) -> Shard:
    return shard if shard.source is None else shard._replace(source=shard.source._replace(dtype=dtype))
