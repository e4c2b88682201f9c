"""`match --optimizer --world-size`: what stands in the way of resuming, said before the run begins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jsonschema import Draft202012Validator
from safetensors.torch import save_file
from torch import nn
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import UsageError
from ckptools.torch_engine.installed import names_that_torch_lacks
from tests.schemas import SCHEMAS
from tests.truth import FIXTURES

FACTORY = """
import torch
from torch import nn

def model(dtype=torch.float32, width=4):
    return nn.Sequential(nn.Linear(3, width, dtype=dtype), nn.Linear(width, 2, dtype=dtype))

def groups(made):
    return [{"params": [p for n, p in made.named_parameters() if n.endswith(end)]} for end in ("weight", "bias")]

def adamw():
    made = model()
    return made, torch.optim.AdamW(made.parameters())

def sgd():
    made = model()
    return made, torch.optim.SGD(made.parameters(), momentum=0.9)

def in_two_groups():
    made = model()
    return made, torch.optim.AdamW(groups(made))

def other_order():
    made = model()
    return made, torch.optim.AdamW(list(made.parameters())[::-1])

def half():
    made = model(torch.bfloat16)
    return made, torch.optim.AdamW(made.parameters())

def without_bias():
    made = model()
    return made, torch.optim.AdamW([p for n, p in made.named_parameters() if n.endswith("weight")])

def alike():
    made = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    return made, torch.optim.AdamW(groups(made))

def alike_in_one_group():
    made, _ = alike()
    return made, torch.optim.AdamW(made.parameters())

def alike_with_momentum():
    made, _ = alike()
    return made, torch.optim.SGD(groups(made), momentum=0.9)

def wider():
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4))
    return made, torch.optim.AdamW(groups(made))

def adagrad():
    made = model()
    return made, torch.optim.Adagrad(made.parameters())
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "new_run.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "new_run", raising=False)
    return "new_run"


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def by_name(tmp_path: Path) -> Path:
    """A DCP as torch's state_dict API makes it: the optimizer's state goes by name."""
    model, optimizer = trained()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "by_name")
    return tmp_path / "by_name"


@pytest.fixture
def by_number(tmp_path: Path) -> Path:
    """A `.pt` with `optimizer.state_dict()`, which goes by number."""
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "by_number.pt")
    return tmp_path / "by_number.pt"


def rows(path: Path, to: str, **options: Any) -> dict[str, tuple[str, str]]:
    found = ckptools.open(path).match(to, **options)
    return {row.what: (row.verdict, row.detail) for row in found.resume}


@pytest.mark.parametrize("kind", ["by_name", "by_number"])
def test_the_same_run_resumes(kind, factory, request):
    found = ckptools.open(request.getfixturevalue(kind)).match(f"{factory}:adamw", optimizer=True)
    assert found.resumes and {row.verdict for row in found.resume} == {"fits"}
    assert [row.what for row in found.resume] == ["dtypes", "optimizer groups", "optimizer state", "torch"]


@pytest.mark.parametrize(
    ("function", "what", "detail"),
    [
        ("in_two_groups", "optimizer groups", "1 group here (of 4), 2 there (of 2, 2)"),
        ("sgd", "optimizer state", "only here: exp_avg, exp_avg_sq, step; only there: momentum_buffer"),
        ("without_bias", "optimizer groups", "group 0: only here: 0.bias, 1.bias"),
    ],
)
def test_another_optimizer_does_not_fit_and_the_difference_is_named(function, what, detail, factory, by_name):
    verdict, said = rows(by_name, f"{factory}:{function}", optimizer=True)[what]
    assert verdict == "DOES NOT FIT" and detail in said


def test_another_order_is_harmless_by_name_and_wrong_by_number(factory, by_name, by_number):
    to = f"{factory}:other_order"
    assert rows(by_name, to, optimizer=True)["optimizer groups"][0] == "fits"
    verdict, said = rows(by_number, to, optimizer=True)["optimizer groups"]
    assert verdict == "DOES NOT FIT" and "moments would go to other parameters" in said


def test_what_is_said_of_an_order_is_what_torch_does(factory, by_number, monkeypatch):
    """`load_state_dict` gives the moments of one parameter to another, where shapes allow it without a word."""
    monkeypatch.syspath_prepend(".")
    import new_run

    _, optimizer = new_run.other_order()
    optimizer.load_state_dict(torch.load(by_number)["optimizer"])
    first = optimizer.param_groups[0]["params"][0]
    assert first.shape == (2,) and optimizer.state[first]["exp_avg"].shape == (4, 3)


@pytest.fixture
def without_names(factory, tmp_path: Path, monkeypatch) -> Path:
    """A folder as Trainer leaves it: safetensors sort the names, so that nothing says which number is which."""
    monkeypatch.syspath_prepend(".")
    import new_run

    model, optimizer = new_run.alike()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    (tmp_path / "checkpoint-1").mkdir()
    save_file(model.state_dict(), tmp_path / "checkpoint-1" / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "checkpoint-1" / "optimizer.pt")
    return tmp_path / "checkpoint-1"


