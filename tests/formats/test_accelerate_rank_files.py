"""Accelerate's FSDP2 saved with `use_dcp=False`: a file per rank for the model, and one for its optimizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptools
from ckptools.errors import NotWholeError
from tests.training.forked import run_ranks
from tests.versions import torch_with

OPTIMIZER = "optimizer_0_rank{}.bin"


def save_as_a_rank(out: Path) -> None:
    """What `save_fsdp_model` and `save_fsdp_optimizer` of Accelerate 1.15 write, and the full values."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 7)).square().mean().backward()
    optimizer.step()
    torch.save(get_model_state_dict(model), out / f"pytorch_model_fsdp_0_rank{rank}.bin")
    torch.save(get_optimizer_state_dict(model, optimizer), out / OPTIMIZER.format(rank))
    torch.save({"step": 1, "torch_manual_seed": torch.get_rng_state()}, out / f"random_states_{rank}.pkl")
    full = StateDictOptions(full_state_dict=True)
    states = get_model_state_dict(model, options=full), get_optimizer_state_dict(model, optimizer, options=full)
    if rank == 0:
        torch.save(states, out.parent / "truth.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    torch_with("record_event", torch.cpu.Stream)  # which FSDP2 needs on a CPU
    out = tmp_path_factory.mktemp("rank_files") / "checkpoint"
    out.mkdir()
    run_ranks(2, save_as_a_rank, out)
    return out


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


@pytest.mark.slow
def test_the_optimizer_is_read_with_the_model(saved, tmp_path):
    ckptools.consolidate(saved, tmp_path / "all.pt", only="all")
    written, (model, optimizer) = torch.load(tmp_path / "all.pt"), torch.load(saved.parent / "truth.pt")
    assert all(torch.equal(written["model"][name], tensor) for name, tensor in model.items())
    found = written["optimizer"]
    assert found["param_groups"] == optimizer["param_groups"] and found["state"].keys() == optimizer["state"].keys()
    for name, slots in optimizer["state"].items():
        assert all(torch.equal(found["state"][name][slot], tensor) for slot, tensor in slots.items())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_of_the_optimizer_is_an_error(copied, tmp_path, rank):
    (copied / OPTIMIZER.format(rank)).unlink()
    ck = ckptools.open(copied)
    assert [(p.code, p.rank) for p in ck.problems if p.severity == "error"] == [("CK001", rank)]
    with pytest.raises(NotWholeError):
        ck.consolidate(tmp_path / "all.pt", only="all")
    assert ck.consolidate(tmp_path / "model.pt", only="model").left_out == {}


def test_files_of_two_ranks_that_changed_places_are_told_and_read_as_what_they_hold(saved, copied, tmp_path):
    one, other = (copied / OPTIMIZER.format(rank) for rank in (0, 1))
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    ck, right = ckptools.open(copied), ckptools.open(saved)
    assert {p.code for p in ck.problems if p.severity == "error"} == {"CK022"}
    for fqn, slots in right.optimizers["optimizer"].state.items():
        assert torch.equal(ck.optimizers["optimizer"].state[fqn]["exp_avg"].load(), slots["exp_avg"].load())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cut_file_of_the_optimizer_does_not_keep_the_model_from_being_read(copied, tmp_path, rank):
    file = copied / OPTIMIZER.format(rank)
    file.write_bytes(file.read_bytes()[:900])
    ck = ckptools.open(copied)
    assert ("CK002", rank) in [(p.code, p.rank) for p in ck.problems] and not ck.whole
    ck.consolidate(tmp_path / "model.pt", only="model")
