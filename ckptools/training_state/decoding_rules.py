"""The rules by which libraries decode their quantized weights: each makes a `Coding` of the parts of one weight.

    fp8 blocks            codes * scale_inv, in float32                          DeepSeek (`scale` in its own files)
    compressed-tensors    (codes - zero_point) * scale, in the scale's dtype     pack-, int-, float-, naive-quantized
                          codes * (scale / global_scale), in float32             nvfp4
                          codes * 2**(scale - 127), in bfloat16                  mxfp4, mxfp8
    mxfp4                 codes * 2**(scales - 127), rows and columns exchanged  gpt-oss, in transformers
    gptq, awq             (codes - zeros) * scales, rows and columns exchanged   GPTQModel, AutoAWQ, AutoRound
    nvfp4                 codes * (scale * scale_2), in float32                  ModelOpt

A rule checks that the parts fit together, and refuses what the library would refuse, or what its versions decode
differently.

Sources, all compared bit for bit with what ckptools decodes: transformers 5.24 (integrations/finegrained_fp8.py,
`Fp8Dequantize`; integrations/mxfp4.py, `convert_moe_packed_tensors`); DeepSeek-V3 (inference/kernel.py,
`weight_dequant`: blocks of 128 x 128, of which the last may be cut); compressed-tensors 0.20.1 (compressors/,
`unpack_from_int32`, `_dequantize`) and 0.10.2 for `g_idx`, which later versions pass over; GPTQModel 7.7
(nn_modules/qlinear, `dequantize_weight`; utils/model.py, `convert_gptq_v1_to_v2_format_module`); AutoAWQ 0.2.9
(awq/utils/packing_utils.py, `dequantize_gemm`); AutoRound 0.16.1 (auto_round_extension/torch/qlinear_torch.py,
qlinear_torch_zp.py); ModelOpt 0.47 (torch/quantization/qtensor/nvfp4_tensor.py, `dequantize`). DeepSeek's own files
(DeepSeek-V3, inference/convert.py) have `weight_scale_inv` under the name `scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckptools.model.facts import ModelConfig
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Coding, Packing, ScaleCoding, Source
from ckptools.model.tensor import CODES
from ckptools.pickles.classes.codings import FLOATS, FP4, sizes_in
from ckptools.tensor_io.numbers import decoded
from ckptools.tensor_io.read import Read, unpacked
from ckptools.text import shape as sizes_of
from ckptools.training_state.quantized_weights import FP8, bits_of, compressed_weights, gptq_format, method_of

DEEPSEEK_BLOCK: Ints = (128, 128)
WORD = 32
"""Bits of the integers in which GPTQ, AWQ and compressed-tensors pack codes."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in an integer of the code of each of eight columns. Source: AutoAWQ, `AWQ_REVERSE_ORDER`."""

ONE = 127
"""The exponent that stands for 1 in a scale of 8 bits (E8M0). Source: OCP Microscaling Formats, 5.4.1."""

GPTQ_BITS = (2, 3, 4, 8)


class OtherFormError(Exception):
    """The parts of a weight are not as the library writes them."""


class Decoded(NamedTuple):
    """How a weight is decoded.

    Attributes:
        kind: the form, as the library names it.
        coding: the rule.
        shape: sizes of the weight.
        parts: the sources that the rule needs, by the names that it uses.
    """

    kind: str
    coding: Coding
    shape: Ints
    parts: Mapping[str, Source]


@dataclass(frozen=True)
class Parts:
    """The parts of one weight.

    Attributes:
        found: sources by part: `codes`, `scale`.
        config: the model's config; None if there is none.
        read: reads the raw elements of a source.
    """

    found: Mapping[str, Source]
    config: ModelConfig | None
    read: Read

    def __getitem__(self, part: str) -> Source:
        if part not in self.found:
            raise OtherFormError(f"its {part} is not here")
        return self.found[part]

    @property
    def said(self) -> Mapping[str, Any]:
        """What the config says about the quantization; empty if there is none."""
        return self.config.quantization if self.config is not None else {}

    @property
    def stated(self) -> Sequence[Mapping[str, Any]]:
        """What a config of compressed-tensors says of weights with codes such as these, in each of its groups."""
        return [] if self.config is None else compressed_weights(self.config, self[CODES].dtype)

    def numbers(self, part: str) -> Any:
        """The values of a part, as a flat array of numbers."""
        source = self[part]
        return decoded(self.read(source).reshape(-1), source.dtype)

    def check(self, part: str, dtypes: Iterable[str], *shapes: Ints) -> Source:
        """Return a part that has one of some dtypes, and one of some shapes; refuse the weight if it has another."""
        source = self[part]
        if source.dtype not in dtypes:
            raise OtherFormError(f"its {part} is {source.dtype}")
        if shapes and source.shape not in shapes:
            expected = " or ".join(sizes_of(shape) for shape in shapes)
            raise OtherFormError(f"its {part} does not fit its shape: {sizes_of(source.shape)}, expected {expected}")
        return source


