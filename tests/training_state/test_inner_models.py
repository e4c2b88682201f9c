"""Several models inside one state dict: each is a model with its role, where only one reading is possible."""

from __future__ import annotations

import copy
import json
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import ckptools
from ckptools.training_state.models import models_of, note_on_choice
from tests.training_state.test_averages import halved
from tests.training_state.test_models import Net, optimizer_of, run
from tests.truth import FIXTURES

INNER = FIXTURES / "inner-models"
TRUTH = load_file(INNER / "truth.safetensors")

# -- what Lightning wrote ----------------------------------------------------------------------------------------------


MODELS = {
    "ema": {"trained": "model.", "ema": "ema_model."},
    "ema_every": {"trained": "model.", "ema": "ema_model."},
    "swa": {"trained": "model.", "ema": "ema_model.module."},
    "gan": {"trained": "generator.", "discriminator": "discriminator."},
}
"""For each file the role of each model, and what its names begin with in the state dict."""


def truth(of: str, prefix: str = "") -> dict[str, torch.Tensor]:
    start = f"{of}/{prefix}"
    return {name.removeprefix(start): value for name, value in TRUTH.items() if name.startswith(start)}


def same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def opened(file: str, model: str | None = None) -> Any:
    return ckptools.open(INNER / "ckpt" / f"{file}.ckpt", only_this_file=True, model=model)


@pytest.mark.parametrize(("file", "role"), [(file, role) for file, roles in MODELS.items() for role in roles])
def test_each_model_is_read_and_written_with_the_names_below_it(tmp_path, file, role):
    prefix = MODELS[file][role]
    ck = opened(file, None if role == "trained" else role)
    expected = truth(file, prefix)
    assert same({name: value.load() for name, value in ck.model.items()}, expected)
    assert models_of(ck)[0].role == "trained" and models_of(ck)[1].role in MODELS[file]
    for out in ("out.safetensors", "out.pt", "out.dcp"):
        done = ckptools.consolidate(ck, tmp_path / out, only="model", check=True)
        assert any(note.startswith(f"model: {prefix.split('.')[0]}") for note in done.notes)
        written = ckptools.open(tmp_path / out).model
        assert same({name: value.load() for name, value in written.items()}, expected)
    torch.save(expected, tmp_path / "state.pt")
    assert ck.match(tmp_path / "state.pt").loads and ck.verify().ok
    assert ckptools.diff(ck, tmp_path / "state.pt", section="model", every_byte=True).same is True
    assert ckptools.diff(tmp_path / "out.safetensors", ck, values=True).proof


@pytest.mark.parametrize("file", MODELS)
def test_an_optimizer_has_the_names_of_its_own_model(file):
    optimizers = list(opened(file).optimizers.values())
    found = {
        name: slots["exp_avg"].load()
        for o in optimizers
        for name, slots in o.state.items()
        if isinstance(slots["exp_avg"].load(), torch.Tensor)
    }
    of_other = truth(f"{file}:discriminator")
    expected = {**truth(f"{file}:trained"), **{f"discriminator.{name}": value for name, value in of_other.items()}}
    assert same(found, expected)


def test_moments_of_the_discriminator_are_beside_its_own_weights_alone():
    words = ("stats", INNER / "ckpt" / "gan.ckpt", "--only-this-file", "--moments", "--jsonl")
    mine, its = truth("gan:trained"), truth("gan:discriminator")
    weights = {row["name"]: row["weight"] for row in map(json.loads, run(*words)[1].splitlines())}
    assert all(weights[name] for name in mine) and all(weights[f"discriminator.{name}"] is None for name in its)
    rows = map(json.loads, run(*words, "--model", "discriminator")[1].splitlines())
    weights = {row["name"]: row["weight"] for row in rows}
    assert all(weights[name] for name in its) and all(weights[f"generator.{name}"] is None for name in mine)


@pytest.mark.parametrize("file", MODELS)
def test_the_whole_tree_and_all_models_keep_the_names_of_the_file(tmp_path, file):
    whole = truth(file)
    ckptools.consolidate(opened(file), tmp_path / "all.pt", check=True)
    assert same(torch.load(tmp_path / "all.pt")["state_dict"], whole)
    ckptools.consolidate(opened(file), tmp_path / "tree.dcp", check=True)
    assert same({k: v.load() for k, v in ckptools.open(tmp_path / "tree.dcp", model="all").model.items()}, whole)
    ckptools.consolidate(opened(file, "all"), tmp_path / "all.safetensors", check=True)
    assert same(load_file(tmp_path / "all.safetensors"), whole)
    assert opened(file, "all").model.keys() == whole.keys()


