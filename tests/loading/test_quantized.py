"""Codes of quantized weights are never loaded as values: they are refused, or their values are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckptools
from ckptools.errors import RefusedError, UsageError
from tests.quantized import COLUMNS, LAYERS, ROWS, WAYS, folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(COLUMNS, ROWS, bias=False)
        self.norm = nn.RMSNorm(COLUMNS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, COLUMNS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))


def test_codes_are_not_cast_into_a_model(tmp_path: Path) -> None:
    model, before = Model(), Model()
    before.load_state_dict(model.state_dict())
    with pytest.raises(RefusedError, match=r"3 values of codes: model\.layers\.0\.mlp\.weight .*dequantize=True"):
        ckptools.load(model, folder(tmp_path, WAYS["fp8 blocks"]), cast=True, strict=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_their_values_are_loaded_where_that_is_asked_for(tmp_path: Path) -> None:
    model, path = Model(), folder(tmp_path, WAYS["fp8 blocks"])
    ckptools.load(model, path, cast=True, dequantize=True)
    right = ckptools.open(path).dequantized().model
    assert all(torch.equal(value, right[name].load().float()) for name, value in model.state_dict().items())
    plain = ckptools.load_state_dict(path, dequantize=True, dtype="fp32")
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())


def test_a_plain_dict_has_codes_as_they_are_and_casts_none(tmp_path: Path) -> None:
    path = folder(tmp_path, WAYS["fp8 blocks"])
    assert ckptools.load_state_dict(path)["layers.0.mlp.weight"].dtype is torch.float8_e4m3fn
    with pytest.raises(RefusedError, match="codes of fp8"):
        ckptools.load_state_dict(path, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["int8", "bf17", torch.int64])
def test_a_dtype_that_is_none_of_numbers_is_one_clear_line(dtype: str | torch.dtype, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose a floating-point dtype"):
        ckptools.load_state_dict(folder(tmp_path, WAYS["fp8 blocks"]), dtype=dtype)