def test_numbers_without_names_fit_where_shapes_agree_at_every_place(factory, without_names):
    found = rows(without_names, f"{factory}:alike", optimizer=True)
    assert found["optimizer groups"] == ("fits", "by number, as torch loads them: 2 groups of 3, 3 parameters")
    assert found["optimizer state"][0] == "fits" and "of one shape that changed places" in found["optimizer state"][1]
    import new_run

    _, optimizer = new_run.alike()
    optimizer.load_state_dict(torch.load(without_names / "optimizer.pt"))


@pytest.mark.parametrize(
    ("function", "groups", "state", "detail"),
    [
        ("alike_in_one_group", "DOES NOT FIT", "not known", "6 states by number"),
        ("alike_with_momentum", "not known", "DOES NOT FIT", "only here: exp_avg, exp_avg_sq"),
        ("wider", "not known", "DOES NOT FIT", "6 shapes differ: 1.weight.exp_avg"),
    ],
)
def test_no_state_that_is_there_by_number_is_said_to_begin_at_zero(
    function, groups, state, detail, factory, without_names
):
    found = rows(without_names, f"{factory}:{function}", optimizer=True)
    assert (found["optimizer groups"][0], found["optimizer state"][0]) == (groups, state)
    assert detail in found["optimizer state"][1] and "begin at zero" not in str(found)


def test_a_number_without_state_is_named_by_its_place(factory, without_names):
    state = torch.load(without_names / "optimizer.pt")
    del state["state"][1]
    torch.save(state, without_names / "optimizer.pt")
    said = rows(without_names, f"{factory}:alike", optimizer=True)["optimizer state"]
    assert said == ("DOES NOT FIT", "1 parameter without state, which would begin at zero: 1.weight")


def test_a_dtype_that_would_be_cast_is_said_and_dcp_casts_it_indeed(factory, by_name):
    found = ckptools.open(by_name).match(f"{factory}:half", optimizer=True)
    row = found.resume[0]
    assert (row.what, row.verdict) == ("dtypes", "worth a look")
    assert "4 tensors would be cast without a word by dcp.load (pytorch#187138): fp32 to bf16" in row.detail
    state = {"model": {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in [("0.bias", (4,))]}}
    dcp.load(state, checkpoint_id=by_name)
    assert state["model"]["0.bias"].dtype is torch.bfloat16 and state["model"]["0.bias"].any()


def test_parameters_without_state_are_named(factory, tmp_path):
    model, optimizer = trained()
    state = optimizer.state_dict()
    del state["state"][2]
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "part.pt")
    verdict, said = rows(tmp_path / "part.pt", f"{factory}:adamw", optimizer=True)["optimizer state"]
    assert (verdict, said) == ("DOES NOT FIT", "1 parameter without state, which would begin at zero: 1.weight")


def test_what_an_optimizer_keeps_is_not_guessed(factory, by_name):
    verdict, said = rows(by_name, f"{factory}:adagrad", optimizer=True)["optimizer state"]
    assert verdict == "not known" and "Adagrad" in said


def test_a_checkpoint_without_an_optimizer_does_not_fit(factory, tmp_path):
    torch.save({"model": trained()[0].state_dict()}, tmp_path / "model.pt")
    assert rows(tmp_path / "model.pt", f"{factory}:adamw", optimizer=True)["optimizer"][0] == "DOES NOT FIT"


def test_a_function_that_makes_no_optimizer_is_a_mistake(factory, by_name):
    with pytest.raises(UsageError, match=r"returns \(model, optimizer\)"):
        ckptools.open(by_name).match(f"{factory}:model", optimizer=True)


# -- ranks ------------------------------------------------------------------------------------------------------------


COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4" / "ep0-ba5-rank0.pt"
"""Rank files of a real run, in which each of four ranks has random states of its own."""


@pytest.mark.parametrize(
    ("world_size", "verdict", "detail"),
    [
        (4, "fits", "a state for each of 4 ranks"),
        (2, "worth a look", "those of ranks 2, 3 would be lost"),
        (6, "DOES NOT FIT", "ranks 4, 5 would have no state"),
    ],
)
def test_random_states_of_other_ranks_are_counted(world_size, verdict, detail, factory):
    found = rows(COMPOSER, f"{factory}:adamw", world_size=world_size)
    assert found["rng torch"] == found["rng numpy"] == found["rng python"] == (verdict, detail)
    assert found["ranks"][0] == ("fits" if world_size == 4 else "DOES NOT FIT")