@pytest.mark.parametrize("file", MODELS)
def test_the_state_dict_of_the_whole_module_is_compared_as_a_whole(tmp_path, file):
    torch.save(truth(file), tmp_path / "state.pt")
    torch.save({"state_dict": truth(file)}, tmp_path / "weights.ckpt")
    for path in (tmp_path / "state.pt", tmp_path / "weights.ckpt"):
        found = opened(file).match(path)
        assert found.loads and found.model_names == len(truth(file)) and "as a whole" in found.chosen
        assert ckptools.open(path, only_this_file=True).match(opened(file)).loads
        rows = ckptools.diff(opened(file), path, section="model", every_byte=True).tensors
        assert len(rows) > 14 and {row.verdict for row in rows} == {"same"}
    changed = next(name for name in truth(file) if name[0] in "ed")
    assert not opened(file).match({**truth(file), changed: torch.ones(7)}).loads


def test_a_section_that_the_user_names_is_compared_alone():
    found = opened("gan").match(opened("gan"), section="discriminator")
    assert found.loads and found.model_names == len(truth("gan", "discriminator.")) and not found.chosen


def test_counts_are_those_of_each_model_and_what_is_beside_is_listed():
    sections = {section.name: section.to_dict() for section in opened("swa").sections}
    assert sections["model"]["params"] == 73 and sections["rest"]["tensors"] == 1
    names = {row["name"] for row in opened("swa").records(private=True).to_dicts()}
    assert {"ema_model.n_averaged", "rest.loss.weight", "out.bias", "ema_model.out.bias"} <= names


# -- one reading, or none ----------------------------------------------------------------------------------------------


def module(**children: nn.Module | torch.Tensor) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        made.add_module(name, child) if isinstance(child, nn.Module) else made.register_buffer(name, child)
    return made


def pair(*names: str, width: int = 3) -> dict[str, nn.Module]:
    return {name: Net(fill=number, width=width) for number, name in enumerate(names)}


def linear(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Linear(a, b))


ORDINARY: dict[str, tuple[dict[str, Any], tuple[tuple[str, ...], ...]]] = {
    "an encoder and a decoder": (pair("encoder", "decoder"), (("encoder", "decoder"),)),
    "towers that are called source and target": (pair("source", "target"), (("source", "target"),)),
    "towers of weights alone": (pair("source", "target"), ()),
    "a reference encoder that is part of the model": (pair("reference_net", "main_net"), ()),
    "an average that is trained": (pair("model", "ema"), (("model", "ema"),)),
    "an average of another shape": ({**pair("model"), **pair("ema", width=4)}, (("model",),)),
    "an average of one of two parts": (pair("backbone", "head", "ema_backbone"), (("backbone", "head"),)),
    "an average that may be of either": (pair("a", "b", "ema"), (("a",), ("b",))),
    "a buffer of the module beside": ({**pair("model", "ema"), "betas": torch.ones(5)}, (("model",),)),
    "one optimizer for generator and discriminator": (
        {"generator": linear(2, 3), "discriminator": linear(3, 1)},
        (("generator", "discriminator"),),
    ),
    "a generator and a discriminator without optimizer": (
        {"generator": linear(2, 3), "discriminator": linear(3, 1)},
        (),
    ),
    "a generator and a discriminator of the same shapes": (pair("netG", "netD"), (("netG",), ("netD",))),
    "an actor and a critic in one policy": (
        {"actor": linear(2, 3), "critic": linear(2, 1)},
        (("actor", "critic"),),
    ),
    "a model and a loss": ({**pair("model"), "loss": Net()}, (("model",),)),
    "two generators": (
        {"g_a": linear(2, 3), "g_b": linear(3, 2), "disc": linear(3, 1)},
        (("g_a",), ("g_b",), ("disc",)),
    ),
}


def saved_module(path: Any, children: dict[str, Any], trained: tuple[tuple[str, ...], ...]) -> nn.Module:
    """Save a module with children as Lightning does, with an optimizer of one step for some of them each."""
    made = module(**copy.deepcopy(children))
    state = copy.deepcopy(made.state_dict())
    optimizers = [optimizer_of(nn.ModuleList(getattr(made, name) for name in names)) for names in trained]
    torch.save({"state_dict": state, "optimizer_states": optimizers}, path)
    return made