def fp8_blocks(parts: Parts) -> Decoded:
    """fp8 codes with a scale for each block of rows and columns, for each expert if there are three dimensions."""
    own = "scale_inv" if "scale_inv" in parts.found else "scale"
    codes, scale = parts[CODES], parts.check(own, (*FLOATS, "float8_e8m0fnu", "uint8"))
    if own == "scale" and len(scale.shape) != len(codes.shape):
        raise OtherFormError(f"its scale, {sizes_of(scale.shape)}, is not one for each block")
    stated = sizes_in(parts.said.get("weight_block_size"))
    blocks = _blocks(codes.shape, scale.shape, [stated or (DEEPSEEK_BLOCK if own == "scale" else None)])
    exponents = ONE if scale.dtype == "uint8" else 0
    coding = Coding(CODES, own, blocks, "float32", _model_dtype(parts.config), exponents=exponents)
    return Decoded("fp8", coding, codes.shape, {CODES: codes, own: scale})


def compressed(parts: Parts) -> Decoded:
    """A weight of compressed-tensors: packed integers, integers, fp8, mxfp4, mxfp8 or nvfp4."""
    codes = parts[CODES]
    if codes.dtype == "int32":
        return _packed_integers(parts)
    if codes.dtype == "uint8":
        return _packed_floats(parts)
    scale = parts.check("scale", (*FLOATS, "uint8") if codes.dtype in FP8 else FLOATS)
    blocks = _groups(codes.shape, scale.shape, parts.stated)
    exponents, dtype = (ONE, "bfloat16") if scale.dtype == "uint8" else (0, scale.dtype)
    coding = Coding(CODES, "scale", blocks, dtype, dtype, scale_dtype=dtype, exponents=exponents)
    found = {CODES: codes, "scale": scale}
    if _has_zero_points(parts):
        coding = coding._replace(zero="zero_point")
        found["zero_point"] = parts.check("zero_point", ("int8", *FP8), scale.shape)
    if "g_idx" in parts.found:
        coding = coding._replace(packing=Packing(8, -1))
    return _with_order("mxfp8" if exponents else "quantized", parts, coding, codes.shape, found)


def _packed_integers(parts: Parts) -> Decoded:
    """Integers of 1 to 8 bits, packed along a row; zero points may be packed along a column.

    A code is stored plus half of its range, and so is a packed zero point.
    """
    codes, scale = parts[CODES], parts.check("scale", FLOATS)
    parts.check("shape", ("int64", "int32"), (2,))
    shape = tuple(parts.numbers("shape").tolist())
    if len(codes.shape) != 2 or shape[0] != codes.shape[0] or not 0 < shape[1] <= codes.shape[1] * WORD:
        raise OtherFormError(f"its codes, {sizes_of(codes.shape)}, do not fit its shape, {sizes_of(shape)}")
    bits = _one_of(
        [n for n in range(1, 9) if _words(shape[1], n) == codes.shape[1]],
        [one.get("num_bits") for one in parts.stated],
        f"its codes, {sizes_of(codes.shape)}, do not fit its shape, {sizes_of(shape)}",
    )
    blocks = _groups(shape, scale.shape, parts.stated)
    coding = Coding(CODES, "scale", blocks, scale.dtype, scale.dtype, packing=Packing(bits, -1))
    found, half = {CODES: codes, "scale": scale}, 1 << bits - 1
    if not _has_zero_points(parts):
        coding = coding._replace(zero_offset=half)
    elif parts["zero_point"].dtype == "int32" and len(scale.shape) == 2:
        packed = (_words(shape[0], bits), scale.shape[1])
        found["zero_point"] = parts.check("zero_point", ("int32",), packed)
        coding = coding._replace(zero="zero_point", zero_packing=Packing(bits, -2))
    else:
        found["zero_point"] = parts.check("zero_point", ("int8",), scale.shape)
        coding = coding._replace(zero="zero_point", zero_offset=half)
    return _with_order("pack-quantized", parts, coding, shape, found)


