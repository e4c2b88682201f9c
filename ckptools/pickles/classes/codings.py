"""The `Coding` of each quantized tensor class: how codes and scales are decoded, as its `dequantize()` does.

A class is recognised by its last name. Each function makes a coding from a tensor's shape, dtype and attributes, or
None if these are not as the class writes them.

Source: torchao 0.18.0 (optim/subclass_{8bit,4bit,fp8}.py, quantization/quantize_/workflows/{int8,intx,float8,nf4},
prototype/quantized_training, prototype/mx_formats/{mx_tensor,nvfp4_tensor,utils,kernels}.py), torchao 0.7.0 and 0.13.0
(dtypes/affine_quantized_tensor.py). Compared bit for bit with `dequantize()` of these versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Coding, ScaleCoding, Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque

FLOATS = ("float32", "bfloat16", "float16")
"""Supported dtypes of scales and values."""

Attributes = Mapping[str, Any]


def _plain(state: Attributes, name: str) -> Source | None:
    """The source of an inner tensor that is not itself encoded."""
    value = state.get(name)
    shards = value.found if isinstance(value, Tensor) and not value.note else ()
    return shards[0].source if len(shards) == 1 else None


def _scaled_in_rows(shape: Ints, state: Attributes, bits: int) -> int | None:
    """The number of consecutive elements that share a scale, in an optimizer's state; None if the shapes do not fit.

    Source: `block_size = codes.numel() // scale.numel()`, and `view(scale.shape[0], -1)` in `dequantize`.
    """
    codes, scale = _plain(state, "codes"), _plain(state, "scale")
    if codes is None or scale is None or scale.dtype not in FLOATS or len(scale.shape) != 1:
        return None
    numel, scales = prod(shape), scale.shape[0]
    if codes.shape != (shape if bits == 8 else (numel // 2,)) or numel * bits % 8:
        return None
    if not numel:
        return 1
    return numel // scales if scales and numel % scales == 0 else None


def _by_lookup(bits: int) -> Callable[[Ints, str, Attributes], Coding | None]:
    """`OptimState8bit` and `OptimState4bit`: `qmap[codes] * scale`, in float32."""

    def coding(shape: Ints, dtype: str, state: Attributes) -> Coding | None:
        codes, lookup, block = _plain(state, "codes"), _plain(state, "qmap"), _scaled_in_rows(shape, state, bits)
        if codes is None or lookup is None or block is None or codes.dtype != "uint8":
            return None
        if (lookup.dtype, lookup.shape) != ("float32", (1 << bits,)):
            return None
        return Coding("codes", "scale", block, "float32", "float32", lookup="qmap", bits=bits)

    return coding


def _fp8_state(shape: Ints, dtype: str, state: Attributes) -> Coding | None:
    """`OptimStateFp8`: `codes.float() * scale`."""
    codes, block = _plain(state, "codes"), _scaled_in_rows(shape, state, 8)
    if codes is None or block is None or codes.dtype != "float8_e4m3fn":
        return None
    return Coding("codes", "scale", block, "float32", "float32")


def _affine(shape: Ints, dtype: str, state: Attributes) -> Coding | None:
    """`Int8Tensor` and the like: `(qdata.to(dtype) - zero_point.to(dtype)) * scale`, then rounded to dtype.

    Source: `_dequantize_affine_no_dtype_check` of quantization/quant_primitives.py.
    """
    blocks = sizes_in(state.get("block_size"))
    return _in_blocks(shape, dtype, state, ("qdata", "scale", "zero_point"), blocks, dtype)


def _affine_of_impl(shape: Ints, dtype: str, state: Attributes) -> Coding | None:
    """`AffineQuantizedTensor` with plain layout and integer zero points; the same rule as for `Int8Tensor`."""
    impl = state.get("tensor_impl")
    encoded = impl.found[0].encoded if isinstance(impl, Tensor) and len(impl.found) == 1 else None
    domain = state.get("zero_point_domain")
    integers = isinstance(domain, Opaque) and domain.name.endswith(".ZeroPointDomain") and domain.args == (1,)
    if encoded is None or not encoded.name.endswith(".PlainAQTTensorImpl") or not integers:
        return None
    found = {f"tensor_impl.{name}": Tensor(s.shape, s.dtype, (_whole(s),)) for name, s in encoded.parts}
    names = ("tensor_impl.int_data", "tensor_impl.scale", "tensor_impl.zero_point")
    return _in_blocks(shape, dtype, found, names, sizes_in(state.get("block_size")), dtype)


def _fp8_weight(shape: Ints, dtype: str, state: Attributes) -> Coding | None:
    """`Float8Tensor`: `qdata.to(float32) * scale`, then rounded to dtype; the scale's shape gives its blocks.

    Source: `_dequantize_affine_float8` and `_maybe_expand_scale_to_tensor_shape` of quantization/quant_primitives.py.
    """
    scale = _plain(state, "scale")
    if scale is None:
        return None
    pairs = list(zip(shape, scale.shape, strict=False))
    fits = len(scale.shape) == len(shape) and all(s and n % s == 0 for n, s in pairs)
    blocks = shape if prod(scale.shape) == 1 else tuple(n // s for n, s in pairs) if fits else None
    return _in_blocks(shape, dtype, state, ("qdata", "scale", ""), blocks, "float32")


def _fp8_of_transformer_engine(shape: Ints, dtype: str, state: Attributes) -> Coding | None:
    """Transformer Engine's `Float8Tensor`: `(data.float() * scale_inv).to(dtype)`, with one scale for all elements.

    Source: `_FromFloat8Func` of transformer_engine/pytorch/tensor/storage/float8_tensor_storage.py, on a CPU.
    """
    data = _plain(state, "data")
    if data is None or not data.dtype.startswith("float8"):
        return None
    return _in_blocks(shape, dtype, state, ("data", "scale_inv", ""), shape, "float32")


def _int8_rows(shape: Ints, dtype: str, state: Attributes) -> Coding | None:
    """`Int8QuantizedTrainingLinearWeight`: `int_data * scale.view(-1, 1)`, in the scale's dtype."""
    scale = _plain(state, "scale")
    blocks = (1, shape[1]) if len(shape) == 2 else None
    return _in_blocks(shape, dtype, state, ("int_data", "scale", ""), blocks, scale.dtype if scale else dtype)