@pytest.mark.parametrize("case", ORDINARY)
def test_a_state_dict_with_another_reading_is_one_model(tmp_path, case):
    children, trained = ORDINARY[case]
    made = saved_module(tmp_path / "x.ckpt", children, trained)
    ck = ckptools.open(tmp_path / "x.ckpt")
    assert [m.section.name for m in models_of(ck)] == ["state_dict"] and ck.model.keys() == made.state_dict().keys()


DIVIDED: dict[str, tuple[dict[str, Any], tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "an average of weights alone": (pair("net", "net_ema"), (), ("trained", "ema")),
    "a teacher": (pair("student", "teacher"), (("student",),), ("trained", "teacher")),
    "a target network": (pair("online", "target"), (("online",),), ("trained", "target")),
    "an optimizer of everything": (pair("net", "ema"), (("net",),), ("trained", "ema")),
    "a critic with its target": (
        {"actor": linear(2, 3), "critic": linear(5, 1), "critic_target": linear(5, 1), "log_alpha": torch.tensor(0.1)},
        (("actor",), ("critic",)),
        ("trained", "critic", "critic"),
    ),
    "a generator with its average and a discriminator": (
        {"netG": linear(2, 3), "netD": linear(3, 1), "netG_ema": linear(2, 3)},
        (("netG",), ("netD",)),
        ("trained", "discriminator", "ema"),
    ),
}


@pytest.mark.parametrize("case", DIVIDED)
@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_each_child_is_a_model_where_only_one_reading_is_possible(tmp_path, case, wrapper):
    children, trained, roles = DIVIDED[case]
    made = saved_module(tmp_path / "x.ckpt", children, trained)
    content = torch.load(tmp_path / "x.ckpt")
    content["state_dict"] = {f"{wrapper}{name}": value for name, value in content["state_dict"].items()}
    torch.save(content, tmp_path / "x.ckpt")
    names = [name for name, child in children.items() if isinstance(child, nn.Module)]
    ck = ckptools.open(tmp_path / "x.ckpt")
    assert [(m.section.name, m.role) for m in models_of(ck)] == list(zip(names, roles, strict=True))
    for name in names:
        ckptools.open(tmp_path / "x.ckpt", model=name).consolidate(tmp_path / "o.safetensors", force=True)
        assert same(load_file(tmp_path / "o.safetensors"), getattr(module(**children), name).state_dict())
    assert made and ck.verify().ok


def test_the_models_of_a_dcp_with_names_are_divided_too(tmp_path):
    made = module(**pair("net", "ema"))
    made.ema.requires_grad_(False)
    optimizer = torch.optim.AdamW(made.net.parameters(), lr=0.1)
    for parameter in made.net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model, state = get_state_dict(made, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"state_dict": model, "optimizer": state}, checkpoint_id=tmp_path / "step_3")
    ck = ckptools.open(tmp_path / "step_3")
    assert [m.role for m in models_of(ck)] == ["trained", "ema"]
    (named,) = ck.optimizers.values()
    assert [*named.state] == [name for name, _ in made.net.named_parameters()] and ck.verify().ok
    ckptools.open(tmp_path / "step_3", model="ema").consolidate(tmp_path / "o.safetensors")
    assert same(load_file(tmp_path / "o.safetensors"), made.ema.state_dict())
    ck.consolidate(tmp_path / "again.dcp")
    whole = ckptools.open(tmp_path / "again.dcp", model="all")
    assert whole.model.keys() == made.state_dict().keys()
    assert [*next(iter(whole.optimizers.values())).state] == [f"net.{name}" for name in named.state]


# -- torch's AveragedModel around models that are wrapped or not -------------------------------------------------------


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPED = {"bare": lambda net: net, "compiled": torch.compile, "DDP": DistributedDataParallel}


