"""The layouts of trainers hold what the trainers' own code writes, under the same names."""

from __future__ import annotations

import re
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


def kinds_in(folder: Path) -> set[str]:
    """The names of files below a folder, with `N` for every number."""
    return {re.sub(r"\d+", "N", name) for name in files_in(folder)}


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


def test_composers_dcp_has_the_tree_of_the_rank_files(trainers_fsdp2: Path, fsdp2: Created) -> None:
    folder, files = ckptools.open(trainers_fsdp2 / "composer-dcp").raw, ckptools.open(fsdp2.first).raw
    # DCP keeps no empty list or dict.
    names = ("algorithms", "callbacks", "scaler", "train_metrics", "eval_metrics", "integrations", "dataset_state.eval")
    empty = {f"state.{name}" for name in names}
    assert keys(files, 3) - keys(folder, 3) <= empty
    assert keys(folder, 3) <= keys(files, 3)


def test_composers_dcp_has_the_random_states_of_every_rank(trainers_fsdp2: Path) -> None:
    one, other = ckptools.open(trainers_fsdp2 / "composer-dcp").raw["rng"]
    assert set(one) == set(other) == {"python", "numpy", "torch"}
    assert not same(one["torch"].load(), other["torch"].load())


def test_accelerates_folder_has_the_files_of_a_real_one(trainers_fsdp2: Path) -> None:
    assert kinds_in(trainers_fsdp2 / "accelerate") == kinds_in(FIXTURES / "accelerate-fsdp2/ckpt")


def test_accelerates_folder_has_the_tree_of_a_real_one(trainers_fsdp2: Path) -> None:
    ours, real = (
        ckptools.open(path).raw for path in (trainers_fsdp2 / "accelerate", FIXTURES / "accelerate-fsdp2/ckpt")
    )
    assert ours.keys() == real.keys()
    assert ours["rng"][1].keys() == real["rng"][1].keys()
    assert ours["scheduler"].keys() == real["scheduler"].keys()


def test_accelerate_with_ddp_keeps_a_tied_weight_once(trainers_ddp: Path) -> None:
    folder = trainers_ddp / "accelerate"
    assert files_in(folder) == {
        "custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl",
        "scheduler.bin",
    }  # fmt: skip
    names = load_file(folder / "model.safetensors").keys()
    full = torch.load(trainers_ddp / "full.pt")["model"].keys()
    assert names == full - {"head.weight"}


def test_accelerate_with_ddp_is_called_so(trainers_ddp: Path) -> None:
    ck = ckptools.open(trainers_ddp / "accelerate")
    assert ck.saved_as == "one .safetensors, every tensor whole; Accelerate's training state beside it"
    assert (ck.whole, ck.world_size.value, ck.step.value) == (True, 2, 2)


def test_accelerates_scripts_count_the_steps_that_its_scheduler_may_not(trainers_fsdp2: Path) -> None:
    step = ckptools.open(trainers_fsdp2 / "accelerate").step
    assert (step.value, step.sources) == (2, ("custom_checkpoint_0.global_step",))


def test_lightnings_file_has_the_tree_of_a_real_one(trainers_ddp: Path) -> None:
    (path,) = (trainers_ddp / "lightning").iterdir()
    ours = torch.load(path, weights_only=False)
    real = ckptools.open(FIXTURES / "lightning-trainer-ddp/ckpt/last.ckpt").raw
    assert path.name == "epoch=0-step=2.ckpt"
    assert ours.keys() - {"rng"} == real.keys() - {"hparams_name", "hyper_parameters"}
    assert keys(ours["loops"], 9) == keys(real["loops"], 9)
    of_some_torch = {"verbose", "_is_initial"}
    assert ours["lr_schedulers"][0].keys() - of_some_torch == real["lr_schedulers"][0].keys() - of_some_torch


def test_lightnings_names_begin_with_the_modules_attribute(trainers_ddp: Path, trainers_fsdp2: Path) -> None:
    for folder in (trainers_ddp, trainers_fsdp2):
        (path,) = (folder / "lightning").iterdir()
        full = torch.load(folder / "full.pt")["model"].keys()
        assert set(ckptools.open(path).model) == {f"model.{name}" for name in full}


def test_lightnings_file_tells_the_order_of_its_modules(trainers_ddp: Path) -> None:
    (path,) = (trainers_ddp / "lightning").iterdir()
    names = torch.load(trainers_ddp / "full.pt")["optimizer"]["state"].keys()
    (optimizer,) = ckptools.open(path).optimizers.values()
    assert set(optimizer.state) == {f"model.{name}" for name in names}


def test_fabrics_folder_is_laid_out_like_a_real_one(trainers_fsdp2: Path) -> None:
    folder = trainers_fsdp2 / "fabric"
    assert kinds_in(folder / "step-2.ckpt") == kinds_in(FIXTURES / "lightning-fabric-fsdp2/ckpt")
    assert set(torch.load(folder / "step-2.ckpt/meta.pt", weights_only=False)) == set(FABRICS_REST)


def test_fabric_with_ddp_is_one_file_with_the_same_tree(trainers_ddp: Path, trainers_fsdp2: Path) -> None:
    file, folder = (ckptools.open(run / "fabric/step-2.ckpt") for run in (trainers_ddp, trainers_fsdp2))
    assert file.raw.keys() == folder.raw.keys() == {*("model", "optimizer"), *FABRICS_REST}
    assert list(file.model) == list(torch.load(trainers_ddp / "full.pt")["model"])