def _small_floats(exponent: int, mantissa: int) -> tuple[float, ...]:
    """The numbers of a small float format without infinity and NaN, by code; the upper half is negative."""
    bias, whole = (1 << exponent - 1) - 1, 1 << mantissa
    codes = [divmod(code, whole) for code in range(1 << exponent + mantissa)]
    steps = ((max(power, 1) - bias - mantissa, part + whole * (power > 0)) for power, part in codes)
    positive = tuple(part * 2.0**power for power, part in steps)
    return positive + tuple(-number for number in positive)


FP4, FP6 = _small_floats(2, 1), {"fp6_e2m3": _small_floats(2, 3), "fp6_e3m2": _small_floats(3, 2)}


def _mx(shape: Ints, dtype: str, state: Attributes) -> Coding | None:
    """`MXTensor`: `qdata.to(dtype) * scale.to(dtype)`, a scale of a power of two for each of `block_size` elements.

    Source: `to_dtype`, `get_fp_scale` of prototype/mx_formats/mx_tensor.py, `unpack_uint4` of kernels.py.
    """
    codes, scale, kind = _plain(state, "qdata"), _plain(state, "scale"), state.get("elem_dtype")
    if codes is None or scale is None or scale.dtype != "float8_e8m0fnu" or dtype not in FLOATS:
        return None
    blocks, tiled = _row_blocks(shape, scale, state), state.get("is_swizzled_scales") is True
    if blocks is None or not codes.contiguous:
        return None
    coding = Coding("qdata", "scale", blocks, dtype, dtype, scale_dtype=dtype, tiled=tiled)
    if codes.shape == shape and codes.dtype in ("float8_e4m3fn", "float8_e5m2"):
        return coding
    if codes.shape == shape and codes.dtype == "uint8" and isinstance(kind, str) and kind in FP6:
        return coding._replace(numbers=FP6[kind])
    return coding._replace(numbers=FP4, bits=4, upper_first=False) if _two_to_a_byte(codes, shape) else None


