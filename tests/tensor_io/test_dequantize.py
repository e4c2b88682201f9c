"""Codes and scales become the values that the classes themselves make of them, computed here by torch."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import ReadError
from ckptools.model.regions import Box
from ckptools.tensor_io.read import dequantized, load, read_box, rounded
from tests.other_classes import OPTIM, adam_state, of_class

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
COMMON = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def read_again(tmp_path, tensor):
    """A tensor as ckptools has it when it was saved and opened."""
    torch.save({"w": tensor}, tmp_path / "one.pt")
    return ckptools.open(tmp_path / "one.pt").model["w"]


def by_blocks(numbers, scale):
    """How torchao scales consecutive elements: `dequant_with_qmap` and `OptimStateFp8.dequantize`."""
    return (numbers.reshape(scale.shape[0], -1) * scale.view(-1, 1)).reshape(numbers.shape)


@given(rows=st.integers(1, 9), columns=st.sampled_from([8, 32, 96]), block=st.sampled_from([4, 8]), seed=st.integers(0))
@COMMON
def test_codes_of_8_bits_are_looked_up_and_scaled_by_block(tmp_path, monkeypatch, rows, columns, block, seed):
    state = adam_state(monkeypatch, (rows, columns), block, seed % 1000)
    expected = by_blocks(state.qmap[state.codes.int()], state.scale)
    assert bits(load(dequantized(read_again(tmp_path, state)))) == bits(expected)


@given(shape=st.sampled_from([(64,), (3, 32), (2, 5, 16)]), signed=st.booleans(), seed=st.integers(0, 1000))
@COMMON
def test_codes_of_4_bits_lie_two_to_a_byte_the_first_in_its_upper_half(tmp_path, monkeypatch, shape, signed, seed):
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (prod(shape) // 2,), dtype=torch.uint8, generator=made)
    scale, qmap = torch.rand(prod(shape) // 16, generator=made), torch.linspace(-1, 1, 16)
    parts = {"codes": codes, "scale": scale, "qmap": qmap, "signed": signed, "_shape": shape}
    state = of_class(monkeypatch, OPTIM.format("4bit", "4bit"), shape, torch.bfloat16, **parts)
    each = torch.stack([codes >> 4, codes & 15], dim=-1).reshape(-1)
    expected = by_blocks(qmap[each.int()], scale).view(shape)
    found = dequantized(read_again(tmp_path, state))
    assert bits(load(found)) == bits(expected)
    assert found[..., 1:-1].tolist() == expected[..., 1:-1].tolist()


def test_fp8_codes_are_numbers_themselves(tmp_path, monkeypatch):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:127].repeat(2)[:252].reshape(9, 28)
    scale = torch.rand(63) + 0.5
    state = of_class(monkeypatch, OPTIM.format("fp8", "Fp8"), (9, 28), torch.float32, codes=codes, scale=scale)
    assert bits(load(dequantized(read_again(tmp_path, state)))) == bits(by_blocks(codes.float(), scale))


def affine(qdata, scale, zero, blocks, dtype):
    """`_dequantize_affine_no_dtype_check` of torchao, for blocks that divide the shape."""
    counts = [n // b for n, b in zip(qdata.shape, blocks, strict=True)]
    split = [part for pair in zip(counts, blocks, strict=True) for part in pair]
    ones = [part for n in counts for part in (n, 1)]
    found = qdata.view(split).to(dtype)
    found = found - zero.view(ones).to(dtype) if zero is not None else found
    return (found * scale.view(ones)).view(qdata.shape).to(dtype)


@given(
    dtype=st.sampled_from(FLOATS),
    scaled=st.sampled_from(FLOATS),
    blocks=st.sampled_from([(1, 12), (6, 12), (1, 4), (3, 2)]),
    zeros=st.sampled_from([None, torch.int8, torch.float32]),
    seed=st.integers(0, 1000),
)
@COMMON
def test_an_affine_weight_is_rounded_where_torch_rounds(tmp_path, monkeypatch, dtype, scaled, blocks, zeros, seed):
    made = torch.Generator().manual_seed(seed)
    qdata = torch.randint(-128, 128, (6, 12), dtype=torch.int8, generator=made)
    grid = (6 // blocks[0], 12 // blocks[1])
    scale = torch.rand(grid, generator=made).to(scaled)
    zero = None if zeros is None else (torch.randn(grid, generator=made) * 40).to(zeros)
    parts = {"qdata": qdata, "scale": scale, "zero_point": zero, "block_size": list(blocks)}
    weight = of_class(monkeypatch, "torchao.quantization.Int8Tensor", (6, 12), dtype, **parts)
    assert bits(load(dequantized(read_again(tmp_path, weight)))) == bits(affine(qdata, scale, zero, blocks, dtype))


@pytest.mark.parametrize("grid", [(1, 1), (6, 1), (2, 3), ()], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_shape_of_its_scale_tells_the_blocks_of_an_fp8_weight(tmp_path, monkeypatch, grid, dtype):
    qdata, scale = torch.randn(6, 12).to(torch.float8_e4m3fn), torch.rand(grid)
    weight = of_class(monkeypatch, "torchao.quantization.Float8Tensor", (6, 12), dtype, qdata=qdata, scale=scale)
    spread = scale
    for d, n in enumerate(grid):
        spread = spread.repeat_interleave((6, 12)[d] // n, d)
    assert bits(load(dequantized(read_again(tmp_path, weight)))) == bits((qdata.float() * spread).to(dtype))


def test_scales_of_rows_have_the_dtype_of_the_weight(tmp_path, monkeypatch):
    data, scale = torch.randint(-127, 128, (5, 8), dtype=torch.int8), torch.rand(5).bfloat16()
    name = "torchao.prototype.quantized_training.int8.Int8QuantizedTrainingLinearWeight"
    weight = of_class(monkeypatch, name, (5, 8), torch.bfloat16, int_data=data, scale=scale)
    assert bits(load(dequantized(read_again(tmp_path, weight)))) == bits(data * scale.view(-1, 1))


def test_codes_that_are_transposed_are_read_in_their_order(tmp_path, monkeypatch):
    qdata, scale = torch.randint(-128, 128, (12, 6), dtype=torch.int8).t(), torch.rand(1, 6).t()
    parts = {"qdata": qdata, "scale": scale, "zero_point": None, "block_size": [1, 12]}
    weight = of_class(monkeypatch, "torchao.quantization.Int8Tensor", (6, 12), torch.float32, **parts)
    assert bits(load(dequantized(read_again(tmp_path, weight)))) == bits(qdata * scale)


@given(box=st.tuples(st.integers(0, 8), st.integers(0, 31), st.integers(1, 9), st.integers(1, 32)))
@COMMON
def test_any_region_is_that_of_the_whole(tmp_path, monkeypatch, box):
    top, left, rows, columns = box[0], box[1], min(box[2], 9 - box[0]), min(box[3], 32 - box[1])
    state = adam_state(monkeypatch, (9, 32), 16)
    found, expected = dequantized(read_again(tmp_path, state)), by_blocks(state.qmap[state.codes.int()], state.scale)
    part = read_box(found, Box((top, left), (rows, columns)))
    assert part.view("<f4").tolist() == expected[top : top + rows, left : left + columns].tolist()
    assert bits(found[::2, 1::3]) == bits(expected[::2, 1::3])


def test_more_than_is_worked_out_at_a_time_is_put_together(tmp_path, monkeypatch):
    state = adam_state(monkeypatch, (1100, 512))
    expected = by_blocks(state.qmap[state.codes.int()], state.scale)
    assert bits(load(dequantized(read_again(tmp_path, state)))) == bits(expected)


def test_a_state_of_no_elements_has_no_values(tmp_path, monkeypatch):
    state = adam_state(monkeypatch, (0, 8))
    assert load(dequantized(read_again(tmp_path, state))).shape == (0, 8)


@given(numbers=st.lists(st.floats(width=32), min_size=1, max_size=20), dtype=st.sampled_from(["bfloat16", "float16"]))
@settings(deadline=None)
def test_numbers_are_rounded_as_torch_rounds_them(numbers, dtype):
    values = torch.tensor(numbers, dtype=torch.float32)
    expected = values.to(getattr(torch, dtype)).float()
    found = torch.from_numpy(rounded(values.numpy(), dtype))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


def test_nothing_is_dequantized_unasked(tmp_path, monkeypatch):
    tensor = read_again(tmp_path, adam_state(monkeypatch, (4, 256)))
    with pytest.raises(ReadError, match=r"quantized as torchao OptimState8bit \(codes, scale, qmap\).*--dequantize"):
        tensor.load()
    with pytest.raises(ReadError, match="OptimState8bit"):
        tensor.load(rank=0)
