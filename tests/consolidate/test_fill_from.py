"""`--fill-from`: what is missing comes from another checkpoint of the same run, and the output says so for ever."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import NotWholeError, RefusedError, UsageError
from ckptools.training.damage import Target, put_nan
from ckptools.training.options import CreateOptions, ModelSize, ResumeOptions
from tests.training.forked import create_forked
from tests.training.rank_files import load
from tests.truth import FIXTURES
from tests.watch.runs import flip

HSDP = FIXTURES / "torch2.6.0-fsdp1-hsdp2x2-w4"
SMALL = ModelSize(vocab=31, width=20, layers=1, context=7)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two saves of two ranks of a real run, as `ep0-ba2-rank0.pt` and so on."""
    out = tmp_path_factory.mktemp("runs") / "run"
    saves = ResumeOptions(save_every=2)
    return create_forked(CreateOptions(out, "fsdp1", 2, 4, "composer", size=SMALL, resuming=saves)).out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def of_step(run: Path, step: int, rank: int = 0) -> Path:
    return next(run.glob(f"*-ba{step}-rank{rank}.pt"))


def state(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found


@pytest.mark.slow
def test_a_missing_ranks_regions_are_the_older_ones_and_all_others_the_newest(run, tmp_path):
    ck, older, ours = (ckptools.open(of_step(run, n), all_ranks=True) for n in (4, 2, 4))
    whole = {name: tensor.load() for name, tensor in ours.model.items()}
    before = {name: tensor.load() for name, tensor in older.model.items()}
    held = {name: {s.box for s in t.shards if s.rank == 0} for name, t in ck.model.items()}
    lost = {name: [s.box for s in t.shards if s.box.numel and s.box not in held[name]] for name, t in ck.model.items()}
    of_step(run, 4, 1).unlink()
    done = ckptools.open(of_step(run, 4)).consolidate(
        tmp_path / "x.pt", only="model", fill_from=of_step(run, 2), check=True
    )
    written = state(tmp_path / "x.pt")
    for name, boxes in lost.items():
        expected = whole[name].clone()
        for box in boxes:
            at = tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))
            expected[at] = before[name][at]
        assert torch.equal(written[name], expected), name
    assert {fqn.removeprefix("state.model.") for fqn in done.borrowed} == {name for name in lost if lost[name]}
    assert done.borrowed_from == f"{older.name}, step 2, 2 ranks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x.dcp"])
def test_the_output_says_so_for_ever_and_is_not_whole(name, run, tmp_path):
    of_step(run, 4, 1).unlink()
    ckptools.open(of_step(run, 4)).consolidate(tmp_path / name, only="model", fill_from=of_step(run, 2))
    found = ckptools.verify(tmp_path / name)
    assert (found.ok, found.verdict.whole) == (False, False)
    assert any(
        p.code == "CK019" and "those of another save" in p.message and "step 2" in p.message for p in found.problems
    )
    with pytest.raises(NotWholeError, match="CK019"):
        ckptools.consolidate(tmp_path / name, tmp_path / "again.pt")
    ckptools.consolidate(tmp_path / name, tmp_path / "again.pt", allow_missing=True, fill="nan")
    assert not ckptools.verify(tmp_path / "again.pt").verdict.whole
    (tmp_path / f"{name}.left-out.json").unlink()
    assert not ckptools.verify(tmp_path / name).ok


def test_the_side_file_has_every_region_with_its_origin(run, tmp_path):
    of_step(run, 4, 1).unlink()
    ckptools.open(of_step(run, 4)).consolidate(tmp_path / "x.pt", only="model", fill_from=of_step(run, 2))
    listed = json.loads((tmp_path / "x.pt.left-out.json").read_text())["missing"]
    assert listed and all(one["filled_with"] == "other" and "step 2" in one["origin"] for one in listed)
    assert all(one["regions"] for one in listed)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x.dcp"])
def test_the_output_says_so_under_new_names_too(name, run, tmp_path):
    of_step(run, 4, 1).unlink()
    done = ckptools.open(of_step(run, 4)).consolidate(
        tmp_path / name, only="model", fill_from=of_step(run, 2), rename=["=net."]
    )
    assert done.borrowed and all(fqn.startswith("net.") for fqn in done.borrowed)
    filled = {one.name for one in ckptools.open(tmp_path / name).provenance.filled}
    listed = json.loads((tmp_path / f"{name}.left-out.json").read_text())["missing"]
    assert filled == {one["name"] for one in listed} != set()


def test_what_a_rank_had_for_itself_is_not_taken_from_an_older_save(run, tmp_path):
    for step, rank in product((2, 4), (0, 1)):
        with ckptools.offline():
            content = torch.load(of_step(run, step, rank), weights_only=False)
            # As frameworks save them that do not gather them.
            torch.save({**content, "rng": content["rng"][rank]}, of_step(run, step, rank))
    of_step(run, 4, 1).unlink()
    done = ckptools.open(of_step(run, 4)).consolidate(tmp_path / "x.pt", fill_from=of_step(run, 2))
    assert any("what rank 1 had for itself" in why for why in done.left_out.values())
    assert "rng.1" in done.left_out and not any(fqn.startswith("rng") for fqn in done.borrowed)


def test_random_states_that_every_file_lists_of_all_ranks_are_not_lost_with_one(run, tmp_path):
    theirs = load(of_step(run, 4, 1))["rng"][1]["torch"]
    of_step(run, 4, 1).unlink()
    ck = ckptools.open(of_step(run, 4))
    done = ck.consolidate(tmp_path / "x.pt", fill_from=of_step(run, 2))
    assert not any(name.startswith("rng") for name in done.left_out)
    assert torch.equal(state(tmp_path / "x.pt")["rng"][1]["torch"], theirs)
    assert "rng" not in str(ck.verify().verdict.lost)


