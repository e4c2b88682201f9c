"""Names of wrappers: taken out of a part alone, kept in the whole tree, in every output; never two names made one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader
from torch.optim.swa_utils import AveragedModel

import ckptools
from ckptools.errors import RefusedError, UsageError
from ckptools.inspect.record import inspect_report
from ckptools.training_state.wrappers import wrapper_words
from tests.consolidate import dcp_resume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def compiled(model: nn.Sequential) -> nn.Module:
    return torch.compile(model)


def in_ddp(model: nn.Sequential) -> nn.Module:
    return nn.DataParallel(compiled(model))  # without GPUs the same names as DDP's, without a process group


def in_blocks(model: nn.Sequential) -> nn.Module:
    model[0], model[2] = torch.compile(model[0]), torch.compile(model[2])
    return model


def recomputed(model: nn.Sequential) -> nn.Module:
    model[2] = checkpoint_wrapper(model[2])
    # Libraries that wrap layers themselves lack the hooks with which torch takes the word out of a state dict.
    model[2]._state_dict_hooks.clear()
    model[2]._load_state_dict_pre_hooks.clear()
    return model


WRAPPED = {"torch.compile": compiled, "DDP": in_ddp, "blocks": in_blocks, "activation checkpointing": recomputed}
FIRST = {
    "torch.compile": "'_orig_mod.0.weight' is '0.weight'",
    "DDP": "'module._orig_mod.0.weight' is '0.weight'",
    "blocks": "'0._orig_mod.weight' is '0.weight'",
    "activation checkpointing": "'2._checkpoint_wrapped_module.weight' is '2.weight'",
}
"""The first name with a wrapper, and the same without."""

BARE = net().state_dict()


class Saved:
    """A run with a wrapped model, its optimizer by `ids`, and the file that it is saved in."""

    def __init__(self, folder: Path, how: str, ids: str) -> None:
        self.path = folder / "run.pt"
        model = WRAPPED[how](net())
        names = [name for name in model.state_dict() if not name.rpartition(".")[2].startswith(("running", "num"))]
        optimizer = torch.optim.AdamW(model.parameters())
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizer.step()
        self.model = {name: value.clone() for name, value in model.state_dict().items()}
        state = optimizer.state_dict()
        key: Callable[[int], Any] = {"number": lambda n: n, "name": names.__getitem__}[ids]
        groups = [{**group, "params": list(map(key, group["params"]))} for group in state["param_groups"]]
        self.state = {"state": {key(n): slots for n, slots in state["state"].items()}, "param_groups": groups}
        torch.save({"model": model.state_dict(), "optim": self.state, "step": 4}, self.path)


def bits(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.contiguous().numpy().tobytes() for name, value in values.items()}


def trained(saved: Saved) -> dict[str, bytes]:
    """What the model holds, under the names of the bare module."""
    return bits(dict(zip(BARE, saved.model.values(), strict=True)))


def read(path: Path) -> Any:
    """A tree, or a dict by name, as the output's own library reads it."""
    if path.suffix == ".dcp":
        return dcp_resume.load_sharded(path, None)
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path)


# -- a part alone ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [None, True, False])
@pytest.mark.parametrize("out", ["m.safetensors", "m.pt", "m.dcp"])
@pytest.mark.parametrize("how", WRAPPED)
def test_a_model_alone_has_the_names_of_the_bare_module(tmp_path, how, out, keep):
    saved = Saved(tmp_path, how, "name")
    done = ckptools.consolidate(saved.path, tmp_path / out, only="model", keep_names=keep, check=True)
    found = {name.removeprefix("model.") if out == "m.dcp" else name: v for name, v in read(tmp_path / out).items()}
    assert bits(found) == (bits(saved.model) if keep else trained(saved))
    said = [note for note in done.notes if "wrappers" in note]
    assert said == [] if keep else len(said) == 1 and FIRST[how] in said[0]


@pytest.mark.parametrize("how", WRAPPED)
def test_a_model_alone_loads_strictly_into_the_bare_module_with_its_versions(tmp_path, how):
    saved = Saved(tmp_path, how, "name")
    ckptools.consolidate(saved.path, tmp_path / "m.pt", only="model")
    state = torch.load(tmp_path / "m.pt")
    net().load_state_dict(state, strict=True)
    assert state._metadata == BARE._metadata and list(state) == list(BARE)


