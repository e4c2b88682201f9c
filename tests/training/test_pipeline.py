"""Stages of a pipeline: each rank trains and saves its own, and together they are the model that one process trains."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import ckptools
from ckptools.errors import NotWholeError
from ckptools.training.model import Transformer
from ckptools.training.options import CreateOptions, ModelSize
from ckptools.training.output import Created
from ckptools.training.strategies import keep_stage
from tests.training.forked import create_forked
from tests.training.rank_files import assert_same_moments, load_all
from tools import demo

pytestmark = pytest.mark.slow


def stage_keys(created: Created) -> list[set[str]]:
    return [set(content["state"]["model"]) for content in load_all(created.out, "ep0-*.pt")]


def test_stages_train_what_one_process_trains(pipeline: Created, one_rank: Created) -> None:
    torch.testing.assert_close(pipeline.losses, one_rank.losses, rtol=1e-5, atol=0)
    assert_same_moments(pipeline.out, one_rank.out)


def test_a_stage_saves_its_blocks_under_the_names_of_the_whole_model(pipeline: Created) -> None:
    blocks = [{name.split(".")[1] for name in keys if name.startswith("blocks.")} for keys in stage_keys(pipeline)]
    assert blocks == [{"0"}, {"1"}, {"2"}]


def test_only_the_tied_matrix_is_on_two_stages(pipeline: Created) -> None:
    first, middle, last = stage_keys(pipeline)
    assert (first & last, first & middle, middle & last) == ({"emb.weight"}, set(), set())
    assert first | middle | last == Transformer(ModelSize()).state_dict().keys()


def test_both_ends_keep_the_tied_matrix_the_same(pipeline: Created) -> None:
    first, _, last = (content["state"]["model"] for content in load_all(pipeline.out, "ep0-*.pt"))
    assert demo.same(first["emb.weight"], last["emb.weight"])
    assert last["head.weight"].data_ptr() == last["emb.weight"].data_ptr()
    assert not demo.same(first["emb.weight"], Transformer(ModelSize()).emb.weight.detach())


def test_every_token_is_counted_once(pipeline: Created) -> None:
    assert load_all(pipeline.out, "ep0-*.pt")[0]["state"]["model"]["seen"].item() == 5 * 8 * 31


def test_the_gathered_state_has_what_a_single_process_has(pipeline: Created) -> None:
    full = torch.load(pipeline.out / "full.pt")
    assert full["model"].keys() == Transformer(ModelSize()).state_dict().keys()
    assert sorted(name for group in full["optimizer"]["param_groups"] for name in group["params"]) == sorted(
        full["optimizer"]["state"]
    )


def test_stages_are_called_whole_and_parts(pipeline: Created) -> None:
    report = ckptools.verify(pipeline.first, deep=True)
    assert [problem.message for problem in report.problems if problem.severity != "note"] == []
    ck = ckptools.open(pipeline.first)
    assert (ck.whole, ck.saved_as) == (True, "per-rank .pt, each with parameters of its own")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_stage_that_is_not_here_is_missed(rank: int, pipeline: Created, tmp_path: Path) -> None:
    folder = shutil.copytree(
        pipeline.out, tmp_path / "run", ignore=shutil.ignore_patterns(f"*rank{rank}.pt", "full.pt")
    )
    if rank == 2:  # nothing tells that there was a rank behind the last
        (folder / "ep0-ba5-rank2.pt").write_bytes(b"PK")
    with pytest.raises(NotWholeError, match=f"those of rank {rank} are nowhere else"):
        ckptools.consolidate(folder, tmp_path / "joined.pt")


@pytest.mark.parametrize(
    ("layers", "stages", "owned"),
    [(3, 2, [[0, 1], [2]]), (3, 4, [[0], [1], [2], []]), (7, 3, [[0, 1, 2], [3, 4], [5, 6]]), (3, 1, [[0, 1, 2]])],
)
def test_blocks_are_dealt_evenly(layers: int, stages: int, owned: list[list[int]]) -> None:
    for stage, mine in enumerate(owned):
        model = Transformer(ModelSize(layers=layers))
        keep_stage(model, stage, stages)
        assert [int(name) for name in model.blocks] == mine


def test_in_a_dcp_every_parameter_has_its_hyperparameters(tmp_path: Path) -> None:
    create_forked(CreateOptions(tmp_path / "dcp", "pipeline", world_size=2, steps=1, layout="dcp"))
    entries = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    rates = [name for name in entries if name.startswith("optim.param_groups.") and name.endswith(".lr")]
    assert len(rates) == 43
    report = ckptools.verify(tmp_path / "dcp", deep=True)
    assert [problem.message for problem in report.problems if problem.severity == "error"] == []