def test_states_of_places_in_a_grid_are_not_taken_for_ranks(factory):
    megatron = FIXTURES / "megatron-tp2dp2-distopt" / "ckpt"
    assert rows(megatron, f"{factory}:adamw", world_size=4)["rng torch"][0] == "fits"
    assert rows(megatron, f"{factory}:adamw", world_size=8)["rng torch"][0] == "not known"


def test_no_rank_at_all_is_a_mistake(factory, by_name):
    with pytest.raises(UsageError, match="at least one rank"):
        ckptools.open(by_name).match(f"{factory}:adamw", world_size=0)


# -- torch ------------------------------------------------------------------------------------------------------------


def test_names_that_this_torch_does_not_have_are_found_without_importing_any():
    here = ["torch.FloatStorage", "torch._utils._rebuild_tensor_v2", "torch.distributed.device_mesh.DeviceMesh",
            "torch.distributed.checkpoint.metadata.TensorProperties", "collections.OrderedDict"]  # fmt: skip
    gone = ["torch.distributed._next_mesh.Layout", "torch.nn.modules.linear.Bend"]
    assert names_that_torch_lacks([*here, *gone]) == gone


def test_a_class_of_a_newer_torch_is_named_with_the_command_that_writes_without_it(factory, tmp_path):
    class Layout:
        """Stands for a class that this torch does not have."""

    Layout.__module__, Layout.__qualname__ = "torch.distributed._next_mesh", "Layout"
    module = type(sys)("torch.distributed._next_mesh")
    module.Layout = Layout  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        torch.save({"model": trained()[0].state_dict(), "mesh": Layout()}, tmp_path / "newer.pt")
    finally:
        del sys.modules[module.__name__]
    result = CliRunner().invoke(
        app, ["match", str(tmp_path / "newer.pt"), "--to", f"{factory}:adamw", "--world-size", "2"]
    )
    assert "has no torch.distributed._next_mesh.Layout, which the files name (pytorch#194251)" in result.stdout
    assert f"try: ckptools consolidate {tmp_path / 'newer.pt'} -o resume.dcp" in result.stderr
    assert result.exit_code == 1
    ckptools.consolidate(tmp_path / "newer.pt", tmp_path / "resume.dcp")
    assert names_that_torch_lacks(ckptools.open(tmp_path / "resume.dcp").names) == []


@pytest.mark.parametrize("kind", ["dcp", "pt"])
def test_properties_with_strides_do_not_fit_a_torch_that_has_none(kind, factory, tmp_path, monkeypatch):
    """torch 2.15 pickles a sixth field, which `__setstate__` of 2.14 and before does not unpack."""
    of = (metadata if kind == "dcp" else sharded).TensorProperties
    as_before = of.__getstate__
    saved = {"model": trained()[0].state_dict()}
    with monkeypatch.context() as newer:
        newer.setattr(of, "__getstate__", lambda self: (*as_before(self), (1,)))
        if kind == "dcp":
            dcp.save(saved, checkpoint_id=tmp_path / "newer", no_dist=True)
        else:
            torch.save({**saved, "properties": of()}, tmp_path / "newer")
    found = rows(tmp_path / "newer", f"{factory}:adamw", world_size=2)["torch"]
    if "strides" in vars(of()):
        assert found[0] == "fits"
        return
    assert found[0] == "DOES NOT FIT" and "properties with strides, as torch 2.15 writes them" in found[1]
    assert not ckptools.open(tmp_path / "newer").match(f"{factory}:model").resumes
    with pytest.raises(Exception, match="too many values to unpack"):
        torch.load(tmp_path / "newer" / ".metadata" if kind == "dcp" else tmp_path / "newer", weights_only=False)
    ckptools.consolidate(tmp_path / "newer", tmp_path / "resume.dcp")
    assert rows(tmp_path / "resume.dcp", f"{factory}:adamw", world_size=2)["torch"][0] == "fits"
    dcp.load(saved, checkpoint_id=tmp_path / "resume.dcp", no_dist=True)


def test_the_command_answers_in_a_table_and_in_json(factory, by_name):
    arguments = ["match", str(by_name), "--to", f"{factory}:in_two_groups", "--optimizer"]
    text, made = (CliRunner().invoke(app, [*arguments, *more]) for more in ([], ["--json"]))
    assert (text.exit_code, made.exit_code) == (1, 1)
    assert "will it resume?   verdict       detail" in text.stdout
    found = json.loads(made.stdout)
    Draft202012Validator(json.loads(SCHEMAS["match"].read_text())).validate(found)
    assert [row["verdict"] for row in found["resume"]] == ["fits", "DOES NOT FIT", "fits", "fits"]


def test_a_name_that_torch_takes_along_from_another_module_is_there():
    moved = ["api.DTensor", "placement_types.DTensorSpec", "placement_types.Shard", "api.NoSuchName"]
    names = [f"torch.distributed._tensor.{name}" for name in moved]
    assert names_that_torch_lacks(names) == ["torch.distributed._tensor.api.NoSuchName"]