@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize("ids", ["name", "number"])
def test_the_optimizer_alone_fits_the_model_alone(tmp_path, how, ids):
    saved = Saved(tmp_path, how, ids)
    ckptools.consolidate(saved.path, tmp_path / "o.safetensors", only="optimizer")
    parameters = [name for name, _ in net().named_parameters()]
    moments = {name for name in load_file(tmp_path / "o.safetensors") if name.endswith(".exp_avg")}
    assert moments == {f"state.{name}.exp_avg" for name in parameters}


def test_names_that_a_glob_leaves_out_count_too(tmp_path):
    torch.save({"module.w": torch.ones(1), "head.w": torch.ones(2)}, tmp_path / "x.pt")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "m.safetensors", only="module.*")
    assert set(load_file(tmp_path / "m.safetensors")) == {"module.w"}


# -- the whole tree ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", ["name", "number"])
@pytest.mark.parametrize("how", WRAPPED)
def test_the_whole_tree_keeps_the_names_and_says_how_to_take_them_out(tmp_path, how, ids):
    saved = Saved(tmp_path, how, ids)
    for out in ("all.pt", "all.safetensors", "all.dcp"):
        done = ckptools.consolidate(saved.path, tmp_path / out, only="all")
        assert sum("keep_names=False takes them out" in note for note in done.notes) == 1
    tree = torch.load(tmp_path / "all.pt")
    assert bits(tree["model"]) == bits(saved.model) and list(tree["optim"]["state"]) == list(saved.state["state"])
    WRAPPED[how](net()).load_state_dict(tree["model"], strict=True)
    state = {"model": {name: torch.zeros_like(value) for name, value in saved.model.items()}}
    dcp.load(state, checkpoint_id=tmp_path / "all.dcp")
    assert bits(state["model"]) == bits(saved.model)
    assert {f"model.{name}" for name in saved.model} < set(load_file(tmp_path / "all.safetensors"))


@pytest.mark.parametrize("ids", ["name", "number"])
@pytest.mark.parametrize("how", WRAPPED)
def test_names_taken_out_of_the_whole_tree_leave_the_optimizer_fitting_its_model(tmp_path, how, ids):
    saved = Saved(tmp_path, how, ids)
    for out in ("all.pt", "all.safetensors", "all.dcp"):
        ckptools.consolidate(saved.path, tmp_path / out, only="all", keep_names=False)
    tree = torch.load(tmp_path / "all.pt")
    parameters = [name for name, _ in net().named_parameters()]
    assert bits(tree["model"]) == trained(saved)
    expected = parameters if ids == "name" else [*range(len(parameters))]
    assert list(tree["optim"]["state"]) == tree["optim"]["param_groups"][0]["params"] == expected
    for was, now in zip(saved.state["state"].values(), tree["optim"]["state"].values(), strict=True):
        assert bits(was) == bits(now)
    keys = FileSystemReader(tmp_path / "all.dcp").read_metadata().state_dict_metadata
    for found in (set(keys), set(load_file(tmp_path / "all.safetensors"))):
        moments = {f"optim.state.{name}.exp_avg" for name in parameters}
        assert {key for key in found if key.endswith(".exp_avg")} == moments
        assert {key for key in found if key.startswith("model.")} == {f"model.{name}" for name in BARE}
    assert dcp_resume.load_sharded(tmp_path / "all.dcp", None)["optim.param_groups.0.params"] == parameters


def test_a_flattened_optimizer_follows(tmp_path):
    flat = {"state._orig_mod.w.exp_avg": torch.ones(2), "param_groups._orig_mod.w.lr": 0.1}
    torch.save({"model": {"_orig_mod.w": torch.zeros(2)}, "optim": flat}, tmp_path / "x.pt")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "all.pt", keep_names=False)
    tree = torch.load(tmp_path / "all.pt")
    assert list(tree["model"]) == ["w"] and list(tree["optim"]) == ["state.w.exp_avg", "param_groups.w.lr"]


def test_an_optimizer_with_names_of_the_bare_module_keeps_them(tmp_path):
    weight = torch.ones(2)
    optimizer = {"state": {"module.w": {"exp_avg": weight}}, "param_groups": [{"params": ["module.w"]}]}
    torch.save({"model": {"module.module.w": weight}, "optim": optimizer}, tmp_path / "x.pt")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "all.pt", keep_names=False)
    tree = torch.load(tmp_path / "all.pt")
    assert list(tree["model"]) == list(tree["optim"]["state"]) == ["module.w"]


