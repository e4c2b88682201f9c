"""A checkpoint of a newer torch is loaded by an older one, which cannot read it itself.

`torch2.15.0-dcp-w4` was saved by 4 ranks of torch 2.15.0 with gloo, on a CPU: sharded and replicated tensors of many
dtypes and strides. Its `.metadata` pickles TensorProperties with 6 fields, of which torch up to 2.13 unpacks 5.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorProperties

import ckptools
from ckptools.errors import RefusedError
from tests.consolidate.test_outputs import raw

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

SAVED = Path(__file__).parent / "torch2.15.0-dcp-w4"
FIELDS_HERE = len(TensorProperties().__getstate__())


def model() -> dict[str, torch.Tensor]:
    """What a state dict of the saved model holds, without its values and without dtypes that this torch lacks."""
    tensors = ckptools.open(SAVED).model
    return {
        name: torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for name, tensor in tensors.items()
        if hasattr(torch, tensor.dtype)
    }


def test_dcp_of_torch_2_15_is_loaded_where_torch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    can_read_it = FIELDS_HERE > 5
    with (
        nullcontext()
        if can_read_it
        else pytest.raises(CheckpointException, match=r"too many values to unpack|Can't get attribute")
    ):
        dcp.load({"model": model()}, checkpoint_id=SAVED)
    loaded: dict[str, Any] = {"model": model(), "step": None}
    truth: dict[str, Any] = {"model": model(), "step": None}
    dcp.load(loaded, storage_reader=ckptools.StorageReader(SAVED, strict=False))
    # With the sixth field taken off, and some dtype in the place of those that torch 2.6 lacks, torch reads the same
    # file, and so is the judge of every value.
    setstate = TensorProperties.__setstate__
    if not can_read_it:
        monkeypatch.setattr(TensorProperties, "__setstate__", lambda self, state: setstate(self, state[:5]))
    for dtype in {"float8_e8m0fnu", "float4_e2m1fn_x2"} - {*vars(torch)}:
        monkeypatch.setattr(torch, dtype, torch.uint8, raising=False)
    dcp.load(truth, checkpoint_id=SAVED)
    assert len(truth["model"]) >= 15
    assert {name: raw(value) for name, value in loaded["model"].items()} == {
        name: raw(value) for name, value in truth["model"].items()
    }
    assert loaded["step"] == truth["step"] == 3


def test_a_dtype_that_this_torch_lacks_is_refused_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu", raising=False)  # as in torch 2.6
    names = [name for name in model() if name != "e8m0"]
    assert ckptools.load_state_dict(SAVED, keys=names).keys() == {*names}
    with pytest.raises(
        RefusedError, match=r"e8m0 is float8_e8m0fnu, which torch .* does not have; leave it out with keys"
    ):
        ckptools.load_state_dict(SAVED, keys="e8m0")
    asked = {"model": {"e8m0": torch.zeros(4, 4)}}
    with pytest.raises(
        CheckpointException, match=r"e8m0 is float8_e8m0fnu, which torch .* does not have, there and float32"
    ):
        dcp.load(asked, storage_reader=ckptools.StorageReader(SAVED, strict=False, cast=True))
