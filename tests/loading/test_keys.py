"""A key of a running state dict finds a value only where one reading is possible, and never another model's weights."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ckptools
from ckptools.errors import NotWholeError, RefusedError
from ckptools.model.tensor import Tensor
from tests.loading.test_optimizers import module_like
from tests.truth import FIXTURES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
UNTOUCHED = -1.0
"""What a running tensor holds before it is loaded."""


def numbered(names: str, first: int = 0) -> dict[str, torch.Tensor]:
    """A model's state dict: one tensor for each name, each with a value of its own."""
    return {name: torch.full((2,), float(n)) for n, name in enumerate(names.split(), first)}


def running(names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((2,), UNTOUCHED) for name in names.split()}


def load(path: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Let `dcp.load` fill a state dict.

    Raises:
        RefusedError: the reader refused it.
    """
    try:
        dcp.load(state, storage_reader=ckptools.StorageReader(path, **options))
    except CheckpointException as error:
        ((failure, _),) = error.failures.values()
        raise failure from None
    return state


def values(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(tensor[0]) for name, tensor in tensors.items()}


def flat(tree: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a nested dict by dotted key."""
    found = {}
    for key, value in tree.items():
        found |= (
            {f"{key}.{name}": one for name, one in flat(value).items()} if isinstance(value, dict) else {key: value}
        )
    return found


# -- models ------------------------------------------------------------------------------------------------------------


FOUND = {
    "as it was saved": ({"model": numbered("a.w a.b")}, {"model": running("a.w a.b")}),
    "under another key": ({"model": numbered("a.w a.b")}, {"net": running("a.w a.b")}),
    "saved under another key": ({"state_dict": numbered("a.w a.b")}, {"model": running("a.w a.b")}),
    "saved as the file itself": (numbered("a.w a.b"), {"model": running("a.w a.b")}),
    "as the file itself": ({"model": numbered("a.w a.b")}, running("a.w a.b")),
    "deep down": ({"model": numbered("a.w a.b")}, {"app": {"state": {"model": running("a.w a.b")}}}),
    "in a module that the checkpoint lacks": ({"model": numbered("a.w a.b")}, {"model": running("net.a.w net.a.b")}),
    "without a module around all names": ({"state_dict": numbered("m.a.w m.a.b m.c")}, {"model": running("a.w a.b c")}),
    "in DDP": ({"model": numbered("a.w a.b")}, {"model": running("module.a.w module.a.b")}),
    "saved in DDP": ({"model": numbered("module.a.w module.a.b")}, {"model": running("a.w a.b")}),
    "compiled": ({"model": numbered("a.w a.b")}, {"model": running("_orig_mod.a.w _orig_mod.a.b")}),
    "saved compiled in DDP": (
        {"model": numbered("module._orig_mod.a.w module._orig_mod.b")},
        {"model": running("a.w b")},
    ),
    "with a wrapper inside": (
        {"model": numbered("a._checkpoint_wrapped_module.w b")},
        {"model": running("a._checkpoint_wrapped_module.w b")},
    ),
    "a bare layer": ({"model": numbered("weight bias")}, {"model": running("weight bias")}),
    "a module named state": ({"model": numbered("state.w a.w")}, {"model": running("state.w a.w")}),
    "a module named model": ({"model": numbered("model.w a.w")}, {"model": running("model.w a.w")}),
    "a module named param_groups": (
        {"model": numbered("param_groups.0.w a.w")},
        {"model": running("param_groups.0.w a.w")},
    ),
    "a module named optimizer": ({"model": numbered("optimizer.w a.w")}, {"model": running("optimizer.w a.w")}),
    "a module named ema": ({"model": numbered("ema.w a.w")}, {"model": running("ema.w a.w")}),
    "a teacher that was saved": ({"teacher": numbered("a.w a.b")}, {"teacher": running("a.w a.b")}),
}
"""Pairs of what was saved and what is asked for, which mean the same values in the same order."""


@pytest.mark.parametrize(("saved", "asked"), FOUND.values(), ids=FOUND.keys())
def test_one_reading_is_found(tmp_path: Path, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    torch.save({**saved, "step": 3} if "a.w" not in saved else saved, tmp_path / "a.pt")
    state = load(tmp_path / "a.pt", copy.deepcopy(asked))
    assert list(values(flat(state)).values()) == list(values(flat(saved)).values())


REFUSED = {
    "an average that was not saved": ({"model": numbered("a.w a.b")}, {"ema": running("a.w a.b")}),
    "a model and its average": ({"model": numbered("a.w")}, {"model": running("a.w"), "model_ema": running("a.w")}),
    "a model and its teacher": ({"model": numbered("a.w")}, {"model": running("a.w"), "teacher": running("a.w")}),
    "an actor and a critic": ({"model": numbered("a.w")}, {"actor": running("a.w"), "critic": running("a.w")}),
    "two models": ({"model": numbered("a.w")}, {"net_a": running("a.w"), "net_b": running("a.w")}),
    "two modules alike": ({"model": numbered("a.w a.b")}, {"model": running("enc.a.w enc.a.b dec.a.w dec.a.b")}),
    "a module and a model alike": ({"model": numbered("a.w a.b")}, {"model": running("a.w a.b copy.a.w copy.a.b")}),
    "one layer of another name": ({"model": numbered("fc.weight")}, {"model": running("head.weight")}),
    "one module of another name": (
        {"model": numbered("fc.weight fc.bias")},
        {"model": running("head.weight head.bias")},
    ),
    "a part of a larger model": ({"model": numbered("a.w")}, {"model": running("enc.a.w enc.c")}),
    "a larger checkpoint": ({"model": numbered("a.w b.w")}, {"model": running("a.w")}),
    "another depth": ({"model": numbered("0.w 1.w 2.w")}, {"model": running("0.w 1.w")}),
    "names one level deeper in part": ({"model": numbered("a.w b.w")}, {"model": running("a.w n.b.w")}),
    "a parameter beside a module model": ({"model": numbered("w")}, {"model": running("w model.w")}),
    "a parameter in a module named param_groups": (
        {"model": numbered("a.w")},
        {"model": running("a.w param_groups.0.w")},
    ),
    "names of which some have the module around all": ({"model": numbered("m.a m.b")}, {"model": running("m.a b")}),
    "a name and its rest": ({"model": numbered("a.a.a")}, {"model": running("a a.a.a")}),
    "a module named optimizer that was not saved": ({"model": numbered("w")}, {"optimizer": running("w")}),
}
"""Pairs of what was saved and what is asked for, which could mean another model's values, or do not fit."""


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("saved", "asked"), REFUSED.values(), ids=REFUSED.keys())
def test_what_could_be_another_model_is_refused(
    tmp_path: Path, saved: dict[str, Any], asked: dict[str, Any], strict: bool
) -> None:
    torch.save({**saved, "step": 3}, tmp_path / "a.pt")
    state = copy.deepcopy(asked)
    if strict:
        with pytest.raises(RefusedError):
            load(tmp_path / "a.pt", state)
        assert set(values(flat(state)).values()) == {UNTOUCHED}
        return
    with contextlib.suppress(RefusedError):
        load(tmp_path / "a.pt", state, strict=False)
    # Names of only one side are passed over; every other name gets the value of this name.
    of_names = {name.removeprefix("model."): value for name, value in values(flat(state)).items()}
    assert all(value in (UNTOUCHED, values(saved["model"]).get(name)) for name, value in of_names.items())


PARTS = ("a", "b", "0", "weight", "state", "model", "module", "ema", "param_groups", "optimizer", "_orig_mod")
names_of_models = st.lists(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map(".".join), min_size=1, max_size=4, unique=True
)
containers = st.sampled_from(["model", "net", "state_dict", "module", "teacher", "x"])


@settings(max_examples=100, deadline=None)
@given(names_of_models, names_of_models, containers, containers)
def test_whatever_the_names_a_value_is_that_of_the_same_name_or_refused(
    tmp_path_factory: pytest.TempPathFactory, saved: list[str], asked: list[str], inside: str, under: str
) -> None:
    """All names of one model may have more in front, be it on either side; nothing else may differ."""
    path = tmp_path_factory.mktemp("keys") / "a.pt"
    there = numbered(" ".join(saved))
    torch.save({inside: there, "step": 3}, path)
    for names in (asked, saved, [f"{asked[0]}.{name}" for name in saved]):
        state = {under: running(" ".join(names))}
        try:
            load(path, state)
        except (RefusedError, ckptools.CkptoolsError):
            continue
        loaded = values(state[under])
        assert sorted(loaded.values()) == sorted(values(there).values())
        by_value = {value: name for name, value in values(there).items()}
        pairs = [(name.split("."), by_value[value].split(".")) for name, value in loaded.items()]
        pairs = [([p for p in a if p != "_orig_mod"], [p for p in b if p != "_orig_mod"]) for a, b in pairs]
        in_front = {(tuple(a[: max(0, len(a) - len(b))]), tuple(b[: max(0, len(b) - len(a))])) for a, b in pairs}
        ((here, saved_alone),) = in_front
        assert all(a[len(here) :] == b[len(saved_alone) :] for a, b in pairs)


# -- optimizers --------------------------------------------------------------------------------------------------------


ORDERS = (("decay", "none"), ("none", "decay"))
HYPERPARAMETERS = {"decay": {"lr": 0.1, "weight_decay": 0.5}, "none": {"lr": 0.2, "weight_decay": 0.0}}


def net(around: str = "") -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return nn.ModuleDict({around: model}) if around else model


def optimizer_of(model: nn.Module, order: tuple[str, ...], **more: float) -> torch.optim.Optimizer:
    of_group = {
        "decay": [p for name, p in model.named_parameters() if name.endswith("weight")],
        "none": [p for name, p in model.named_parameters() if name.endswith("bias")],
    }
    groups = [{"params": of_group[name], **HYPERPARAMETERS[name], **more} for name in order]
    optimizer = torch.optim.AdamW(groups)
    for n, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + n)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def facts(model: nn.Module, optimizer: torch.optim.Optimizer, around: str = "") -> dict[str, tuple[float, ...]]:
    """By name: learning rate, weight decay, and the first moment, which differs for each parameter."""
    name_of = {parameter: name.removeprefix(around) for name, parameter in model.named_parameters()}
    return {
        name_of[p]: (group["lr"], group["weight_decay"], float(optimizer.state[p]["exp_avg"].flatten()[0]))
        for group in optimizer.param_groups
        for p in group["params"]
    }