def test_an_average_keeps_the_module_of_its_own_class_in_the_flat_layout(tmp_path):
    model, average = torch.compile(net()), AveragedModel(net())
    tree = {"model": model.state_dict(), "ema": average.state_dict(), "teacher": in_ddp(net()).state_dict()}
    torch.save(tree, tmp_path / "x.pt")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp", layout="flat")
    keys = set(FileSystemReader(tmp_path / "x.dcp").read_metadata().state_dict_metadata)
    assert keys == {
        *(f"model.{name}" for name in BARE),
        *(f"ema.{name}" for name in average.state_dict()),
        *(f"teacher.module._orig_mod.{name}" for name in BARE),
    }


def test_new_names_of_the_user_are_the_only_ones(tmp_path):
    torch.save({"_orig_mod.w": torch.ones(2)}, tmp_path / "x.pt")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "a.safetensors", rename=["_orig_mod.=module."])
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "b.safetensors", strip_prefix="_orig_mod")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "c.safetensors", rename=["=module."], keep_names=False)
    found = [set(load_file(tmp_path / f"{name}.safetensors")) for name in "abc"]
    assert found == [{"module.w"}, {"w"}, {"w"}]


# -- what is proven ----------------------------------------------------------------------------------------------------


def test_a_module_that_is_called_module_beside_others_keeps_its_name(tmp_path):
    names = {"module.weight", "head.module.weight", "module_list.0.w"}
    torch.save({name: torch.ones(1) for name in names}, tmp_path / "x.pt")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "m.safetensors")
    assert set(load_file(tmp_path / "m.safetensors")) == names


@pytest.mark.parametrize("out", ["m.safetensors", "m.pt", "m.dcp"])
@pytest.mark.parametrize("word", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
def test_two_names_that_would_become_one_are_refused_by_name(tmp_path, word, out):
    torch.save({f"a.{word}.w": torch.ones(1), "a.w": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(RefusedError, match=rf"'a\.{word}\.w' and 'a\.w' would both be called 'a\.w'; keep_names=True"):
        ckptools.consolidate(tmp_path / "x.pt", tmp_path / out, only="model")
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / out, only="model", keep_names=True)


def test_a_name_that_is_nothing_but_a_wrapper_stays(tmp_path):
    torch.save({"_orig_mod": torch.ones(1), "w": torch.ones(2)}, tmp_path / "x.pt")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "m.safetensors")
    assert set(load_file(tmp_path / "m.safetensors")) == {"_orig_mod", "w"}


def test_a_model_like_another_has_the_names_of_the_other(tmp_path):
    torch.save({"_orig_mod.w": torch.ones(1)}, tmp_path / "x.pt")
    (tmp_path / "original").mkdir()
    with pytest.raises(UsageError, match="does not go with keep_names"):
        ckptools.consolidate(tmp_path / "x.pt", f"{tmp_path}/hf/", like=tmp_path / "original", keep_names=True)


# -- `inspect` ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["_orig_mod.a", "_orig_mod.b"], ["all names begin with _orig_mod.: torch.compile"]),
        (
            ["module._orig_mod.a", "module._orig_mod.b._checkpoint_wrapped_module.w"],
            [
                "all names begin with module._orig_mod.: a wrapper such as DDP, torch.compile",
                "1 of 2 names contain _checkpoint_wrapped_module: activation checkpointing",
            ],
        ),
        (["module.module.a", "module.b"], ["all names begin with module.: a wrapper such as DDP"]),
        (["a._fsdp_wrapped_module.w", "b.w"], ["1 of 2 names contain _fsdp_wrapped_module: FSDP1"]),
        (["module.w", "head.module.w"], []),
        ([], []),
    ],
)
def test_each_wrapper_is_said_once_with_what_puts_it_there(names, said):
    assert [*wrapper_words(names)] == said


def test_inspect_says_it_in_the_row_of_the_model(tmp_path):
    saved = Saved(tmp_path, "DDP", "name")
    rows = {row.name: row.holds for row in inspect_report(ckptools.open(saved.path)).sections}
    assert rows["model"] == "all names begin with module._orig_mod.: a wrapper such as DDP, torch.compile"
    assert "_orig_mod" not in rows["optim"]
