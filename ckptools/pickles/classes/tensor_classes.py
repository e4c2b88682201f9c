"""Subclasses of `torch.Tensor`: what they store, found from the attributes that are pickled with them.

Wrappers hold the plain value, and are that tensor here. Quantized classes hold codes and scales; a `Coding` describes
the `dequantize()` of each class in `CODINGS`. Of any other class the inner tensors are listed and not used.

Source: torchao 0.18.0 (optim/subclass_{8bit,4bit,fp8}.py, quantization/quantize_/workflows/{int8,intx,float8},
float8/fsdp_utils.py, prototype/quantized_training, prototype/moe_training/tensor.py), torchao 0.7.0 and 0.13.0
(dtypes/affine_quantized_tensor.py). Compared bit for bit with what these versions dequantize.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Coding, Encoded, Shard, Source, Tensor
from ckptools.model.values import Opaque
from ckptools.text import clip, clip_middle, first_few

LIBRARY = "torchao."
"""The package of the known classes; their modules have moved from version to version."""

WRAPPERS = {
    "WeightWithDynamicFloat8CastTensor": "_tensor",
    "Int8MixedPrecisionTrainingLinearWeight": "_data",
    "BitNetTrainingLinearWeight": "_data",
    "MXFP8TrainingWeightWrapperTensor": "_data",
    "Float8TrainingWeightWrapperTensor": "_data",
    "ScaledGroupedMMTensor": "_data",
    "LinearActivationQuantizedTensor": "original_weight_tensor",
}
"""Classes that change what is computed with a tensor, not its values: the attribute that holds it."""

FLOATS = ("float32", "bfloat16", "float16")
"""dtypes of scales and values that are computed with."""

MAX_PARTS = 32
"""Inner tensors that are listed."""

MAX_VISITED = 10_000
"""Values in an object's state that are looked at for tensors."""

MAX_NAME = 80
"""Characters of a name."""

Attributes = Mapping[str, Any]


def of_class(name: str, shape: Ints, dtype: str, state: Attributes) -> Tensor:
    """Describe a tensor by its class and what is stored in it.

    Args:
        name: dotted name of the class.
        shape: sizes that it shows.
        dtype: dtype that it shows.
        state: its attributes; inner tensors are described already.
    """
    last = name.rpartition(".")[2]
    known = name.startswith(LIBRARY)
    inside = state.get(WRAPPERS[last]) if known and last in WRAPPERS else None
    if isinstance(inside, Tensor) and (inside.shape, inside.dtype) == (shape, dtype):
        return inside
    parts = tuple(_parts(state))
    found = CODINGS[last](shape, dtype, state) if known and last in CODINGS else None
    if not parts:
        return Tensor(shape, dtype, (), "unreadable", note=_unknown(name, ()))
    encoded = Encoded(name, parts, found, shape, Box.whole(shape))
    tensor = Tensor(shape, dtype, (Shard(encoded.box, None, None, None, encoded),), "quantized", note=note_on(encoded))
    return tensor if found else replace(tensor, kind="unreadable")


def note_on(encoded: Encoded) -> str:
    """Why a tensor of a class is not written as it is, and what to do if there is a way."""
    names = [name for name, _ in encoded.parts]
    if encoded.coding is None:
        return _unknown(encoded.name, names)
    library, _, rest = encoded.name.partition(".")
    coding = f"{library} {rest.rpartition('.')[2]} ({', '.join(names)})"
    return f"quantized as {coding}: consolidate --dequantize writes its values"


def _unknown(name: str, parts: Any) -> str:
    inside = f", which holds {first_few(parts)}" if parts else ""
    return f"a tensor of class {clip_middle(name, MAX_NAME)}{inside}; ckptools does not know how its values are made"


def _parts(state: Attributes) -> Iterator[tuple[str, Source]]:
    """The inner tensors by the names that lead to them, at most `MAX_PARTS`; of each where it lies."""
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


# -- how codes make values ----------------------------------------------------------------------------------------


def _plain(state: Attributes, name: str) -> Source | None:
    """The source of an inner tensor that is stored as it is."""
    value = state.get(name)
    shards = value.found if isinstance(value, Tensor) and not value.note else ()
    return shards[0].source if len(shards) == 1 else None


def _scaled_in_rows(shape: Ints, state: Attributes, bits: int) -> int | None:
    """The number of consecutive elements that share a scale, in an optimizer's state; None if that is odd.

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
    blocks = _sizes(state.get("block_size"))
    return _in_blocks(shape, dtype, state, ("qdata", "scale", "zero_point"), blocks, dtype)


def _affine_of_impl(shape: Ints, dtype: str, state: Attributes) -> Coding | None:
    """`AffineQuantizedTensor` with plain layout and zero points that are integers; the same rule as of `Int8Tensor`."""
    impl = state.get("tensor_impl")
    encoded = impl.found[0].encoded if isinstance(impl, Tensor) and len(impl.found) == 1 else None
    domain = state.get("zero_point_domain")
    integers = isinstance(domain, Opaque) and domain.name.endswith(".ZeroPointDomain") and domain.args == (1,)
    if encoded is None or not encoded.name.endswith(".PlainAQTTensorImpl") or not integers:
        return None
    found = {f"tensor_impl.{name}": Tensor(s.shape, s.dtype, (_whole(s),)) for name, s in encoded.parts}
    names = ("tensor_impl.int_data", "tensor_impl.scale", "tensor_impl.zero_point")
    return _in_blocks(shape, dtype, found, names, _sizes(state.get("block_size")), dtype)


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


def _int8_rows(shape: Ints, dtype: str, state: Attributes) -> Coding | None:
    """`Int8QuantizedTrainingLinearWeight`: `int_data * scale.view(-1, 1)`, in the scale's dtype."""
    scale = _plain(state, "scale")
    blocks = (1, shape[1]) if len(shape) == 2 else None
    return _in_blocks(shape, dtype, state, ("int_data", "scale", ""), blocks, scale.dtype if scale else dtype)


def _in_blocks(
    shape: Ints, dtype: str, state: Attributes, names: tuple[str, str, str], blocks: Ints | None, first: str
) -> Coding | None:
    """A coding with a scale for each block, of given sizes; None where the parts do not fit it.

    Args:
        shape: of the values.
        dtype: of the values.
        state: has the parts.
        names: of codes, scales and zero points; "" for no zero points.
        blocks: extent of a block in each dimension.
        first: dtype that codes become first.
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
        return None  # it has zero points, of a kind that cannot be read
    return Coding(names[0], names[1], blocks, first, dtype, zero=names[2] if zero is not None else "")


def _whole(source: Source) -> Shard:
    return Shard(Box.whole(source.shape), None, source)


def _sizes(value: Any) -> Ints | None:
    """A list of block sizes, as pickled; None for anything else."""
    ok = isinstance(value, (list, tuple)) and all(type(n) is int for n in value)
    return tuple(value) if ok else None


CODINGS: dict[str, Callable[[Ints, str, Attributes], Coding | None]] = {
    "OptimState8bit": _by_lookup(8),
    "OptimState4bit": _by_lookup(4),
    "OptimStateFp8": _fp8_state,
    "Int8Tensor": _affine,
    "IntxUnpackedToInt8Tensor": _affine,
    "Float8Tensor": _fp8_weight,
    "Int8QuantizedTrainingLinearWeight": _int8_rows,
    "AffineQuantizedTensor": _affine_of_impl,
}
"""The classes whose `dequantize()` is known, by their last names. Each makes a coding from a tensor's shape, dtype and
attributes, or nothing where these are not as the class writes them."""
