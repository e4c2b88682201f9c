"""Companion files of the Trainer and of Accelerate, beside a model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ckptools.errors import ReadError
from ckptools.files.opening import read_json
from ckptools.formats.options import Options
from ckptools.formats.shared.companions import CompanionFiles, companions_in, read_companions
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque
from tests.formats.trainer_folder import trainer_folder


def read(folder: Path, **options: bool) -> CompanionFiles:
    return read_companions(folder, Options(**options))


def test_the_companions_of_a_trainer_are_found_under_their_names(tmp_path):
    found = read(trainer_folder(tmp_path, world=3))
    assert list(found.tree) == ["optimizer", "scheduler", "rng", "trainer_state"]
    assert found.tree["trainer_state"]["global_step"] == 3
    assert isinstance(found.tree["optimizer"]["state"][0]["exp_avg"], Tensor)
    assert (found.tree["scheduler"]["last_epoch"], found.problems) == (3, [])


def test_the_rng_of_each_rank_is_kept_by_rank(tmp_path):
    found = read(trainer_folder(tmp_path, world=3))
    assert (list(found.tree["rng"]), found.world_size.value) == ([0, 1, 2], 3)
    assert [f.rank for f in found.files if f.part == "rng"] == [0, 1, 2]


def test_a_missing_rank_of_the_rng_is_an_error_that_names_the_rank(tmp_path):
    folder = trainer_folder(tmp_path, world=4)
    (folder / "rng_state_2.pth").unlink()
    (problem,) = read(folder).problems
    assert (problem.code, problem.severity, problem.rank) == ("CK001", "error", 2)
    assert problem.message == "no file rng_state_2.pth"


def test_a_trainers_folder_without_the_file_that_it_writes_last_is_worth_a_warning(tmp_path):
    folder = trainer_folder(tmp_path, world=2)
    assert read(folder).problems == []
    (folder / "trainer_state.json").unlink()
    (problem,) = read(folder).problems
    assert (problem.code, problem.severity, problem.tensor) == ("CK001", "warning", "trainer_state")


def test_a_random_state_with_a_number_is_not_the_only_one(tmp_path):
    folder = trainer_folder(tmp_path, world=2)
    (folder / "rng_state_1.pth").unlink()
    found = read(folder)
    assert [(p.code, p.rank, p.message) for p in found.problems] == [("CK001", 1, "no file rng_state_1.pth")]
    assert (found.world_size.value, found.world_size.at_least) == (2, True)


@pytest.mark.parametrize(
    ("names", "lacking"),
    [
        (["optimizer_1.bin"], ["no file optimizer.bin, and later ones are here"]),
        (["optimizer.bin", "optimizer_2.bin"], ["no file optimizer_1.bin, and later ones are here"]),
        (["custom_checkpoint_1.pkl"], ["no file custom_checkpoint_0.pkl, and later ones are here"]),
        (["optimizer.bin", "optimizer_1.bin", "scheduler.bin", "sampler_1.bin"], []),
    ],
)
def test_a_gap_in_the_numbers_is_a_missing_file(tmp_path, names, lacking):
    for name in names:
        torch.save({"a": 1}, tmp_path / name)
    assert [p.message for p in read(tmp_path).problems] == lacking


@pytest.mark.parametrize(
    ("name", "key", "rank"),
    [
        ("optimizer.bin", "optimizer", None),
        ("optimizer_1.bin", "optimizer_1", None),
        ("scheduler_2.bin", "scheduler_2", None),
        ("scaler.pt", "scaler", None),
        ("sampler.bin", "sampler", None),
        ("dl_state_dict_1.bin", "dl_state_dict_1", None),
        ("custom_checkpoint_7.pkl", "custom_checkpoint_7", None),
        ("random_states_12.pkl", "rng", 12),
        ("rng_state.pth", "rng", None),
        ("training_args.bin", "training_args", None),
    ],
)
def test_a_name_tells_what_a_companion_is(tmp_path, name, key, rank):
    torch.save({}, tmp_path / name)
    ((found),) = companions_in(tmp_path)
    assert (found.key, found.rank) == (key, rank)


@pytest.mark.parametrize(
    "name", ["my_optimizer.pt", "optimizer.pt.tmp", "optimizer_0", "rng_state_x.pth", "state.json", "model.bin"]
)
def test_other_files_are_not_companions(tmp_path, name):
    torch.save({}, tmp_path / name)
    assert companions_in(tmp_path) == []


def test_two_files_that_would_get_one_name_keep_their_own(tmp_path):
    for name in ("optimizer.pt", "optimizer.bin", "rng_state.pth", "rng_state_0.pth"):
        torch.save({"from": name}, tmp_path / name)
    tree = read(tmp_path).tree
    assert tree["optimizer.pt"] == {"from": "optimizer.pt"} and tree["optimizer.bin"] == {"from": "optimizer.bin"}
    assert tree["rng"] == {0: {"from": "rng_state_0.pth"}} and tree["rng_state.pth"] == {"from": "rng_state.pth"}


class TrainingArguments:
    def __init__(self) -> None:
        self.learning_rate = 1e-3


def test_training_arguments_are_told_and_never_made(tmp_path):
    torch.save(TrainingArguments(), tmp_path / "training_args.bin")
    value = read(tmp_path).tree["training_args"]
    assert isinstance(value, Opaque) and value.name == f"{__name__}.TrainingArguments"


@pytest.mark.parametrize(("keep", "status"), [(200, "cut"), (0, "cut")])
def test_a_cut_companion_is_named_and_the_others_are_read(tmp_path, keep, status):
    folder = trainer_folder(tmp_path, world=1)
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:keep])
    found = read(folder)
    (problem,) = found.problems
    assert (problem.code, problem.severity) == ("CK002", "error") and problem.message.startswith("optimizer.pt ")
    assert [f.status for f in found.files if f.part == "optimizer"] == [status]
    assert list(found.tree) == ["scheduler", "rng", "trainer_state"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "a": 2}', "twice in one object"),
        ('{"a": ', "in line 1"),
        ("\xff", "not UTF-8"),
        ("[" * 100_000 + "]" * 100_000, "nested too deep"),
        ('{"a": ' + "[" * 500 + "]" * 500 + "}", "levels"),
        ('{"a": ' + "9" * 5000 + "}", "a number too long"),
        ("[" + "0," * 8_000_001 + "0]", "more than 8000000 values"),
    ],
    ids=lambda v: v[:20],
)
def test_json_beyond_the_bounds_is_one_line(tmp_path, text, why):
    (tmp_path / "trainer_state.json").write_bytes(text.encode("latin1"))
    with pytest.raises(ReadError, match=why) as error:
        read_json(tmp_path / "trainer_state.json")
    assert "\n" not in str(error.value)


def test_a_scheduler_in_the_place_of_the_optimizer_is_an_error(tmp_path):
    folder = trainer_folder(tmp_path, 1)
    shutil.copy(folder / "scheduler.pt", folder / "optimizer.pt")
    found = read(folder).problems
    assert [(p.message, p.tensor, p.severity) for p in found] == [
        ("holds the state of a scheduler", "optimizer", "error")
    ]
