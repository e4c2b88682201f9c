"""Folders of which something is lost, unfinished or of another kind: what is counted, named and proposed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptools
from ckptools.errors import SeveralError
from tests.truth import FIXTURES


def trainer_folder_of(folder: Path, step: int) -> Path:
    folder.mkdir(parents=True)
    save_file({"a.weight": torch.full((4, 4), float(step))}, folder / "model.safetensors")
    state = {"state": {0: {"exp_avg": torch.ones(4, 4)}}, "param_groups": [{"params": [0]}]}
    torch.save(state, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def test_a_trainers_folder_whose_model_is_lost_is_a_checkpoint_that_is_not_whole(tmp_path):
    trainer_folder_of(tmp_path / "checkpoint-800", 800)
    lost = trainer_folder_of(tmp_path / "checkpoint-900", 900)
    (lost / "model.safetensors").unlink()
    ck = ckptools.open(lost)
    assert (ck.whole, ck.step.value) == (False, 900)
    assert "no file model.safetensors" in str(ck.problems[0])
    assert [(row.step, row.whole) for row in ckptools.checkpoints_in(tmp_path).rows] == [(900, False), (800, True)]


def test_a_folder_of_a_name_that_says_unfinished_is_proposed_where_there_is_no_other(tmp_path):
    trainer_folder_of(tmp_path / "tmp-checkpoint-1000", 1000)
    assert ckptools.open(tmp_path).step.value == 1000
    trainer_folder_of(tmp_path / "checkpoint-800", 800)
    assert ckptools.open(tmp_path).step.value == 800


def test_a_whole_module_counts_beside_other_files(tmp_path):
    torch.save(torch.nn.Linear(4, 4), tmp_path / "module.pt")
    assert ckptools.open(tmp_path).whole
    torch.save({"w": torch.ones(3)}, tmp_path / "other.pt")
    with pytest.raises(SeveralError, match=r"module\.pt, other.pt"):
        ckptools.open(tmp_path)


def test_a_whole_module_beside_rank_files_is_said_not_to_be_read(tmp_path):
    for rank in range(4):
        shutil.copy(FIXTURES / f"torch2.13.0-fsdp2-tp2x2-w4/rank{rank}.pt", tmp_path)
    torch.save(torch.nn.Linear(4, 4), tmp_path / "module.pt")
    assert any(p.code == "CK013" and "module.pt" in p.message for p in ckptools.open(tmp_path).problems)


@pytest.mark.parametrize("cut", [10_000, None])
def test_what_an_interrupted_write_left_is_named_beside_the_rank_that_is_missing(tmp_path, cut):
    for rank in range(4):
        shutil.copy(FIXTURES / f"torch2.13.0-fsdp2-tp2x2-w4/rank{rank}.pt", tmp_path)
    data = (tmp_path / "rank2.pt").read_bytes()
    (tmp_path / "rank2.pt").unlink()
    (tmp_path / "rank2.pt.tmp").write_bytes(data[:cut])
    problem = next(p for p in ckptools.open(tmp_path).problems if p.code == "CK001")
    assert problem.message == "no file rank2.pt; rank2.pt.tmp is here, whose write was not finished"