def save_optimizer(path: Path, how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = get_model_state_dict(model)
    if how == "a file, by number":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        return
    options = FLATTENED if "flattened" in how else None
    dcp.save(
        {"model": state, "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=path
    )


HOW = ("a file, by number", "DCP, listed", "DCP, flattened")


@pytest.mark.parametrize("head", ["optimizer", "optim"])
@pytest.mark.parametrize("flattened", [False, True], ids=["listed", "flattened"])
@pytest.mark.parametrize("order", ORDERS, ids=["same order", "other order"])
@pytest.mark.parametrize("how", HOW)
def test_each_parameter_gets_the_hyperparameters_of_its_saved_group(
    tmp_path: Path, how: str, order: tuple[str, ...], flattened: bool, head: str
) -> None:
    model = net()
    optimizer = optimizer_of(model, ORDERS[0])
    save_optimizer(tmp_path / "saved", how, model, optimizer)
    expected = facts(model, optimizer)
    model = net()
    optimizer = optimizer_of(model, order, lr=9.0, weight_decay=9.0)
    options = FLATTENED if flattened else None
    state = {"model": get_model_state_dict(model), head: get_optimizer_state_dict(model, optimizer, options=options)}
    load(tmp_path / "saved", state)
    set_optimizer_state_dict(model, optimizer, state[head], options=options)
    assert facts(model, optimizer) == expected


@pytest.mark.parametrize("flattened", [False, True], ids=["listed", "flattened"])
def test_a_module_around_the_saved_model_is_taken_from_param_groups_too(tmp_path: Path, flattened: bool) -> None:
    model = net(around="net")
    optimizer = optimizer_of(model, ORDERS[0])
    save_optimizer(tmp_path / "saved", HOW[1], model, optimizer)
    expected = facts(model, optimizer, around="net.")
    model = net()
    optimizer = optimizer_of(model, ORDERS[1], lr=9.0)
    options = FLATTENED if flattened else None
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer, options=options)}
    load(tmp_path / "saved", state)
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    assert facts(model, optimizer) == expected


