"""Models in folders of their own beside Accelerate's states, as a hook of diffusers' training scripts writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptools
from tests.formats.trainer_folder import trainer_folder

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = trainer_folder(tmp_path / "checkpoint-3", 2)
    for name in ("optimizer", "scheduler"):
        (made / f"{name}.pt").rename(made / f"{name}.bin")
    for rank in range(2):
        (made / f"rng_state_{rank}.pth").unlink()
        torch.save({"step": 3, "torch_manual_seed": torch.get_rng_state()}, made / f"random_states_{rank}.pkl")
    (made / "trainer_state.json").unlink()
    for name in ("unet", "unet_ema"):
        (made / name).mkdir()
        (made / name / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"}))
        (made / name / WEIGHTS).write_bytes((made / "model.safetensors").read_bytes())
    (made / "model.safetensors").unlink()
    return made


def test_models_in_folders_are_one_checkpoint_with_the_states_beside_them(folder):
    ck = ckptools.open(folder)
    assert (ck.whole, ck.step.value, ck.world_size.value) == (True, 3, 2)
    assert [(s.name, s.kind) for s in ck.sections][:4] == [
        ("unet", "model"), ("unet_ema", "model"), ("optimizer", "optimizer"), ("scheduler", "scheduler")
    ]  # fmt: skip
    truth = load_file(folder / "unet" / WEIGHTS)
    assert all(torch.equal(ck.raw["unet"][name].load(), value) for name, value in truth.items())
    assert [row.name for row in ckptools.checkpoints_in(folder.parent).rows] == ["checkpoint-3"]


def test_a_model_that_lost_its_weights_is_named_by_its_folder(folder):
    (folder / "unet" / WEIGHTS).unlink()
    assert ("unet", "no weights in unet, which has a config") in [
        (p.tensor, p.message) for p in ckptools.open(folder).problems
    ]


def test_a_module_without_weights_has_lost_none(folder):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert ckptools.open(folder).whole


def test_folders_beside_weights_are_named_and_not_read(folder):
    (folder / "unet" / WEIGHTS).rename(folder / "pytorch_lora_weights.safetensors")
    assert [p.files for p in ckptools.open(folder).problems if p.code == "CK013"] == [("unet_ema",)]


def test_training_state_without_any_model_is_not_whole(folder):
    shutil.rmtree(folder / "unet")
    shutil.rmtree(folder / "unet_ema")
    ck = ckptools.open(folder)
    assert "no file model.safetensors, and no other weights" in ck.problems[0].message


def test_a_folder_of_a_model_is_no_place_for_the_optimizer(folder):
    (folder / "optimizer.bin").unlink()
    assert [(p.code, p.tensor) for p in ckptools.open(folder).problems] == [("CK001", "optimizer")]
