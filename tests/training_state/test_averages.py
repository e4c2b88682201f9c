"""Averages of the weights, as libraries save them: they get the names of the trained model, or none, and are joined."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import ckptools
from ckptools.training_state.models import models_of, note_on_choice
from tests.training_state.test_models import Net, optimizer_of
from tests.truth import FIXTURES

AVERAGES = FIXTURES / "averages"
TRUTH = load_file(AVERAGES / "truth.safetensors")

# -- what libraries wrote ----------------------------------------------------------------------------------------------


FILES = {
    "diffusers.pt": ("model", "diffusers", "ema.shadow_params"),
    "torch_ema.pt": ("model", "torch_ema", "ema.shadow_params"),
    "timm.pth.tar": ("model", "timm", "state_dict_ema"),
    "timm_wrapped.pt": ("model", "timm", "model_ema"),
    "swa.pt": ("model", "swa", "swa_model"),
    "lightning.ckpt": ("lightning_model", "lightning", "state_dict"),
}
"""For each file the truth of its trained model and of its average, and the name of the average."""


def truth(of: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{of}/"): value for name, value in TRUTH.items() if name.startswith(f"{of}/")}


def same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("which", ["trained", "ema", "name"])
def test_each_model_is_written_with_the_names_and_values_of_the_run(tmp_path, file, which):
    trained, average, name = FILES[file]
    model = {"trained": None, "ema": "ema", "name": name}[which]
    ck = ckptools.open(AVERAGES / "ckpt" / file, only_this_file=True, model=model)
    expected = truth(trained if which == "trained" else average)
    assert same({name: value.load() for name, value in ck.model.items()}, expected)
    for out in ("out.safetensors", "out.pt", "out.dcp"):
        ckptools.consolidate(ck, tmp_path / out, only="model", check=True)
        written = ckptools.open(tmp_path / out).model
        assert same({name: value.load() for name, value in written.items()}, expected)
    (tmp_path / "state.pt").unlink(missing_ok=True)
    torch.save(expected, tmp_path / "state.pt")
    assert ck.match(tmp_path / "state.pt").loads and ck.verify().ok
    assert ckptools.diff(ck, tmp_path / "state.pt", section="model", every_byte=True).same is True


def parameters(state: dict[str, Any]) -> list[str]:
    """The names of a state dict without those of a normalization's statistics."""
    return [name for name in state if not name.rpartition(".")[2].startswith(("running", "num"))]


@pytest.mark.parametrize("file", FILES)
def test_the_trained_model_names_the_optimizer_and_no_key_is_lost(file):
    ck = ckptools.open(AVERAGES / "ckpt" / file, only_this_file=True)
    (optimizer,) = ck.optimizers.values()
    assert [*optimizer.state] == parameters(ck.model)
    here = {row["name"] for row in ck.records(private=True).to_dicts()}
    beside = {"swa.pt": "swa_model.n_averaged", "lightning.ckpt": "averaging_state.n_averaged"}
    decay = "ema.decay" if FILES[file][2] == "ema.shadow_params" else "hidden.weight"
    average = "state_dict.net.hidden.weight" if file == "lightning.ckpt" else f"{FILES[file][2]}.hidden.weight"
    assert {beside.get(file, decay), average} <= here


def test_the_whole_tree_keeps_the_list_that_the_library_loads(tmp_path):
    ck = ckptools.open(AVERAGES / "ckpt" / "torch_ema.pt", only_this_file=True)
    ck.consolidate(tmp_path / "all.pt")
    state, expected = torch.load(tmp_path / "all.pt")["ema"], truth("torch_ema")
    assert state["num_updates"] == 3 and state["collected_params"] is None
    pairs = zip(state["shadow_params"], parameters(ck.model), strict=True)
    assert all(torch.equal(value, expected[name]) for value, name in pairs)


# -- a list without names ----------------------------------------------------------------------------------------------


def listed(net: nn.Module) -> dict[str, Any]:
    return {"decay": 0.9, "shadow_params": [p.detach() + 1 for p in net.parameters()]}


def test_a_list_says_that_its_names_are_assumed_from_the_order_and_what_it_lacks(tmp_path):
    torch.save({"model": Net().state_dict(), "ema": listed(Net())}, tmp_path / "x.pt")
    note = models_of(ckptools.open(tmp_path / "x.pt"))[1].note
    assert note == "a list, named in the order of model (shapes agree), without 3 other values that model has"
    assert note_on_choice(ckptools.open(tmp_path / "x.pt", model="ema")).endswith(note)