@pytest.mark.parametrize("averaged", WRAPPED)
@pytest.mark.parametrize("saved_as", WRAPPED)
@pytest.mark.usefixtures("one_process")
def test_an_averaged_model_has_the_names_of_the_trained_one_whatever_wraps_either(tmp_path, averaged, saved_as):
    net = Net()
    average = AveragedModel(WRAPPED[averaged](copy.deepcopy(net)), use_buffers=True)
    average.update_parameters(WRAPPED[averaged](net))
    with torch.no_grad():
        for parameter in average.parameters():
            parameter += 1
    expected = {name: value + (not name.startswith("norm.r")) for name, value in net.state_dict().items()}
    expected["norm.num_batches_tracked"] = net.norm.num_batches_tracked
    content = {"model": WRAPPED[saved_as](net).state_dict(), "swa": average.state_dict(), "optim": optimizer_of(net)}
    expected_trained = copy.deepcopy(net.state_dict())
    torch.save(content, tmp_path / "x.pt")
    ck = ckptools.open(tmp_path / "x.pt", model="swa")
    assert [m.role for m in models_of(ck)] == ["trained", "ema"] and ck.model.keys() == content["model"].keys()
    ck.consolidate(tmp_path / "ema.safetensors")
    ckptools.open(tmp_path / "x.pt").consolidate(tmp_path / "model.safetensors")
    assert same(load_file(tmp_path / "ema.safetensors"), expected)
    assert same(load_file(tmp_path / "model.safetensors"), expected_trained)
    assert "swa.n_averaged" in {row["name"] for row in ck.records(private=True).to_dicts()}
    assert note_on_choice(ck)


# -- models with an optimizer each, as keys of their own ---------------------------------------------------------------


@pytest.mark.parametrize("width", [3, 4], ids=["of the same shapes", "of other shapes"])
@pytest.mark.parametrize("model", [None, "actor", "critic"])
def test_each_of_two_optimizers_has_the_names_and_weights_of_its_own_model(tmp_path, width, model):
    nets = {"actor": Net(), "critic": Net(width=width, fill=1)}
    optimizers = {f"{name}_optim": optimizer_of(net) for name, net in nets.items()}
    torch.save({**{name: net.state_dict() for name, net in nets.items()}, **optimizers}, tmp_path / "x.pt")
    ck = ckptools.open(tmp_path / "x.pt", model=model)
    assert ck.verify().ok
    words = ("--model", model) if model else ()
    rows = map(json.loads, run("stats", tmp_path / "x.pt", "--moments", "--jsonl", *words)[1].splitlines())
    weights = {(row["optimizer"], row["name"]): row["weight"] for row in rows}
    looked_at = model or "actor"
    for name, net in nets.items():
        before = "" if name == looked_at else f"{name}."
        assert {key for of, key in weights if of == f"{name}_optim"} == {
            f"{before}{key}" for key, _ in net.named_parameters()
        }
        assert (weights[f"{name}_optim", f"{before}b.weight"] is not None) == (name == looked_at)


def test_state_of_another_shape_than_the_discriminators_parameter_is_a_problem(tmp_path):
    content = {"netG": Net().state_dict(), "netD": linear(3, 1).state_dict()}
    content |= {"optG": optimizer_of(Net()), "optD": optimizer_of(linear(3, 1))}
    torch.save(content, tmp_path / "x.pt")
    assert ckptools.open(tmp_path / "x.pt").verify().ok
    content["optD"] = optimizer_of(linear(3, 1), named=True)
    content["optD"]["state"][0]["exp_avg_sq"] = torch.ones(2, 3)
    torch.save(content, tmp_path / "x.pt")
    (problem,) = ckptools.open(tmp_path / "x.pt").problems
    assert problem.code == "CK209" and problem.tensor == "netD.0.weight"


# -- sharded runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch2.13.0-fsdp2-tp2x2-w4", "torch2.13.0-ddp-w4"])
def test_sharded_models_inside_one_state_dict_are_joined_like_one_alone(tmp_path, name):
    folder = tmp_path / "run"
    shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns("truth*", "HOW.md"))
    before = ckptools.open(folder, all_ranks=True)
    whole = {key: value.load() for key, value in before.model.items()}
    for path in folder.glob("*.pt"):
        content = torch.load(path, weights_only=False)
        key = next(iter(content))
        model = content[key]
        content[key] = {f"{child}.{key}": value for child in ("net", "ema") for key, value in model.items()}
        content[key] |= {f"ema.{name}": halved(value) for name, value in model.items()}
        torch.save(content, path)
    ck = ckptools.open(folder, all_ranks=True)
    assert ck.verify().ok and [m.role for m in models_of(ck)] == ["trained", "ema"]
    assert [str(p) for p in ck.problems if p.code != "CK210"] == [str(p) for p in before.problems if p.code != "CK210"]
    for role, change in (("trained", lambda value: value), ("ema", halved)):
        ckptools.open(folder, all_ranks=True, model=role if role == "ema" else None).consolidate(
            tmp_path / "o.safetensors", only="model", keep_names=True, force=True
        )
        found = load_file(tmp_path / "o.safetensors")
        assert found and found.keys() <= whole.keys()
        assert all(torch.equal(found[key], change(whole[key])) for key in found)