def _nvfp4(shape: Ints, dtype: str, state: Attributes) -> Coding | None:
    """`NVFP4Tensor`: `qdata * (per_tensor_scale * scale)` in float32, then rounded to dtype.

    Source: `dequantize`, `get_hp_scales` of prototype/mx_formats/nvfp4_tensor.py.
    """
    codes, scale, whole = _plain(state, "qdata"), _plain(state, "scale"), _plain(state, "per_tensor_scale")
    if codes is None or scale is None or scale.dtype != "float8_e4m3fn" or dtype not in FLOATS:
        return None
    blocks, tiled = _row_blocks(shape, scale, state), state.get("is_swizzled_scales") is True
    if blocks is None or not _two_to_a_byte(codes, shape):
        return None
    nested = None
    if whole is not None:
        experts = shape[0] if whole.shape == (shape[0], 1, 1) and len(shape) == 3 else 1
        if whole.dtype != "float32" or prod(whole.shape) != experts:
            return None
        nested = ScaleCoding("", "per_tensor_scale", prod(scale.shape) // experts)
    elif isinstance(state.get("per_tensor_scale"), Tensor):
        return None
    coding = Coding("qdata", "scale", blocks, "float32", dtype, bits=4, numbers=FP4, upper_first=False)
    return coding._replace(scale_coding=nested, scale_dtype="float32", tiled=tiled)


def _row_blocks(shape: Ints, scale: Source, state: Attributes) -> Ints | None:
    """The extent of blocks along a row; None if there is not exactly one scale per block."""
    block = state.get("block_size")
    if type(block) is not int or block <= 0 or len(shape) < 2 or shape[-1] % block or not scale.contiguous:
        return None
    rows, columns = prod(shape[:-1]), shape[-1] // block
    if state.get("is_swizzled_scales") is True:
        rows, columns = (-(-rows // 128) * 128, -(-columns // 4) * 4) if len(shape) == 2 else (-1, 1)
    return (*(1 for _ in shape[1:]), block) if prod(scale.shape) == rows * columns else None


def _two_to_a_byte(codes: Source, shape: Ints) -> bool:
    """Whether codes of 4 bits lie two to a byte along the last dimension."""
    packed = (*shape[:-1], shape[-1] // 2) if shape else ()
    return codes.dtype == "uint8" and codes.contiguous and codes.shape == packed and shape[-1] % 2 == 0


def _nf4(shape: Ints, dtype: str, state: Attributes) -> Coding | None:
    """`NF4Tensor`: `nf4[codes] * (quantized_scalers / quantization_factor + scaler_mean)`, all in dtype.

    Source: `get_original_weight`, `dequantize_scalers` of quantization/quantize_/workflows/nf4/nf4_tensor.py.
    """
    names = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4")
    codes, scale, factor, mean, table = (_plain(state, name) for name in names)
    block, group = state.get("block_size"), state.get("scaler_block_size")
    if codes is None or scale is None or factor is None or mean is None or table is None or dtype not in FLOATS:
        return None
    if type(block) is not int or type(group) is not int or block <= 0 or block % 2 or group <= 0:
        return None
    numel = prod(shape)
    fits = codes.dtype == "uint8" and scale.dtype == "int8" and {factor.dtype, mean.dtype, table.dtype} == {dtype}
    counts = (numel % block, numel // block % group, numel // 2, numel // block, numel // block // group, 1, 16)
    if not fits or counts != (0, 0, *(prod(part.shape) for part in (codes, scale, factor, mean, table))):
        return None
    nested = ScaleCoding("", "quantization_factor", group, "scaler_mean", dtype, divides=True)
    return Coding("quantized_data", "quantized_scalers", block, dtype, dtype, "nf4", bits=4, scale_coding=nested)


def _in_blocks(
    shape: Ints, dtype: str, state: Attributes, names: tuple[str, str, str], blocks: Ints | None, first: str
) -> Coding | None:
    """A coding with a scale for each block, of given sizes; None if the parts do not fit together.

    Args:
        shape: of the values.
        dtype: of the values.
        state: contains the parts.
        names: of codes, scales and zero points; "" for no zero points.
        blocks: extent of a block in each dimension.
        first: dtype to which codes are converted first.
    """
    codes, scale, zero = (_plain(state, name) if name else None for name in names)
    if codes is None or scale is None or blocks is None or len(blocks) != len(shape):
        return None
    if not all(b > 0 and n % b == 0 for n, b in zip(shape, blocks, strict=True)):
        return None
    count = prod(n // b for n, b in zip(shape, blocks, strict=True))
    eight_bits = codes.dtype in ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
    fits = eight_bits and codes.shape == shape and scale.dtype in FLOATS and dtype in FLOATS and first in FLOATS
    if not fits or any(prod(part.shape) != count for part in (scale, zero) if part is not None):
        return None
    if zero is None and isinstance(state.get(names[2]), Tensor):
        return None  # its zero points are of a kind that cannot be read
    return Coding(names[0], names[1], blocks, first, dtype, zero=names[2] if zero is not None else "")


def _whole(source: Source) -> Shard:
    return Shard(Box.whole(source.shape), None, source)


def sizes_in(value: Any) -> Ints | None:
    """A list of block sizes, as pickled; None for any other value."""
    ok = isinstance(value, (list, tuple)) and all(type(n) is int for n in value)
    return tuple(value) if ok else None


def coding_of(name: str, shape: Ints, dtype: str, state: Attributes) -> Coding | None:
    """The coding of a tensor by the dotted name of its class; None for an unknown class or unusual attributes."""
    library, last = name.partition(".")[0], name.rpartition(".")[2]
    found = CODINGS.get(last) if library == "torchao" else OF_TRANSFORMER_ENGINE.get(name)
    return found(shape, dtype, state) if found else None


OF_TRANSFORMER_ENGINE = {"transformer_engine.Float8Tensor": _fp8_of_transformer_engine}

CODINGS: dict[str, Callable[[Ints, str, Attributes], Coding | None]] = {
    "OptimState8bit": _by_lookup(8),
    "OptimState4bit": _by_lookup(4),
    "OptimStateFp8": _fp8_state,
    "Int8Tensor": _affine,
    "IntxUnpackedToInt8Tensor": _affine,
    "Float8Tensor": _fp8_weight,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
    "NF4Tensor": _nf4,
    "Int8QuantizedTrainingLinearWeight": _int8_rows,
    "AffineQuantizedTensor": _affine_of_impl,
}
"""torchao's classes whose `dequantize()` is known, by their last names. Each function makes a coding from a tensor's
shape, dtype and attributes, or None if these are not as the class writes them.
"""
