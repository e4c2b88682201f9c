"""What the Trainer and Accelerate leave beside a tag folder of DeepSpeed: whose it is, and what is wrong with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import NotWholeError
from tests.truth import FIXTURES

Z1 = FIXTURES / "deepspeed-z1-fp32"


def beside(folder: Path, step: int = 5, world: int = 4) -> Path:
    """Leave what the Trainer does: scheduler, RNG of every rank, counters."""
    scheduler = {"last_epoch": step, "base_lrs": [0.1], "_last_lr": [0.1]}
    torch.save(scheduler, folder / "scheduler.pt")
    for rank in range(world):
        torch.manual_seed(rank)
        torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.5}))
    return folder


@pytest.fixture
def trainer(tmp_path) -> Path:
    return beside(Path(shutil.copytree(Z1 / "ckpt", tmp_path / "checkpoint-5")))


def test_the_state_beside_a_tag_folder_is_part_of_the_checkpoint(trainer, tmp_path):
    ck = ckptools.open(trainer)
    assert ck.whole and {"scheduler", "rng", "trainer_state"} <= set(ck.tree)
    assert {"global_steps", "trainer_state.global_step", "scheduler.last_epoch"} <= set(ck.step.sources)
    ck.consolidate(tmp_path / "all.pt", only="all")
    written = torch.load(tmp_path / "all.pt", weights_only=False)
    assert written["trainer_state"]["global_step"] == 5 and list(written["rng"]) == [0, 1, 2, 3]


def test_it_is_part_of_a_universal_checkpoint_too(tmp_path):
    folder = beside(Path(shutil.copytree(Z1 / "universal", tmp_path / "checkpoint-5")))
    assert {"scheduler", "rng", "trainer_state"} <= set(ckptools.open(folder).tree)


def test_the_tag_folder_itself_is_opened_alone(trainer):
    assert "rng" not in ckptools.open(trainer / "global_step5").tree


@pytest.mark.parametrize("rank", [1, 3])
def test_a_missing_random_state_is_an_error(trainer, tmp_path, rank):
    (trainer / f"rng_state_{rank}.pth").unlink()
    ck = ckptools.open(trainer)
    assert [(p.code, p.rank) for p in ck.problems if p.severity == "error"] == [("CK001", rank)]
    left_out = ck.consolidate(tmp_path / "all.pt", only="all").left_out
    assert left_out[f"rng.{rank}"] == f"what rank {rank} had for itself: no file rng_state_{rank}.pth"


def test_a_random_state_of_more_ranks_is_left_from_another_save(trainer):
    torch.save({"cpu": torch.get_rng_state()}, trainer / "rng_state_4.pth")
    (problem,) = (p for p in ckptools.open(trainer).problems if p.code == "CK009")
    assert (problem.severity, problem.rank) == ("warning", 4) and "the save has 4 in global_step5" in problem.message


def test_random_states_that_changed_places_are_an_error(trainer, tmp_path):
    one, other = trainer / "rng_state_1.pth", trainer / "rng_state_2.pth"
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    with pytest.raises(NotWholeError, match="rng_state_1"):
        ckptools.consolidate(trainer, tmp_path / "all.pt", only="all")


def test_counters_of_another_step_contradict_the_tag_folder(trainer):
    (trainer / "trainer_state.json").write_text(json.dumps({"global_step": 6}))
    (problem,) = (p for p in ckptools.open(trainer).problems if p.severity == "warning")
    assert (problem.code, problem.message) == ("CK204", "trainer_state.json is of step 6, and global_step5 of step 5")


def test_the_step_of_model_states_contradicts_the_name_of_their_folder_still(trainer):
    (trainer / "global_step5").rename(trainer / "global_step6")
    (trainer / "latest").write_text("global_step6")
    assert not ckptools.open(trainer).step.agree


def test_beside_several_tag_folders_it_is_named_and_not_read(trainer):
    shutil.copytree(trainer / "global_step5", trainer / "global_step6")
    ck = ckptools.open(trainer)
    (problem,) = (p for p in ck.problems if "rng_state_0.pth" in p.message)
    assert "rng" not in ck.tree and problem.code == "CK013" and "global_step6" in problem.message


def test_the_number_of_accelerates_saves_is_no_step(tmp_path):
    folder = tmp_path / "checkpoints" / "checkpoint_1"
    shutil.copytree(Z1 / "ckpt", folder)
    (folder / "global_step5").rename(folder / "pytorch_model")
    (folder / "latest").write_text("pytorch_model")
    torch.save({"last_epoch": 20, "base_lrs": [0.1]}, folder / "scheduler.bin")
    for rank in range(4):
        torch.save({"step": 5, "torch_manual_seed": torch.get_rng_state()}, folder / f"random_states_{rank}.pkl")
    step = ckptools.open(folder).step
    assert (step.value, step.sources, step.agree) == (5, ("global_steps",), True)