def without_order(state: dict[str, Any]) -> dict[str, Any]:
    return dict(state)  # without `_metadata`


DAMAGED: dict[str, tuple[Callable[[Any], Any], Callable[[list[Any]], list[Any]], str]] = {
    "another shape": (lambda s: s, lambda p: [torch.ones(5, 5), *p[1:]], "more than one parameter fits, or none"),
    "one is missing": (lambda s: s, lambda p: [p[0], *p[2:]], "more than one parameter fits, or none"),
    "one too many": (lambda s: s, lambda p: [*p, p[0]], "more than one parameter fits, or none"),
    "another order": (lambda s: s, lambda p: p[::-1], "more than one parameter fits, or none"),
    "no order": (without_order, lambda p: p, "the state dict does not list its modules"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_list_with_more_than_one_reading_keeps_its_numbers_and_says_why(tmp_path, case):
    model, change, why = DAMAGED[case]
    average = listed(Net())
    average["shadow_params"] = change(average["shadow_params"])
    torch.save({"model": model(Net().state_dict()), "ema": average}, tmp_path / "x.pt")
    ck = ckptools.open(tmp_path / "x.pt", model="ema")
    assert [*ck.model] == [str(number) for number in range(len(average["shadow_params"]))]
    assert why in models_of(ck)[1].note and f"a list of {len(ck.model)} tensors without names" in note_on_choice(ck)
    done = ck.consolidate(tmp_path / "o.safetensors")
    assert [*load_file(tmp_path / "o.safetensors")] and any(why in note for note in done.notes)
    assert ckptools.open(tmp_path / "x.pt").model.keys() == Net().state_dict().keys()


def test_a_list_of_tensors_of_which_each_has_a_shape_of_its_own_needs_no_order(tmp_path):
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
    torch.save({"model": without_order(net.state_dict()), "ema": listed(net)}, tmp_path / "x.pt")
    ck = ckptools.open(tmp_path / "x.pt", model="ema")
    assert torch.equal(ck.model["1.weight"].load(), net[1].weight.detach() + 1)
    assert models_of(ck)[1].note == "a list, named by their shapes"


def test_a_list_alone_is_a_model_by_number(tmp_path):
    torch.save({"ema": listed(Net())}, tmp_path / "x.pt")
    ck = ckptools.open(tmp_path / "x.pt")
    assert len(ck.model) == 6 and "no one model is beside it" in note_on_choice(ck)


@pytest.mark.parametrize("state", [{"w": torch.ones(2)}, {"module.a.weight": torch.ones(5, 5)}])
def test_a_wrapper_goes_only_if_its_names_are_all_of_the_trained_model(tmp_path, state):
    torch.save({"model": Net().state_dict(), "ema": state}, tmp_path / "x.pt")
    assert [*ckptools.open(tmp_path / "x.pt", model="ema").model] == [*state]


def test_an_average_that_lacks_a_name_does_not_load_and_the_name_is_said(tmp_path):
    average = Net().state_dict()
    del average["b.weight"]
    torch.save({"model": Net().state_dict(), "ema": average}, tmp_path / "x.pt")
    torch.save(Net().state_dict(), tmp_path / "state.pt")
    found = ckptools.open(tmp_path / "x.pt", model="ema").match(tmp_path / "state.pt")
    assert not found.loads and [row.name for row in found.rows if row.status == "missing"] == ["b.weight"]
    assert ckptools.open(tmp_path / "x.pt").match(tmp_path / "state.pt").loads


# -- averages of sharded runs ------------------------------------------------------------------------------------------


def halved(value: Any) -> Any:
    """A copy of a tensor of any kind with half of its values."""
    made = copy.deepcopy(value)
    local = made._local_tensor if hasattr(made, "_local_tensor") else made
    if local.is_floating_point():
        local.mul_(0.5)
    return made


SHARDED = {
    "torch2.13.0-fsdp2-tp2x2-w4": "*.pt",
    "torch2.13.0-ddp-w4": "*.pt",
    "deepspeed-z1-fp32/ckpt": "global_step5/mp_rank_00_model_states.pt",
    "deepspeed-z3-bf16/ckpt": "global_step5/*model_states.pt",
}
"""Files of ranks, to which an average is added as a trainer would save it, in the form of the model beside it."""


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("as_list", [False, True], ids=["by name", "as a list"])
def test_a_sharded_average_is_joined_like_the_model(tmp_path, name, as_list):
    folder = tmp_path / "run"
    shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns("truth*", "HOW.md", "universal"))
    whole = {key: value.load() for key, value in ckptools.open(folder, all_ranks=True).model.items()}
    for path in folder.glob(SHARDED[name]):
        content = torch.load(path, weights_only=False)
        # DeepSpeed keeps what the client gives as it is: the average is whole in every file.
        model = whole if "deepspeed" in name else content[next(iter(content))]
        average = {key: halved(value) for key, value in model.items()}
        floating = [value for value in average.values() if value.is_floating_point()]
        torch.save({**content, "ema": {"shadow_params": floating} if as_list else average}, path)
    ck = ckptools.open(folder, all_ranks=True)
    assert ck.verify().ok and [*ck.model] == [*whole]
    ckptools.open(folder, all_ranks=True, model="ema").consolidate(
        tmp_path / "ema.safetensors", only="model", keep_names=True
    )
    found = load_file(tmp_path / "ema.safetensors")
    expected = {key: halved(value) for key, value in whole.items()}
    if as_list and "0" in found:  # nothing states the order of these parameters
        floating = [value for value in expected.values() if value.is_floating_point()]
        assert all(torch.equal(found[str(n)], value) for n, value in enumerate(floating))
    else:
        assert found and all(torch.equal(value, expected[key]) for key, value in found.items())
    assert as_list or found.keys() == whole.keys()


HALVE = """
import sys, torch, torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.set_grad_enabled(False)
for rank, path in enumerate(sys.argv[1:]):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(sys.argv) - 1)
    content, ema = (torch.load(path, weights_only=False) for _ in range(2))
    for value in ema["model"].values():
        for shard in value.local_shards() if isinstance(value, ShardedTensor) else ():
            shard.tensor.mul_(0.5)  # the parameters are views of these
    torch.save({**content, "ema": ema["model"]}, path)
    dist.destroy_process_group()
"""
"""Add an average to rank files with FSDP1's flat parameters, which torch loads in a process group only."""


def test_an_average_of_flat_parameters_is_joined_like_the_model(tmp_path):
    folder, name = tmp_path / "run", "torch2.6.0-fsdp1-local-w4"
    shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns("truth*", "HOW.md", "shapes.json"))
    files, shapes = sorted(folder.glob("*.pt")), FIXTURES / name / "shapes.json"
    whole = {key: value.load() for key, value in ckptools.open(files[0], all_ranks=True, shapes=shapes).model.items()}
    subprocess.run([sys.executable, "-W", "ignore", "-c", HALVE, *files], check=True)
    found = ckptools.open(files[0], all_ranks=True, shapes=shapes, model="ema").model
    assert found.keys() == whole.keys()
    halved_too = [key for key, value in found.items() if torch.equal(value.load(), whole[key] * 0.5)]
    as_before = [key for key, value in found.items() if torch.equal(value.load(), whole[key])]
    assert len(halved_too) > 5 and {*halved_too, *as_before} == whole.keys()
    trained = ckptools.open(files[0], all_ranks=True, shapes=shapes).model
    assert all(torch.equal(value.load(), whole[key]) for key, value in trained.items())
    unplaced = ckptools.open(files[0], all_ranks=True, model="ema").model
    assert any("holds no shapes to place it by" in value.note for value in unplaced.values())


@pytest.mark.parametrize("as_list", [False, True])
def test_an_average_in_a_dcp_is_written_by_name(tmp_path, as_list):
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
    expected = {name: parameter.detach() + 1 for name, parameter in net.named_parameters()}
    average = listed(net) if as_list else expected
    dcp.save({"model": net.state_dict(), "ema": average, "optim": optimizer_of(net)}, checkpoint_id=tmp_path / "step_3")
    ckptools.open(tmp_path / "step_3", model="ema").consolidate(tmp_path / "o.safetensors")
    assert same(load_file(tmp_path / "o.safetensors"), expected)
