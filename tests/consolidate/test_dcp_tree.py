"""A DCP keeps the tree that the checkpoint was saved with, so that the script that saved it resumes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import ckptools
from ckptools.errors import RefusedError, UsageError
from tests.consolidate import app_state, dcp_resume
from tests.consolidate.test_outputs import raw
from tests.truth import WHOLE, Known
from tests.versions import TORCH

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def keys(path: Path) -> set[str]:
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


def tops(path: Path) -> set[str]:
    return {key.partition(".")[0] for key in keys(path)}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return raw(one) == raw(other) if isinstance(one, torch.Tensor) else one == other


# -- a script of PyTorch's tutorial, and averages beside ---------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder in which two ranks saved a run, and what each start loaded of the DCP that was made of it."""
    if not dcp_resume.CAN_TRAIN:
        pytest.skip(f"{TORCH} has no record_event")
    folder = tmp_path_factory.mktemp("app")
    assert app_state.start(folder, 2) == [0, 0]
    ckptools.consolidate(folder / "saved", folder / "x.dcp", check=True)
    for ranks in (1, 2):
        assert app_state.start(folder, ranks, folder / "x.dcp") == [0] * ranks
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_that_saved_a_run_resumes_from_it_at_any_world_size(saved, ranks):
    before, after = (torch.load(saved / name) for name in ("saved.pt", f"x.dcp on {ranks}.pt"))
    assert same(before, after)
    assert before["app"]["optim"]["state"]["0.weight"]["exp_avg"].any() and before["ema"]["n_averaged"] == 3


@pytest.mark.slow
def test_it_has_the_keys_that_torch_wrote(saved):
    ours, theirs = (FileSystemReader(saved / name).read_metadata() for name in ("x.dcp", "saved"))
    assert ours.planner_data == theirs.planner_data
    assert {"app.model.0.weight", "app.optim.state.0.weight.exp_avg", "ema.module.0.weight"} < keys(saved / "x.dcp")


@pytest.mark.slow
def test_a_part_alone_stays_in_its_place_and_the_same_script_loads_it(saved):
    ckptools.open(saved / "saved", model="model").consolidate(saved / "m.dcp", only="model")
    state = {"app": {"model": {"2.bias": torch.zeros(5)}}}
    dcp.load(state, checkpoint_id=saved / "m.dcp")
    assert raw(state["app"]["model"]["2.bias"]) == raw(torch.load(saved / "saved.pt")["app"]["model"]["2.bias"])
    assert all(key.startswith("app.model.") for key in keys(saved / "m.dcp"))


# -- rank files --------------------------------------------------------------------------------------------------------


NAMES = ("composer-0.13.5-torch1.13.1-sharded-w4", "torch2.13.0-fsdp1-sharded-w4", "torch2.13.0-ddp-w4")
TREES = [k for k in WHOLE if k.name in NAMES or k.name.startswith(("torch2.6.0-fsdp2", "verl-fsdp2", "dcp-"))]


@pytest.mark.parametrize("known", TREES, ids=lambda k: k.name)
def test_every_value_has_the_place_that_it_has_in_the_tree(known: Known, tmp_path):
    ck = known.open(all_ranks=True)
    ck.consolidate(tmp_path / "all.pt", keep_types=True)  # as a DCP does
    flat, _ = flatten_state_dict(torch.load(tmp_path / "all.pt", weights_only=False))
    ck.consolidate(tmp_path / "x.dcp")
    ids = [".".join(map(str, o.path)) for o in ck.optimizers.values()]  # whose numbers may have become names
    expected = {key for key in flat if not key.startswith(tuple(f"{path}." for path in ids))}
    found = keys(tmp_path / "x.dcp")
    assert {key for key in found if not key.startswith(tuple(f"{path}." for path in ids))} == expected
    assert all(any(key.startswith(f"{path}.state.") for key in found) for path in ids) and len(expected) > 3


def test_the_keys_of_composer_are_below_state(tmp_path):
    known = next(k for k in WHOLE if k.name == NAMES[0])
    ck = known.open(all_ranks=True)
    ck.consolidate(tmp_path / "x.dcp")
    (name,) = ck.tree["state"]["optimizers"]
    moment = f"state.optimizers.{name}.state.model.emb.weight.exp_avg"
    assert {"state.model.model.emb.weight", moment} < keys(tmp_path / "x.dcp")


# -- one process -------------------------------------------------------------------------------------------------------


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_script_that_saves_an_optimizer_by_number_loads_it_by_number(tmp_path):
    model, optimizer = trained()
    dcp.save({"net": model.state_dict(), "opt": optimizer.state_dict()}, checkpoint_id=tmp_path / "saved")
    ckptools.consolidate(tmp_path / "saved", tmp_path / "x.dcp")
    other, again = trained()[0], torch.optim.AdamW(model.parameters(), lr=9.0)
    again.load_state_dict(optimizer.state_dict())
    for state in again.state.values():
        state["exp_avg"].zero_()
    state = {"net": {name: torch.zeros_like(t) for name, t in other.state_dict().items()}, "opt": again.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "x.dcp")
    assert same(state["net"], dict(model.state_dict())) and same(state["opt"], optimizer.state_dict())
    assert keys(tmp_path / "x.dcp") == keys(tmp_path / "saved")


def test_rank_files_with_an_optimizer_by_number_get_names_that_torchs_api_takes(tmp_path):
    model, optimizer = trained()
    torch.save({"app": {"model": model.state_dict(), "optim": optimizer.state_dict()}}, tmp_path / "x.pt")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp")
    assert "app.optim.state.1.weight.exp_avg" in keys(tmp_path / "x.dcp")


def test_a_bare_state_dict_stays_at_the_root(tmp_path):
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "x.pt")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp")
    assert keys(tmp_path / "x.dcp") == set(model.state_dict())


def test_the_flat_layout_moves_the_model_and_the_optimizer(tmp_path):
    model, optimizer = trained()
    tree = {"app": {"model": model.state_dict(), "optim": optimizer.state_dict()}, "step": 3}
    torch.save(tree, tmp_path / "x.pt")
    done = ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp", layout="flat")
    assert tops(tmp_path / "x.dcp") == {"model", "optimizer", "step"}
    assert "arranged for torch's state_dict API: model is app.model, optimizer is app.optim" in done.notes


@pytest.mark.parametrize("out", ["x.pt", "x.safetensors"])
def test_the_flat_layout_of_another_output_is_a_mistake(tmp_path, out):
    torch.save({"w": torch.ones(2)}, tmp_path / "s.pt")
    with pytest.raises(UsageError, match=r"layout='flat' is for a \.dcp"):
        ckptools.consolidate(tmp_path / "s.pt", tmp_path / out, layout="flat")
    with pytest.raises(UsageError, match="layout='deep': choose saved or flat"):
        ckptools.consolidate(tmp_path / "s.pt", tmp_path / "x.dcp", layout="deep")


def test_a_list_has_no_keys_to_stay_at(tmp_path):
    model, optimizer = trained()
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "x.pt")
    with pytest.raises(RefusedError, match=r"a DCP holds a dict, and this is a list; write a \.pt"):
        ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp")