# -- one file, one of whose tensors is damaged ------------------------------------------------------------------------


def save(path: Path, scale: float, run_name: str | None = "a", **more: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    model = {"w": torch.full((64,), scale), "b": torch.full((3,), scale)}
    named = {} if run_name is None else {"run_name": run_name}
    torch.save({"state": {"model": model | more, **named}, "step": int(scale)}, path)
    return path


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    return flip(save(tmp_path / "new" / "step-1.pt", 1.0))


def test_a_damaged_record_is_replaced_and_told_by_name_region_and_step(damaged, tmp_path):
    older = save(tmp_path / "old" / "step-7.pt", 7.0)
    result = CliRunner().invoke(
        app, ["consolidate", str(damaged), "--fill-from", str(older), "-o", str(tmp_path / "x.pt"), "--only", "model"]
    )
    assert result.exit_code == 0 and "from step-7, step 7: w: [0:64]" in result.stderr
    assert "run_name 'a'" in result.stderr and "NOT provable" in result.stderr
    assert {name: t[0].item() for name, t in state(tmp_path / "x.pt").items()} == {"w": 7.0, "b": 1.0}


def test_nothing_is_taken_where_nothing_is_missing(tmp_path):
    new, older = save(tmp_path / "new" / "step-1.pt", 1.0), save(tmp_path / "old" / "step-7.pt", 7.0)
    done = ckptools.consolidate(new, tmp_path / "x.pt", fill_from=older)
    assert (done.borrowed, ckptools.verify(tmp_path / "x.pt").verdict.whole) == ({}, True)


def refused(damaged: Path, older: Path, tmp_path: Path) -> str:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RefusedError) as error:
        ckptools.consolidate(damaged, tmp_path / "x.pt", fill_from=older)
    assert error.value.exit_code == 4 and sorted(tmp_path.rglob("*")) == before
    return str(error.value)


def test_a_damaged_older_one_does_not_help(damaged, tmp_path):
    older = flip(save(tmp_path / "old" / "step-1.pt", 1.0))
    assert "CK004" in refused(damaged, older, tmp_path)


@pytest.mark.parametrize(
    ("older", "says"),
    [
        ({"run_name": "another"}, "its run_name is 'another', the other's 'a'"),
        ({"w": torch.ones(65)}, "shape of state.model.w"),
        ({"w": torch.ones(64, dtype=torch.bfloat16)}, "dtype of state.model.w"),
        ({"more": torch.ones(1)}, "has besides 1 tensor: state.model.more"),
    ],
    ids=["run", "shape", "dtype", "names"],
)
def test_one_of_another_run_or_architecture_is_refused_with_the_reason(older, says, damaged, tmp_path):
    assert says in refused(damaged, save(tmp_path / "old" / "step-7.pt", 7.0, **older), tmp_path)


def test_replicas_of_the_older_one_that_differ_are_refused_as_they_are_in_it(tmp_path):
    newest, older = (Path(shutil.copytree(HSDP, tmp_path / name)) for name in ("newest", "older"))
    for rank in (0, 2):  # both replicas of one half
        (newest / f"rank{rank}.pt").unlink()
    path = older / "rank0.pt"
    shards = ckptools.open(path, all_ranks=True).model["emb.weight"].shards
    put_nan(Target((path,), (), tuple(("emb.weight", s) for s in shards if s.rank == 0), Random(1)))
    assert "CK105" in {problem.code for problem in ckptools.verify(older, deep=True).problems}
    with pytest.raises(NotWholeError, match=r"CK105  .*emb\.weight: .*\(with regions of older"):
        ckptools.open(newest / "rank1.pt").consolidate(tmp_path / "x.pt", only="model", fill_from=older)
    assert not list(tmp_path.glob("x.pt*"))


def test_one_of_another_layout_is_refused(run, tmp_path):
    of_step(run, 4, 1).unlink()
    ckptools.consolidate(of_step(run, 2), tmp_path / "whole.pt")
    assert "is not of the same run" in refused(of_step(run, 4), tmp_path / "whole.pt", tmp_path)


def test_the_checkpoint_itself_is_refused(damaged, tmp_path):
    assert "shares files" in refused(damaged, damaged, tmp_path)


def test_a_run_without_a_name_is_said_to_be_unproven(tmp_path):
    new = flip(save(tmp_path / "new" / "step-1.pt", 1.0, None))
    done = ckptools.consolidate(new, tmp_path / "x.pt", fill_from=save(tmp_path / "old" / "step-7.pt", 7.0, None))
    assert any("NOT provable" in note and "the run's name" in note for note in done.notes)


def test_an_older_one_in_the_place_of_the_output_is_not_overwritten(damaged, tmp_path):
    older = save(tmp_path / "old" / "step-7.pt", 7.0)
    with pytest.raises(RefusedError, match="file of the checkpoint itself"):
        ckptools.consolidate(damaged, older, fill_from=older, force=True)


def test_an_output_that_would_not_say_so_is_refused(damaged, tmp_path):
    older = save(tmp_path / "old" / "step-7.pt", 7.0)
    with pytest.raises(UsageError, match="provenance"):
        ckptools.consolidate(damaged, tmp_path / "x.pt", fill_from=older, provenance=False)
