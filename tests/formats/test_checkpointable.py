"""Rank files of CheckpointableTensors: which ranks are missing, and what is said of files in the wrong place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import NotWholeError
from tests.truth import FIXTURES, load_truth

NAME = "torch2.15.0-checkpointable-tensor-w4"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / NAME / "ckpt", tmp_path / "run"))


def codes(ck):
    return [p.code for p in ck.problems if p.severity == "error"]


def test_tensors_that_are_cut_alike_are_one_row(folder):
    said = CliRunner().invoke(app, ["inspect", str(folder), "--all-ranks"]).stdout
    assert "per-rank .pt, CheckpointableTensor" in said
    for row in (
        "dim 0 in 4 pieces",
        "dim 0 and 1 in 4 pieces",
        "dim 0 in 6 pieces",
        "whole on every rank       1 tensor",
    ):
        assert row in said


def test_padding_is_no_part_of_a_tensor(folder):
    padded = ckptools.open(folder, all_ranks=True).model["padded.weight"]
    dtype, data, shape = load_truth(NAME)["model/padded.weight"]
    assert (padded.dtype, padded.shape, padded.numpy().tobytes()) == (dtype, shape, data)
    assert [s.box.sizes for s in padded.shards] == [(3, 4), (3, 4), (3, 4), (1, 4)]


def test_a_lone_rank_file_tells_of_others(folder):
    for rank, others in ((1, [0]), (0, [1]), (3, [0, 1, 2])):
        alone = folder.parent / f"alone{rank}"
        alone.mkdir()
        shutil.copy(folder / f"rank{rank}.pt", alone)
        ck = ckptools.open(alone / f"rank{rank}.pt", all_ranks=True)
        assert [p.rank for p in ck.problems if p.code == "CK001"] == others


def test_a_file_without_a_rank_in_its_name_is_a_part(folder):
    (folder.parent / "one").mkdir()
    shutil.copy(folder / "rank1.pt", folder.parent / "one/weights.pt")
    ck = ckptools.open(folder.parent / "one/weights.pt")
    assert ck.whole is False and "CK011" in codes(ck)
    assert "one rank of at least 2" in next(p.message for p in ck.problems if p.code == "CK011")


def test_ranks_between_others_are_missing(folder):
    (folder / "rank0.pt").unlink()
    (folder / "rank2.pt").unlink()
    ck = ckptools.open(folder, all_ranks=True)
    assert sorted(p.rank for p in ck.problems if p.code == "CK001") == [0, 2]
    assert ck.world_size.value == 4


def test_without_the_last_rank_its_pieces_are_in_no_file(folder, tmp_path):
    (folder / "rank3.pt").unlink()
    with pytest.raises(NotWholeError, match=r"CK101  model\.rows\.weight and .*: gap \[9:11, 0:5\]: 10 of 55"):
        ckptools.open(folder).consolidate(tmp_path / "all.pt")