def test_a_script_that_saved_an_optimizer_by_number_loads_it_so(tmp_path: Path) -> None:
    model = net()
    optimizer = optimizer_of(model, ORDERS[0])
    expected = facts(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    model = net()
    optimizer = optimizer_of(model, ORDERS[0], lr=9.0)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    state = load(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    optimizer.load_state_dict(state["optimizer"])
    assert facts(model, optimizer) == expected


def test_numbers_do_not_ask_for_an_optimizer_with_names(tmp_path: Path) -> None:
    model = net()
    optimizer = optimizer_of(model, ORDERS[0])
    save_optimizer(tmp_path / "saved", HOW[1], model, optimizer)
    with pytest.raises(RefusedError, match="by number, and the saved one by name: ask for torch's get_optimizer_"):
        load(tmp_path / "saved", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("flattened", [False, True], ids=["listed", "flattened"])
def test_other_param_groups_are_refused_where_they_are_listed(tmp_path: Path, how: str, flattened: bool) -> None:
    """Flattened, each parameter has its own hyperparameters, which torch puts into the groups that there are."""
    model = net()
    save_optimizer(tmp_path / "saved", how, model, optimizer_of(model, ORDERS[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    options = FLATTENED if flattened else None
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    if flattened:
        load(tmp_path / "saved", state)
        assert state["optimizer"]["param_groups.1.bias.lr"] == 0.2
        return
    with pytest.raises(RefusedError, match="its optimizer has 2 param groups, the one here 1"):
        load(tmp_path / "saved", state)


def test_a_parameter_with_the_number_of_a_group_for_a_name_is_not_guessed(tmp_path: Path) -> None:
    """The key `param_groups.0.lr` is that of the first group, or of the first parameter."""
    model = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
    optimizer = torch.optim.SGD([{"params": [model[1]], "lr": 0.1}, {"params": [model[0]], "lr": 0.2}])
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    with pytest.raises(RefusedError, match=r"param_groups\.0\.lr"):
        load(tmp_path, {"optim": get_optimizer_state_dict(model, optimizer, options=FLATTENED)})


def test_a_hyperparameter_that_an_older_torch_did_not_have_is_kept(tmp_path: Path) -> None:
    model = net()
    state = optimizer_of(model, ORDERS[0]).state_dict()
    for group in state["param_groups"]:
        del group["foreach"]
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    optimizer = optimizer_of(model, ORDERS[0], lr=9.0, foreach=True)
    loaded = ckptools.load(model, tmp_path / "a.pt", optimizer)
    assert {key.rpartition(".")[2] for key in loaded.kept} == {"foreach"}
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert [group["foreach"] for group in optimizer.param_groups] == [True, True]


# -- options -----------------------------------------------------------------------------------------------------------


def test_what_only_one_side_has_is_kept_or_passed_over_if_asked(tmp_path: Path) -> None:
    torch.save({"model": numbered("a.w b.w"), "step": 3}, tmp_path / "a.pt")
    state = load(tmp_path / "a.pt", {"app": {"model": running("a.w c.w")}}, strict=False)
    assert values(state["app"]["model"]) == {"a.w": 0.0, "c.w": UNTOUCHED}
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "c": nn.Linear(2, 1)})
    torch.save({"model": {"a.weight": torch.full((1, 2), 7.0)}, "step": 3}, tmp_path / "b.pt")
    loaded = ckptools.load(model, tmp_path / "b.pt", strict=False)
    assert loaded.kept == ("model.a.bias", "model.c.weight", "model.c.bias")
    assert model["a"].weight.tolist() == [[7.0, 7.0]]


@pytest.mark.parametrize(
    ("saved", "options"),
    [
        ("blocks.0.w blocks.1.w", {"rename": "blocks=layers"}),
        ("blocks.0.w blocks.1.w", {"rename": ["blocks.=layers."]}),
        ("actor.layers.0.w actor.layers.1.w", {"strip_prefix": "actor."}),
        ("x.w y.w", {"map": {"x.w": "layers.0.w", "y.w": "layers.1.w"}}),
    ],
)
def test_names_are_changed_by_options(tmp_path: Path, saved: str, options: dict[str, Any]) -> None:
    torch.save({"model": numbered(saved), "step": 3}, tmp_path / "a.pt")
    asked = "layers.0.w layers.1.w"
    assert values(load(tmp_path / "a.pt", {"model": running(asked)}, **options)["model"]) == values(numbered(asked))


def test_a_tied_weight_is_found_by_either_of_its_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, both: bool) -> None:
            super().__init__()
            self.embed = nn.Embedding(3, 2)
            if both:
                self.head = nn.Linear(2, 3, bias=False)
                self.head.weight = self.embed.weight

    weight = torch.arange(6.0).reshape(3, 2)
    for names in (["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]):
        torch.save({"model": dict.fromkeys(names, weight), "step": 3}, tmp_path / "a.pt")
        model = Tied(both=True)
        ckptools.load(model, tmp_path / "a.pt")
        assert torch.equal(model.embed.weight, weight)
        assert model.head.weight is model.embed.weight
    model = Tied(both=False)
    ckptools.load(model, tmp_path / "a.pt")
    assert torch.equal(model.embed.weight, weight)


@pytest.mark.parametrize("fill", ["nan", "zero", None])
def test_what_a_missing_rank_held_is_filled_or_left(tmp_path: Path, fill: str | None) -> None:
    shutil.copytree(FIXTURES / "torch2.4.1-fsdp2-w3", tmp_path / "a")
    sound = ckptools.load_state_dict(tmp_path / "a" / "rank0.pt")
    (tmp_path / "a" / "rank2.pt").unlink()
    state = {"model": {name: torch.full_like(value, UNTOUCHED) for name, value in sound.items()}}
    with pytest.raises(NotWholeError, match="rank 2 missing"):
        load(tmp_path / "a" / "rank0.pt", state)
    load(tmp_path / "a" / "rank0.pt", state, allow_missing=True, fill=fill)
    lost = {"nan": torch.isnan, "zero": lambda value: value == 0, None: lambda value: value == UNTOUCHED}[fill]
    floats = {name: value for name, value in state["model"].items() if value.is_floating_point()}
    assert any(lost(value).any() and not lost(value).all() for value in floats.values()) == (fill is not None)
    assert any(lost(value).all() for value in floats.values()) == (fill is None)
    assert all(((value == sound[name]) | lost(value)).all() for name, value in floats.items())


@pytest.mark.parametrize("fill", ["zero", None])
def test_a_model_keeps_what_a_missing_rank_held_and_says_which_values(tmp_path: Path, fill: str | None) -> None:
    shutil.copytree(FIXTURES / "torch2.4.1-fsdp2-w3", tmp_path / "a")
    sound = ckptools.open(tmp_path / "a" / "rank0.pt", all_ranks=True).model
    model = module_like({name: value for name, value in sound.items() if isinstance(value, Tensor)})
    (tmp_path / "a" / "rank2.pt").unlink()
    loaded = ckptools.load(model, tmp_path / "a" / "rank0.pt", allow_missing=True, fill=fill)
    kept = {name for name in sound if f"model.{name}" in loaded.kept}
    assert all((value == 1).all() for name, value in model.state_dict().items() if name in kept)
    others = {name: value for name, value in model.state_dict().items() if name not in kept}
    if fill is None:
        assert kept and all(torch.equal(value, sound[name].load()) for name, value in others.items())
    else:
        assert not kept and any(" are zero: " in note for note in loaded.notes)


def test_a_name_that_is_not_lost_is_missed_all_the_same(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "torch2.4.1-fsdp2-w3", tmp_path / "a")
    sound = ckptools.load_state_dict(tmp_path / "a" / "rank0.pt")
    (tmp_path / "a" / "rank2.pt").unlink()
    state = {"model": {**sound, "another": torch.ones(2)}}
    with pytest.raises(RefusedError, match=r"lacks 1 key: model\.another"):
        load(tmp_path / "a" / "rank0.pt", state, allow_missing=True)


def test_a_value_that_each_rank_has_for_itself_is_not_loaded_by_another_number_of_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        state = {"model": numbered("a.w"), "rng": torch.full((4,), rank, dtype=torch.uint8), "step": 3}
        torch.save(state, tmp_path / f"rank{rank}.pt")
    with pytest.raises(RefusedError, match="; of rng each of its 2 ranks has its own, for as many ranks"):
        load(tmp_path, {"model": running("a.w"), "rng": torch.zeros(4, dtype=torch.uint8)})
