"""Step folders with a DCP folder for each part: OLMo-core's and Composer's, in their layout, written by torch."""

from __future__ import annotations

import datetime
import json
import pickle
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.formats.recipes import COMPOSER_FOLDER, OLMO_CORE
from ckptools.formats.shared import companions
from ckptools.model.tree import Opaque
from tests.formats.test_accelerate import MODEL, OPTIMIZER, raw, save

FLAT = {"state.w.exp_avg": torch.ones(4, 3), "state.w.step": torch.tensor(3.0), "param_groups.w.lr": 0.1}


@pytest.fixture
def olmo(tmp_path) -> Path:
    folder = tmp_path / "step7"
    save(folder / "model_and_optim", {"model": MODEL, "optim": FLAT})
    (folder / "train").mkdir()
    for rank in range(2):
        state = {"global_step": 7, "epoch": 1, "world_size": 2, "rng": {"python": (3, (rank,), None)}, "callbacks": {}}
        torch.save(state, folder / "train" / f"rank{rank}.pt")
    (folder / ".metadata.json").write_text(json.dumps({"version": "2.1.0"}))
    return folder


@pytest.fixture
def composer(tmp_path) -> Path:
    folder = tmp_path / "ep0-ba5"
    save(folder / "model", MODEL)
    save(folder / "optim", OPTIMIZER)
    resumption = {
        "timestamp": {"Timestamp": {"batch": 5, "total_wct": datetime.timedelta(seconds=3)}},
        "schedulers": {"LambdaLR": {"last_epoch": 5, "base_lrs": [0.1]}},
        "rank_zero_seed": 17,
    }
    (folder / "resumption.pkl").write_bytes(pickle.dumps(resumption))
    (folder / "composer_metadata.json").write_text(json.dumps({"composer_version": "0.24.0", "num_gpus": 8}))
    return folder


def test_olmo_core_is_consolidated_whole(olmo, tmp_path):
    ckptools.consolidate(olmo, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt")
    assert list(state) == ["model", "optim", "train", "metadata"]
    assert raw(state["model"]["w"]) == raw(MODEL["w"]) and state["train"]["global_step"] == 7


def test_a_missing_trainer_state_of_olmo_core_makes_it_not_whole_and_recoverable(olmo):
    (olmo / "train" / "rank1.pt").unlink()
    ck = ckptools.open(olmo)
    (problem,) = ck.problems
    assert (problem.code, problem.severity, problem.rank) == ("CK001", "error", 1)
    assert (ck.verdict.whole, ck.verdict.recoverable, ck.verdict.joinable) == (False, True, True)
    assert [f.path.name for f in ck.files if f.status == "missing"] == ["rank1.pt"]


def test_trainer_states_of_two_steps_are_an_error(olmo):
    torch.save({"global_step": 8, "world_size": 2}, olmo / "train" / "rank1.pt")
    ck = ckptools.open(olmo, all_ranks=True)
    assert [(p.code, p.tensor) for p in ck.problems if p.severity == "error"] == [("CK006", "train.global_step")]


def test_the_dcp_of_olmo_core_opens_alone(olmo):
    ck = ckptools.open(olmo / "model_and_optim")
    assert (ck.format, list(ck.tree)) == ("dcp", ["model", "optim"])


def test_composers_folders_are_one_checkpoint(composer):
    ck = ckptools.open(composer, all_ranks=True)
    assert (ck.format, list(ck.tree)) == ("composer_folder", ["model", "optim", "resumption", "metadata"])
    assert (ck.step.value, ck.step.agree, ck.world_size.value) == (5, True, 8)
    assert raw(ck.model["w"].load()) == raw(MODEL["w"])
    assert raw(ck.optimizers["optim"].state["w"]["exp_avg"].load()) == raw(torch.ones(4, 3))
    assert ck.tree["resumption"]["timestamp"]["Timestamp"]["total_wct"] == datetime.timedelta(seconds=3)
    assert [s.kind for s in ck.sections if s.kind != "other"] == ["model", "optimizer", "scheduler"]
    assert ck.problems == ()


def test_composers_whole_model_is_read_too(composer):
    for name, state in (("model", MODEL), ("optim", OPTIMIZER)):
        for file in (composer / name).iterdir():
            file.unlink()
        torch.save(state, composer / name / f"{name}.pt")
    ck = ckptools.open(composer)
    assert raw(ck.model["w"].load()) == raw(MODEL["w"]) and list(ck.optimizers) == ["optim"]


@pytest.mark.parametrize("name", ["model", "optim"])
def test_a_part_of_composer_that_lost_its_metadata_is_missing(composer, name):
    (composer / name / ".metadata").unlink()
    ck = ckptools.open(composer)
    assert (ck.format, ck.whole, ck.problems[0].tensor) == ("composer_folder", False, name)
    assert f"no file {name}/.metadata" in ck.problems[0].message


def test_nothing_in_a_plain_pickle_is_run(composer):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    (composer / "resumption.pkl").write_bytes(pickle.dumps({"x": Evil()}))
    ck = ckptools.open(composer)
    assert isinstance(ck.tree["resumption"]["x"], Opaque) and "builtins.print" in " ".join(ck.names).replace(
        "__builtin__", "builtins"
    )


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"\x80\x04" + b"(" * 1000, b"no pickle"])
def test_a_damaged_pickle_is_named(composer, data):
    (composer / "resumption.pkl").write_bytes(data)
    (problem,) = ckptools.open(composer).problems
    assert problem.code == "CK002" and "resumption.pkl" in problem.message and "\n" not in problem.message


def test_a_pickle_that_is_too_large_is_named_with_its_size(composer, monkeypatch):
    monkeypatch.setattr(companions, "MAX_PICKLE", 50)
    size = (composer / "resumption.pkl").stat().st_size
    (problem,) = ckptools.open(composer).problems
    assert (problem.code, problem.tensor) == ("CK002", "resumption")
    assert f"resumption.pkl has {size} bytes; at most 50 are read" in problem.message


def test_other_folders_of_such_names_are_left_alone(tmp_path):
    (tmp_path / "model_and_optim").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "composer_metadata.json").write_text("{}")
    assert not OLMO_CORE.detect(tmp_path) and not COMPOSER_FOLDER.detect(tmp_path)
