"""Parameters without elements: what ZeRO-3 leaves on each rank in their place is no model, an empty buffer is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptools
from ckptools.errors import NotWholeError

Names = dict[str, torch.Tensor]


def ungathered(layers: int = 2, prefix: str = "model.") -> Names:
    """A model's state dict on one rank under ZeRO-3: norms are small and whole, the rest is spread over the ranks."""
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(9, 4),
            "layers": torch.nn.ModuleList(
                torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8), "norm": torch.nn.LayerNorm(4)}) for _ in range(layers)
            ),
        }
    )
    return {
        prefix + name: torch.empty(0) if "norm" not in name and not name.endswith("bias") else value.detach().clone()
        for name, value in model.state_dict().items()
    }


def adapter() -> Names:
    return {f"base_model.layers.{n}.q.lora_{ab}.weight": torch.empty(0) for n in range(2) for ab in "AB"}


def saved(folder: Path, form: str) -> Path:
    """Save such a model in one of the forms that people do, and return what they open."""
    state: Any = ungathered()
    if form == "lightning":
        state = {"state_dict": state, "epoch": 1, "global_step": 7, "optimizer_states": [], "lr_schedulers": []}
    elif form == "averages":
        state = {"model": {"w": torch.ones(3, 4)}, "ema": state}
    if form in ("safetensors", "adapter", "trainer"):
        name = "adapter_model.safetensors" if form == "adapter" else "model.safetensors"
        save_file(adapter() if form == "adapter" else state, folder / name)
        if form == "trainer":
            torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
        return folder
    path = folder / ("pytorch_model.bin" if form == "bin" else "x.pt")
    torch.save(state, path)
    return path


@pytest.mark.parametrize("form", ["pt", "bin", "safetensors", "adapter", "trainer", "lightning", "averages"])
def test_a_state_dict_that_was_not_gathered_under_zero_3_is_not_whole(tmp_path, form):
    ck = ckptools.open(saved(tmp_path, form))
    (problem,) = [p for p in ck.problems if p.severity == "error"]
    assert (problem.code, ck.whole) == ("CK109", False)
    assert ck.verdict.headline == "NOT WHOLE: placeholders in the place of tensors"
    (cause,) = (cause for cause in ck.verdict.causes if cause.code == "CK109")
    assert "ZeRO-3 placeholders" in cause.what and "*_optim_states.pt" in cause.what
    assert not ck.verify().ok


def test_placeholders_are_counted(tmp_path):
    assert "3 of 9 tensors are [0]" in ckptools.open(saved(tmp_path, "pt")).verdict.causes[0].what


def test_placeholders_are_not_written_unless_what_is_missing_may_be_left_out(tmp_path):
    ck = ckptools.open(saved(tmp_path, "pt"))
    with pytest.raises(NotWholeError, match="ZeRO-3 placeholders"):
        ck.consolidate(tmp_path / "out.safetensors")
    ck.consolidate(tmp_path / "out.safetensors", allow_missing=True)
    assert all(value.numel() for value in load_file(tmp_path / "out.safetensors").values())
    assert ckptools.open(tmp_path / "out.safetensors").whole is False


def test_match_says_why_the_shape_differs(tmp_path):
    path = saved(tmp_path, "pt")
    wanted = {name: [8, 4] if value.shape == (0,) else list(value.shape) for name, value in ungathered().items()}
    rows = {row.name: row for row in ckptools.open(path).match({n: torch.empty(s) for n, s in wanted.items()}).rows}
    assert "ZeRO-3 placeholder" in rows["model.embed.weight"].note


@pytest.mark.parametrize(
    "empty",
    [
        {"dummy": torch.empty(0)},
        {"frozen.weight": torch.empty(0, 16), "b": torch.empty(0, dtype=torch.int64)},
        {"up.weight": torch.empty(0), "up.folded": torch.ones(2, 4), "up.bias": torch.ones(8)},
        {f"layers.{n}.unused": torch.empty(0) for n in range(3)},
    ],
    ids=["one", "two dimensions", "packed beside it", "few of many"],
)
def test_parameters_that_are_empty_by_design_are_whole(tmp_path, empty):
    model = {f"layers.{n}.w": torch.ones(4, 4) for n in range(6)}
    torch.save({**model, **empty}, tmp_path / "x.pt")
    ck = ckptools.open(tmp_path / "x.pt")
    assert (ck.whole, ck.problems) == (True, ())


def test_moments_with_elements_prove_that_an_empty_parameter_had_some(tmp_path):
    model = {**{f"layers.{n}.w": torch.ones(4, 4) for n in range(6)}, "embed": torch.empty(0)}
    state = {name: {"exp_avg": torch.ones(4, 4)} for name in model}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(model)}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "x.pt")
    assert "CK109" in [p.code for p in ckptools.open(tmp_path / "x.pt").problems]
