"""Small floats with a scale for each block have the values that torchao gives them, whole and in part."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import ckptools
from ckptools.model.regions import Box
from ckptools.tensor_io.read import dequantized, read_box
from tests.other_classes import of_class
from tests.truth import FIXTURES
from tests.versions import torch_with

FOLDER = FIXTURES / "torchao-flattened"
VALUES = {n.removeprefix("model/"): t for n, t in load_file(FOLDER / "others" / "truth.safetensors").items()}
MX = "torchao.prototype.mx_formats.mx_tensor.MXTensor"


@pytest.mark.parametrize("key", VALUES)
def test_values_are_those_of_torchao_bit_for_bit(key):
    loaded, value = ckptools.open(FOLDER / "others/model.pt").model[key].dequantize(), VALUES[key]
    assert (loaded.dtype, loaded.shape) == (value.dtype, value.shape)
    assert loaded.view(torch.uint8).tolist() == value.view(torch.uint8).tolist()


@pytest.mark.parametrize("key", ["nvfp4_tiled.weight", "mxfp8_tiled.weight", "mxfp4.weight", "nf4.weight"])
def test_a_region_is_that_of_the_whole(key):
    tensor, value = dequantized(ckptools.open(FOLDER / "others/model.pt").tree[key]), VALUES[key]
    rows, columns = value.shape
    part = read_box(tensor, Box((rows // 3, 5), (rows // 2, columns - 12)))
    expected = value[rows // 3 : rows // 3 + rows // 2, 5 : columns - 7].contiguous()
    assert part.tobytes() == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scales_are_rounded_before_they_are_used(tmp_path, monkeypatch, dtype):
    """torchao: `qdata.to(dtype) * scale.to(dtype)`; float16 has neither 2 ** 100 nor 2 ** -100."""
    torch_with("float8_e8m0fnu")
    qdata = torch.randn(256, 32).to(torch.float8_e4m3fn)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1).view(torch.float8_e8m0fnu)
    parts = {"qdata": qdata, "scale": scale, "block_size": 32, "elem_dtype": torch.float8_e4m3fn}
    torch.save({"w": of_class(monkeypatch, MX, (256, 32), dtype, **parts)}, tmp_path / "m.pt")
    found = ckptools.open(tmp_path / "m.pt").model["w"].dequantize()
    expected = qdata.to(dtype) * scale.float().to(dtype)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize(
    "parts",
    [{"block_size": 24}, {"scale": torch.zeros(5, 2)}, {"is_swizzled_scales": True}, {"qdata": torch.zeros(6, 32)}],
)
def test_what_the_class_does_not_write_is_refused_by_name(tmp_path, monkeypatch, parts):
    torch_with("float8_e8m0fnu")
    codes, scale = torch.zeros(6, 64, dtype=torch.uint8), torch.zeros(6, 2, dtype=torch.uint8)
    usual = {"qdata": codes.view(torch.float8_e4m3fn), "scale": scale.view(torch.float8_e8m0fnu), "block_size": 32}
    torch.save({"w": of_class(monkeypatch, MX, (6, 64), torch.bfloat16, **{**usual, **parts})}, tmp_path / "m.pt")
    assert "MXTensor, which holds qdata, scale" in ckptools.open(tmp_path / "m.pt").tree["w"].note
