"""The extra state of a module is shown with what it holds, in the two forms that Transformer Engine writes."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from ckptools.cli import app

STATE = {
    "scale_fwd": torch.tensor([1.0, 2.0, 4.0]),
    "amax_history_fwd": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(4, dtype=torch.bfloat16)[1:],
    "extra_fp8_variables": {"num_gemms": 1, "fp8_max_fwd": 448.0},
}
NAMES = ["scale_fwd", "amax_history_fwd", "half", "extra_fp8_variables.num_gemms", "extra_fp8_variables.fp8_max_fwd"]


def _bytes_io(state: object) -> io.BytesIO:
    """As Transformer Engine up to 1.12 writes it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer


def _tensor(state: object) -> torch.Tensor:
    """As Transformer Engine from 1.13 on writes it."""
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def _saved(extra: object, folder: Path, form: str) -> Path:
    state = {"model": {"linear.weight": torch.ones(2, 2), "linear._extra_state": extra}}
    if form == "dcp":
        dcp.save(state, checkpoint_id=folder / "step")
        return folder / "step"
    torch.save(state, folder / "a.pt")
    return folder / "a.pt"


def _shown(path: Path, *more: str) -> list[dict]:
    done = CliRunner().invoke(app, ["show", str(path), "*linear._extra_state*", "--json", *more])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["rows"]


@pytest.mark.parametrize("form", ["pt", "dcp"])
@pytest.mark.parametrize("written", [_bytes_io, _tensor])
def test_an_extra_state_is_shown_with_its_values(form, written, tmp_path):
    first, *inside = _shown(_saved(written(STATE), tmp_path, form), "--values", ":")
    assert [row["name"] for row in inside] == [f"{first['name']}.{name}" for name in NAMES]
    tensors = [row["values"] for row in inside[:3]]
    assert tensors == [STATE[name].tolist() for name in NAMES[:3]]
    assert [row["value"] for row in inside[3:]] == [1, 448.0]


def test_bytes_that_are_no_extra_state_stay_bytes(tmp_path):
    whole = pickle.dumps(STATE)
    for data in (whole[:-1], whole + b".", b"\x80\x04x.", b"PK\x03\x04", bytes(range(256)), bytes(8)):
        assert len(_shown(_saved(torch.frombuffer(bytearray(data), dtype=torch.uint8), tmp_path, "pt"))) == 1


def test_bytes_of_a_storage_that_are_damaged_are_no_tensor(tmp_path):
    data = bytearray(pickle.dumps(STATE))
    data[data.index(b"FloatStorage")] ^= 1
    rows = _shown(_saved(torch.frombuffer(data, dtype=torch.uint8), tmp_path, "pt"))
    assert [row["type"] for row in rows] == ["tensor"]


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("written", [_bytes_io, _tensor])
def test_nothing_in_an_extra_state_is_run(written, tmp_path):
    rows = _shown(_saved(written({"trap": Trap(tmp_path / "made")}), tmp_path, "pt"))
    assert rows[1]["name"].endswith("_extra_state.trap") and rows[1]["type"] == "object"
    assert not (tmp_path / "made").exists()
