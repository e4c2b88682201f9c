"""The layouts of trainers hold what the trainers' own code writes, under the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptools
from ckptools.cli.commands.create import fold
from ckptools.training.output import Created
from tests.training.conftest import Command
from tools.demo import same

OBJECTS_OF_A_TRAINER = ("state.callbacks", "state.scaler", "state.integrations")
"""What Composer has an empty entry for, and DCP keeps where it is one object, as up to torch 2.3."""
FABRICS_REST = ("scheduler", "iteration", "epoch", "batch_in_epoch", "rng")
FIXTURES = Path(__file__).parent.parent.parent / "fixtures"


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def keys(tree: Any, depth: int) -> set[str]:
    """The keys of nested dicts, down to a depth, joined by dots."""
    if not isinstance(tree, dict) or not depth:
        return set()
    return {str(key) for key in tree} | {
        f"{key}.{sub}" for key, value in tree.items() for sub in keys(value, depth - 1)
    }


def test_composers_rank_files_have_the_tree_of_real_ones(fsdp1: Command) -> None:
    real = ckptools.open(FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4/ep0-ba5-rank0.pt").raw
    ours = ckptools.open(fsdp1.out / "ep0-ba5-rank0.pt").raw
    assert list(ours) == list(real)
    assert list(ours["state"]) == list(real["state"])
    assert list(ours["state"]["timestamp"]["Timestamp"]) == list(real["state"]["timestamp"]["Timestamp"])
    (optimizer,), (composers,) = (tree["state"]["optimizers"].values() for tree in (ours, real))
    assert {slot for state in composers["state"].values() for slot in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert {slot for state in optimizer["state"].values() for slot in state} == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.slow
def test_composers_dcp_has_the_tree_of_a_real_one_but_for_where_optimizers_are(trainers_fsdp2: Path) -> None:
    real = ckptools.open(FIXTURES / "composer-0.16.4-torch2.0.1-elastic-w4/ep0-ba5").raw
    ours = ckptools.open(trainers_fsdp2 / "composer-dcp").raw
    assert keys(real, 2) - keys(ours, 2) == {"optimizers", "optimizers.DecoupledAdamW", *OBJECTS_OF_A_TRAINER}
    assert keys(ours, 2) - keys(real, 2) == {"state.optimizers"}


def test_composers_dcp_is_a_folder_named_by_epoch_and_batch(trainers_fsdp2: Path) -> None:
    names = files_in(trainers_fsdp2 / "composer-dcp")
    assert names == {f"ep0-ba2/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")}
    assert fold(sorted(names)) == ["ep0-ba2/.metadata", "ep0-ba2/__{0..1}_0.distcp"]


def test_what_to_open_of_a_folder_in_the_folder_is_that_folder(tmp_path: Path) -> None:
    names = ("ep0-ba2/.metadata", "ep0-ba2/__0_0.distcp", "full.pt")
    created = Created(tmp_path, tuple(tmp_path / name for name in names), (), 1, 0, 0)
    assert created.first == tmp_path / "ep0-ba2"


def test_composers_dcp_has_the_random_states_of_every_rank(trainers_fsdp2: Path) -> None:
    one, other = ckptools.open(trainers_fsdp2 / "composer-dcp").raw["rng"]
    assert set(one) == set(other) == {"python", "numpy", "torch"}
    assert not same(one["torch"].load(), other["torch"].load())


def test_accelerate_with_ddp_keeps_a_tied_weight_once(trainers_ddp: Path) -> None:
    folder = trainers_ddp / "accelerate"
    assert files_in(folder) == {
        "custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl",
        "scheduler.bin",
    }  # fmt: skip
    names = load_file(folder / "model.safetensors").keys()
    full = torch.load(trainers_ddp / "full.pt")["model"].keys()
    assert names == full - {"head.weight"}


def test_accelerates_scripts_count_the_steps_that_its_scheduler_may_not(trainers_fsdp2: Path) -> None:
    step = ckptools.open(trainers_fsdp2 / "accelerate").step
    assert (step.value, step.sources) == (2, ("custom_checkpoint_0.global_step",))


def test_lightnings_file_tells_the_order_of_its_modules(trainers_ddp: Path) -> None:
    (path,) = (trainers_ddp / "lightning").iterdir()
    names = torch.load(trainers_ddp / "full.pt")["optimizer"]["state"].keys()
    (optimizer,) = ckptools.open(path).optimizers.values()
    assert set(optimizer.state) == {f"model.{name}" for name in names}


def test_fabric_with_ddp_is_one_file_with_the_same_tree(trainers_ddp: Path, trainers_fsdp2: Path) -> None:
    file, folder = (ckptools.open(run / "fabric/step-2.ckpt") for run in (trainers_ddp, trainers_fsdp2))
    assert file.raw.keys() == folder.raw.keys() == {*("model", "optimizer"), *FABRICS_REST}
    assert list(file.model) == list(torch.load(trainers_ddp / "full.pt")["model"])