def _packed_floats(parts: Parts) -> Decoded:
    """fp4, two codes to a byte: with a scale for 16 and a global scale (nvfp4), or a power of two for 32 (mxfp4)."""
    codes, scale = parts[CODES], parts.check("scale", ("uint8", "float8_e4m3fn"))
    if len(codes.shape) != 2:
        raise OtherFormError("it is no matrix")
    exponents = ONE if scale.dtype == "uint8" else 0
    shape, block = (codes.shape[0], codes.shape[1] * 2), 32 if exponents else 16
    if shape[1] % block:
        raise OtherFormError(f"its {shape[1]} columns are no multiple of {block}")
    parts.check("scale", (scale.dtype,), (shape[0], shape[1] // block))
    coding = Coding(CODES, "scale", (1, block), "bfloat16", "bfloat16", numbers=FP4, packing=Packing(4, -1))
    found = {CODES: codes, "scale": scale}
    if exponents:
        return Decoded("mxfp4", coding._replace(exponents=exponents, scale_dtype="bfloat16"), shape, found)
    found["global_scale"] = parts.check("global_scale", ("float32",), (1,))
    nested = ScaleCoding("", "global_scale", prod(scale.shape), divides=True)
    return Decoded("nvfp4", coding._replace(scale_coding=nested), shape, found)


def modelopt_nvfp4(parts: Parts) -> Decoded:
    """fp4 of ModelOpt, two codes to a byte, with a scale for 16 that is multiplied with one of the whole weight."""
    codes, scale = parts[CODES], parts.check("scale", ("float8_e4m3fn",))
    if len(codes.shape) != 2 or scale.shape != (codes.shape[0], codes.shape[1] // 8) or codes.shape[1] % 8:
        raise OtherFormError(f"its scales, {sizes_of(scale.shape)}, do not fit its codes, {sizes_of(codes.shape)}")
    found = {CODES: codes, "scale": scale, "scale_2": parts.check("scale_2", ("float32",), (), (1,))}
    nested = ScaleCoding("", "scale_2", prod(scale.shape))
    coding = Coding(CODES, "scale", (1, 16), "float32", _model_dtype(parts.config), packing=Packing(4, -1))
    coding = coding._replace(numbers=tuple(number or 0.0 for number in FP4), scale_coding=nested)  # no -0
    return Decoded("nvfp4", coding, (codes.shape[0], codes.shape[1] * 2), found)


def mxfp4_experts(parts: Parts) -> Decoded:
    """fp4 of stacked experts, [experts, rows, blocks, 16 bytes]; the weight is [experts, columns, rows].

    Codes count double and powers half, so that the largest power, 2**128, is a float32 too.
    """
    codes = parts.check(CODES, ("uint8",))
    if len(codes.shape) != 4 or codes.shape[-1] != 16 or not codes.contiguous:
        raise OtherFormError(f"its blocks are {sizes_of(codes.shape)}, not experts, rows, blocks and 16 bytes")
    experts, rows, count, _ = codes.shape
    scales = parts.check("scales", ("uint8",), (experts, rows, count))
    coding = Coding(CODES, "scales", (1, 1, 32), "float32", _model_dtype(parts.config))
    double = tuple(2 * number for number in FP4)
    coding = coding._replace(packing=Packing(4, -1), numbers=double, exponents=ONE + 1, transposed=True)
    found = {CODES: codes.reshaped((experts, rows, count * 16)), "scales": scales}
    return Decoded("mxfp4", coding, (experts, count * 32, rows), found)


def gptq(parts: Parts) -> Decoded:
    """Integers of 2, 3, 4 or 8 bits, packed along columns; `g_idx` has the group of each input.

    In the older of two formats each zero point is stored minus 1. Where it is the largest code, 1 more does not fit,
    and versions of the library make different numbers of it: such a weight is refused.
    """
    codes, zeros, scales = _matrices(parts)
    (groups, outputs), said = scales.shape, parts.said
    order = parts.check("g_idx", ("int32", "int64")) if "g_idx" in parts.found else None
    if order is None and said.get("desc_act") is True:
        raise OtherFormError("its g_idx is not here, and the config says desc_act")
    inputs = prod(order.shape) if order is not None else 0
    fitting = [n for n in GPTQ_BITS if zeros.shape == (groups, _words(outputs, n))]
    fitting = [n for n in fitting if order is None or codes.shape[0] == _words(inputs, n)]
    why = f"its qweight, {sizes_of(codes.shape)}, and qzeros, {sizes_of(zeros.shape)}, do not fit"
    bits = _one_of(fitting, [bits_of(parts.config)], f"{why} its scales, {sizes_of(scales.shape)}")
    inputs = inputs or codes.shape[0] * WORD // bits
    size = _group_size(inputs, groups, None if said.get("dynamic") else said.get("group_size"))
    if codes.shape[1] != outputs:
        raise OtherFormError(f"{why} its scales, {sizes_of(scales.shape)}")
    coding = Coding(CODES, "scales", (size, 1), scales.dtype, scales.dtype, zero="qzeros", transposed=True)
    coding = coding._replace(packing=Packing(bits, -2), zero_packing=Packing(bits, -1))
    found = {CODES: codes, "scales": scales, "qzeros": zeros}
    if order is not None:
        numbers = parts.numbers("g_idx")
        if len(order.shape) != 1 or numbers.min() < 0 or numbers.max() >= groups:
            raise OtherFormError(f"its g_idx names groups beyond its {groups}")
        coding, found = coding._replace(groups="g_idx"), {**found, "g_idx": order}
    if gptq_format(method_of(parts.config), said) == "gptq":  # not gptq_v2
        coding = coding._replace(zero_offset=1)
        if unpacked(zeros, Packing(bits, -1), Box.whole(scales.shape), parts.read).max() == (1 << bits) - 1:
            text = f"a zero point is {(1 << bits) - 1}, and 1 more does not fit {bits} bits"
            raise OtherFormError(f"{text}: versions of GPTQ make different numbers of it")
    return Decoded(f"int{bits}", coding, (outputs, inputs), found)


def awq(parts: Parts) -> Decoded:
    """Integers of 4 bits, packed along rows with the columns of each integer in an order of its own ("GEMM")."""
    codes, zeros, scales = _matrices(parts)
    (inputs, columns), (groups, outputs) = codes.shape, scales.shape
    if outputs != columns * 8 or zeros.shape != (groups, columns):
        text = f"its qweight, {sizes_of(codes.shape)}, and qzeros, {sizes_of(zeros.shape)}, do not fit"
        raise OtherFormError(f"{text} its scales, {sizes_of(scales.shape)}")
    size = _group_size(inputs, groups, parts.said.get("group_size", parts.said.get("q_group_size")))
    packing = Packing(4, -1, AWQ_ORDER)
    coding = Coding(CODES, "scales", (size, 1), scales.dtype, scales.dtype, zero="qzeros", transposed=True)
    coding = coding._replace(packing=packing, zero_packing=packing)
    return Decoded("int4", coding, (outputs, inputs), {CODES: codes, "scales": scales, "qzeros": zeros})


RULES: Mapping[str, tuple[str, Callable[[Parts], Decoded]]] = {
    "fp8": ("transformers", fp8_blocks),
    "mxfp4": ("transformers", mxfp4_experts),
    "modelopt": ("ModelOpt", modelopt_nvfp4),
    "compressed-tensors": ("compressed-tensors", compressed),
    "gptq": ("GPTQModel", gptq),
    "awq": ("AutoAWQ", awq),
}
"""The library whose rule it is, and the rule, by the name that `quantized_weights.decoder_of` returns."""


# -- shapes that fit together, or a reason to refuse the weight --------------------------------------------------------


def _words(count: int, bits: int) -> int:
    """The number of integers that a number of codes takes."""
    return -(-count * bits // WORD)


def _one_of(fitting: Sequence[int], stated: Sequence[Any], why: str) -> int:
    """The only number of bits that fits the shapes; if several fit, the one that the config states."""
    chosen = fitting if len(fitting) == 1 else [bits for bits in fitting if bits in stated]
    if len(chosen) != 1:
        raise OtherFormError(why if not fitting else f"its shapes fit codes of {' and '.join(map(str, fitting))} bits")
    return chosen[0]


def _matrices(parts: Parts) -> tuple[Source, Source, Source]:
    """Codes, zero points and scales of GPTQ and AWQ."""
    found = parts.check(CODES, ("int32",)), parts.check("qzeros", ("int32",)), parts.check("scales", FLOATS)
    if any(len(source.shape) != 2 or not prod(source.shape) for source in found):
        raise OtherFormError("its parts are no matrices")
    return found


def _group_size(inputs: int, groups: int, stated: Any) -> int:
    """The number of inputs that share a scale."""
    size = stated if type(stated) is int and stated > 0 else inputs if stated == -1 else 0
    if size and -(-inputs // size) != groups:
        raise OtherFormError(f"its {inputs} inputs have {groups} groups, and the config says groups of {size}")
    if not size and inputs % groups:
        raise OtherFormError(f"its {inputs} inputs are no multiple of its {groups} groups")
    return size or inputs // groups


def _groups(shape: Ints, grid: Ints, stated: Sequence[Mapping[str, Any]]) -> Ints:
    """The extent of a block of compressed-tensors: the tensor, a row, a group in a row, or a block."""
    structures = [sizes_in(one.get("block_structure")) for one in stated]
    if prod(grid) == 1 or any(structures):
        return _blocks(shape, grid, structures)
    if len(grid) != len(shape) or grid[:-1] != shape[:-1]:
        raise OtherFormError(f"its scales, {sizes_of(grid)}, do not fit its shape, {sizes_of(shape)}")
    if not grid[-1] or shape[-1] % grid[-1]:
        raise OtherFormError(f"its {shape[-1]} columns are no multiple of its {grid[-1]} groups")
    size, said = shape[-1] // grid[-1], [one.get("group_size") for one in stated]
    if said and all(type(n) is int and n > 0 for n in said) and size not in said:
        raise OtherFormError(f"its scales are of groups of {size}, and the config says {' or '.join(map(str, said))}")
    return (*(1 for _ in shape[1:]), size)


def _blocks(shape: Ints, grid: Ints, stated: Sequence[Ints | None]) -> Ints:
    """The extent of a block of rows and columns, given the number of blocks in each dimension.

    A config states the extent; a block at the edge may be cut. Without a statement, it is DeepSeek's, or divides the
    sizes, and a weight that both fit is refused.
    """
    if prod(grid) == 1:
        return tuple(max(n, 1) for n in shape)
    said = [size for size in stated if size is not None and len(size) == 2 and min(size) > 0]
    if len(shape) < 2 or len(grid) != len(shape) or grid[:-2] != shape[:-2] or not prod(grid):
        raise OtherFormError(f"its scales, {sizes_of(grid)}, do not fit its shape, {sizes_of(shape)}")
    sizes, counts = shape[-2:], grid[-2:]
    even: Ints = tuple(n // count for n, count in zip(sizes, counts, strict=True))
    divides = all(n % count == 0 for n, count in zip(sizes, counts, strict=True))
    tried: Sequence[Ints] = said or [DEEPSEEK_BLOCK, *([even] if divides else [])]
    fitting = {one for one in tried if all(-(-n // b) == c for n, b, c in zip(sizes, one, counts, strict=True))}
    if len(fitting) != 1:
        of = " or ".join(sizes_of(one) for one in tried)
        both = f"its scales fit blocks of {of} alike, and no config says which"
        one = f"its scales, {sizes_of(grid)}, do not fit blocks of {of} of its shape, {sizes_of(shape)}"
        raise OtherFormError(both if fitting else one)
    return (*(1 for _ in shape[2:]), *fitting.pop())


def _has_zero_points(parts: Parts) -> bool:
    """Whether a weight of compressed-tensors has zero points; refuse it if the config says so and they are not here."""
    here = "zero_point" in parts.found
    if not here and parts.stated and all(one.get("symmetric") is False for one in parts.stated):
        raise OtherFormError("its zero_point is not here, and the config says that it is not symmetric")
    return here


def _with_order(kind: str, parts: Parts, coding: Coding, shape: Ints, found: Mapping[str, Source]) -> Decoded:
    """Add the group of each column, if columns were quantized in another order; -1 stands for no such order."""
    if "g_idx" not in parts.found:
        if parts.stated and all(one.get("actorder") in ("group", "dynamic", True) for one in parts.stated):
            raise OtherFormError(
                "its g_idx is not here, and the config says that its columns have an order of their own"
            )
        return Decoded(kind, coding, shape, found)
    source = parts.check("g_idx", ("int32", "int64"), shape[-1:])
    numbers = parts.numbers("g_idx")
    if (numbers == -1).all():
        return Decoded(kind, coding, shape, found)
    assert not isinstance(coding.blocks, int)
    size = coding.blocks[-1]
    count = shape[-1] // size
    if numbers.min() < 0 or numbers.max() >= count or (np.bincount(numbers) != size).any():
        raise OtherFormError(f"its g_idx does not name each of {count} groups {size} times")
    return Decoded(kind, coding._replace(groups="g_idx"), shape, {**found, "g_idx": source})


def _model_dtype(config: ModelConfig | None) -> str:
    """The dtype of the model's parameters, as its config states it; bfloat16 if it states none."""
    content = config.content if config is not None else {}
    inside = content.get("text_config")
    for place in (content, inside if isinstance(inside, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            if (name := str(place.get(key)).removeprefix("torch.")) in FLOATS:
                return name
    return "bfloat16"
