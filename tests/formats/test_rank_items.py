"""Rank files whose items each have a file of their own, and rank files that are numbered as steps are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptools
from tests.truth import FIXTURES

VERL = FIXTURES / "verl-fsdp2-bf16/ckpt/global_step_3/actor"
TP = FIXTURES / "torch2.13.0-fsdp2-tp2x2-w4"


def items(folder: Path, name: str = "{item}_{rank}.pt") -> Path:
    """Three items of four ranks, by names that no framework writes."""
    for item, part in (("weights", "model"), ("optimizer", "optim"), ("step", "extra_state")):
        for rank in range(4):
            shutil.copy(VERL / f"{part}_world_size_4_rank_{rank}.pt", folder / name.format(item=item, rank=rank))
    return folder


def numbered(folder: Path) -> Path:
    """Four ranks of a 2 x 2 mesh, numbered as steps are."""
    for rank in range(4):
        shutil.copy(TP / f"rank{rank}.pt", folder / f"checkpoint_{rank}.pt")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["{item}_{rank}.pt", "run7-{item}-{rank}.pt"])
@pytest.mark.parametrize("opened", ["weights", "optimizer", None])
def test_all_items_of_the_ranks_are_one_checkpoint(name, opened, tmp_path):
    folder = items(tmp_path, name)
    ck = ckptools.open(folder / name.format(item=opened, rank=1) if opened else folder, all_ranks=True)
    assert (ck.whole, len(ck.files), ck.world_size.value) == (True, 12, 4)
    verl = ckptools.open(VERL)
    assert (len(ck.model), len(ck.optimizers)) == (len(verl.model), 1)


def test_every_item_is_written(tmp_path):
    import torch

    ckptools.consolidate(items(tmp_path) / "weights_0.pt", tmp_path / "out.pt", only="all")
    saved = torch.load(tmp_path / "out.pt", weights_only=False)
    assert len(saved) == 3 and all(len(part) for part in saved.values())


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["weights_0.pt", "optimizer_2.pt", "step_3.pt"])
def test_a_lost_file_of_an_item_is_missed_by_its_name(lost, tmp_path):
    (items(tmp_path) / lost).unlink()
    ck = ckptools.open(tmp_path)
    found = [(p.code, p.rank) for p in ck.problems if p.severity == "error" and lost in p.message]
    assert (ck.whole, found) == (False, [("CK001", int(lost[-4]))])


def test_another_run_beside_it_is_no_item(tmp_path):
    items(tmp_path)
    for rank in range(4):
        shutil.copy(tmp_path / f"weights_{rank}.pt", tmp_path / f"earlier_{rank}.pt")
    ck = ckptools.open(tmp_path / "weights_0.pt")
    assert {f.part for f in ck.files} == {"weights", "optimizer", "step"}


@pytest.mark.slow
def test_ranks_that_are_numbered_as_steps_are_one_checkpoint(tmp_path):
    ck = ckptools.open(numbered(tmp_path))
    assert (ck.whole, len(ck.files), ck.step.value, ck.step.agree) == (True, 4, 5, True)
    assert ck.problems == ()


@pytest.mark.parametrize(("rank", "code"), [(1, "CK001"), (0, "CK002")])
def test_a_rank_that_is_lost_or_cut_among_them_is_missed(rank, code, tmp_path):
    file = numbered(tmp_path) / f"checkpoint_{rank}.pt"
    data = file.read_bytes()
    file.unlink()
    if code == "CK002":
        file.write_bytes(data[: len(data) // 2])
    ck = ckptools.open(tmp_path / "checkpoint_3.pt")
    assert (code, rank) in {(p.code, p.rank) for p in ck.problems} and len(ck.files) == 4


def test_a_step_of_one_rank_each_is_no_checkpoint_of_several(tmp_path):
    for step in range(4):
        shutil.copy(TP / "rank2.pt", tmp_path / f"checkpoint_{step}.pt")
    ck = ckptools.open(tmp_path / "checkpoint_2.pt")
    assert ([p.code for p in ck.problems], len(ck.files)) == (["CK011"], 1)


def test_the_rank_in_the_name_of_a_file_alone_tells_no_step(tmp_path):
    shutil.copy(TP / "rank3.pt", tmp_path / "checkpoint_3.pt")
    assert ckptools.open(tmp_path / "checkpoint_3.pt").step.agree


def test_one_file_that_is_left_of_an_item_counts_by_its_content(tmp_path):
    items(tmp_path)
    for rank in (0, 1, 3):
        (tmp_path / f"optimizer_{rank}.pt").unlink()
    lost = [p.rank for p in ckptools.open(tmp_path / "weights_0.pt").problems if "no file optimizer_" in p.message]
    assert lost == [0, 1, 3]
