"""LeRobot's step folders, made by hand as its train_utils writes them: each form, and what is wrong with one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptools
from ckptools.errors import NotWholeError, UnsafePathError
from tests.formats.test_accelerate import raw, save

MODEL = {"up.weight": torch.arange(12.0).reshape(4, 3), "up.bias": torch.arange(4.0)}
GROUPS = [{"lr": 0.1, "betas": [0.9, 0.999], "params": [0, 1]}]
STATES = {0: {"exp_avg": torch.ones(4, 3), "step": torch.tensor(4.0)}, 1: {"exp_avg": torch.ones(4) * 2}}


def save_optimizer(folder: Path, scale: float = 1.0) -> None:
    folder.mkdir(exist_ok=True)
    flat = {f"state/{n}/{slot}": value * scale for n, slots in STATES.items() for slot, value in slots.items()}
    save_file(flat, folder / "optimizer_state.safetensors")
    (folder / "optimizer_param_groups.json").write_text(json.dumps(GROUPS))


@pytest.fixture
def step(tmp_path) -> Path:
    folder = tmp_path / "checkpoints" / "000004"
    (folder / "pretrained_model").mkdir(parents=True)
    save_file(MODEL, folder / "pretrained_model/model.safetensors")
    (folder / "pretrained_model/config.json").write_text('{"type": "act"}')
    state = folder / "training_state"
    save_optimizer(state)
    save_file({"torch_rng_state": torch.get_rng_state()}, state / "rng_state.safetensors")
    (state / "scheduler_state.json").write_text('{"last_epoch": 4, "base_lrs": [0.1], "_last_lr": [0.1]}')
    (state / "training_step.json").write_text('{"step": 4}')
    return folder


def saved(ck: ckptools.Checkpoint, to: Path) -> dict[str, Any]:
    ck.consolidate(to / "out.pt", only="all")
    return dict(torch.load(to / "out.pt", weights_only=True))


def is_model(tree: Any) -> bool:
    return {name: raw(value) for name, value in tree.items()} == {name: raw(value) for name, value in MODEL.items()}


def test_model_and_training_state_stand_side_by_side(step, tmp_path):
    ck = ckptools.open(step)
    assert (ck.format, ck.whole, ck.step.value) == ("lerobot", True, 4)
    assert [s.kind for s in ck.sections] == ["model", "optimizer", "scheduler", "rng", "other"]
    assert ck.problems == () and ck.optimizers["optimizer"].naming.by == "shape"
    state = saved(ck, tmp_path)
    assert is_model(state["model"]) and state["optimizer"]["param_groups"] == GROUPS
    assert raw(state["optimizer"]["state"][1]["exp_avg"]) == raw(STATES[1]["exp_avg"])
    assert raw(state["rng"]["torch_rng_state"]) == raw(torch.load(tmp_path / "out.pt")["rng"]["torch_rng_state"])


def test_dcp_folders_of_fsdp2_are_read_though_weights_lie_beside_them(step, tmp_path):
    state = step / "training_state"
    for name in ("optimizer_state.safetensors", "optimizer_param_groups.json"):
        (state / name).unlink()
    save(step / "pretrained_model/pytorch_model_fsdp_0", {"model": MODEL})
    save(state / "optimizer_0", {"optimizer": {"state": {"up.bias": STATES[1]}, "param_groups": GROUPS}})
    save_file({"up.weight": torch.zeros(4, 3)}, step / "pretrained_model/model.safetensors")
    (state / "training_step.json").write_text('{"step": 4, "dp_world_size": 2}')
    ck = ckptools.open(step)
    assert (ck.whole, ck.world_size[:3]) == (True, (2, ("training_step.dp_world_size",), True))
    found = saved(ck, tmp_path)
    assert is_model(found["model"]) and list(found["optimizer"]["state"]) == ["up.bias"]
    (step / "pretrained_model/pytorch_model_fsdp_0/.metadata").unlink()
    assert "pytorch_model_fsdp_0/.metadata" in ckptools.open(step).problems[0].message
    (state / "optimizer_0/.metadata").write_bytes(b"")
    messages = [p.message for p in ckptools.open(step).problems if p.severity == "error"]
    assert any("optimizer_0/.metadata" in message for message in messages)


def test_several_optimizers_stand_under_their_names(step):
    for name in ("optimizer_state.safetensors", "optimizer_param_groups.json"):
        (step / "training_state" / name).unlink()
    for scale, name in enumerate(("actor", "critic"), 1):
        save_optimizer(step / "training_state" / name, scale)
    ck = ckptools.open(step)
    assert set(ck.optimizers) == {"actor", "critic"} and ck.whole
    assert float(ck.raw["optimizer"]["critic"]["state"][0]["step"].load()) == 8
    (step / "training_state/critic/optimizer_param_groups.json").unlink()
    assert ckptools.open(step).whole is False


def test_the_training_state_of_2024_is_one_file(step):
    shutil.rmtree(step / "training_state")
    state = {"step": 4, "optimizer": {"state": STATES, "param_groups": GROUPS}, "scheduler": {"last_epoch": 4}}
    torch.save(state, step / "training_state.pth")
    ck = ckptools.open(step)
    assert (ck.format, ck.whole, ck.step.value) == ("lerobot", True, 4)
    assert list(ck.optimizers) == ["optimizer"]


@pytest.mark.parametrize("harm", ["delete", "cut", "link"])
@pytest.mark.parametrize(
    "file",
    [
        "pretrained_model/model.safetensors",
        "training_state/optimizer_state.safetensors",
        "training_state/optimizer_param_groups.json",
        "training_state/rng_state.safetensors",
        "training_state/training_step.json",
    ],
)
def test_a_file_that_is_harmed_is_named(step, tmp_path, file, harm):
    path = step / file
    kept = path.read_bytes()
    path.unlink()
    if harm == "link":
        (tmp_path / "away").write_bytes(kept)
        path.symlink_to(tmp_path / "away")
        with pytest.raises(UnsafePathError):
            ckptools.open(step)
        return
    if harm == "cut":
        path.write_bytes(kept[:-3])
    ck = ckptools.open(step)
    errors = [p for p in ck.problems if p.severity == "error"]
    assert ck.whole is False and [p.code for p in errors] == ["CK001" if harm == "delete" else "CK002"]
    assert any(word in errors[0].message for word in (path.name, "no weights"))
    with pytest.raises(NotWholeError):
        ck.consolidate(tmp_path / "out.pt", only="all")


@pytest.mark.parametrize("name", ["state/x/exp_avg", "state/0", "other/0/exp_avg", "optimizer"])
def test_a_tensor_that_is_no_moment_keeps_its_name(step, name):
    save_file({name: torch.ones(2)}, step / "training_state/optimizer_state.safetensors")
    optimizer = ckptools.open(step).tree["optimizer"]
    assert (list(optimizer), optimizer["state"]) == ([name, "state", "param_groups"], {})


def test_a_dcp_folder_that_is_a_link_out_of_the_step_is_refused(step, tmp_path):
    away = save(tmp_path / "away", {"optimizer": {"state": {}, "param_groups": GROUPS}})
    (step / "training_state/optimizer_0").symlink_to(away)
    with pytest.raises(UnsafePathError, match="optimizer_0"):
        ckptools.open(step)


def test_a_run_has_a_row_for_each_step_and_its_link_names_the_newest(step):
    shutil.copytree(step, step.with_name("000006"))
    (step.parent / "last").symlink_to("000006")
    rows = ckptools.checkpoints_in(step.parent).rows
    assert [row.format for row in rows] == ["lerobot", "lerobot"]
    assert ckptools.open(step.parent).path.name in ("000006", "last")
