"""Whole modules that `torch.save(model)` pickled: their state dicts, as torch itself gives them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import ReadError
from ckptools.model.tree import Opaque
from ckptools.training_state import modules
from ckptools.training_state.optimizers import AS_SAVED, CONFIRMED, believed


class Block(nn.Module):
    """A module with everything that a state dict leaves out or names twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.norms = nn.ModuleList([nn.BatchNorm1d(3), nn.LayerNorm(3)])
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.norms[0]
        self.scales = nn.ParameterDict({"up": nn.Parameter(torch.ones(2), requires_grad=False)})
        self.none = nn.Identity()
        self.register_parameter("bias", None)
        self.register_buffer("steps", torch.arange(4))
        self.register_buffer("cache", torch.zeros(9), persistent=False)
        self.names = {0: "cat", 1: "dog"}
        self.anchors = torch.arange(3.0)


MODULES = {
    "every kind of entry": Block,
    "a transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "a recurrent net": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
    "spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 2)), nn.ReLU()),
    "half precision": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).half(),
    "on no device": lambda: nn.Linear(3, 2, device="meta"),
    "a parallel wrapper": lambda: nn.DataParallel(nn.Linear(3, 2)),
}


def save(folder: Path, value: object, **options: object) -> Path:
    torch.save(value, folder / "m.pt", **options)
    return folder / "m.pt"


def same(tensor: ckptools.Tensor, value: torch.Tensor) -> bool:
    if value.is_meta:
        return (tensor.kind, tensor.shape) == ("meta", tuple(value.shape))
    return tensor.load().dtype == value.dtype and torch.equal(tensor.load(), value)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_a_whole_module_is_its_state_dict(tmp_path, make):
    module = make()
    model = ckptools.open(save(tmp_path, module)).model
    assert list(model) == list(module.state_dict())
    assert all(same(model[name], value) for name, value in module.state_dict().items())


def test_the_order_of_a_whole_module_is_known(tmp_path):
    model = ckptools.open(save(tmp_path, Block())).tree
    assert list(model._metadata) == ["", "embed", "norms.0", "norms.1", "head", "again", "scales"]
    assert believed(AS_SAVED, model) == CONFIRMED


def test_a_module_of_before_torch_1_6_is_its_state_dict(tmp_path):
    module = Block()
    model = ckptools.open(save(tmp_path, module, _use_new_zipfile_serialization=False)).model
    assert all(same(model[name], value) for name, value in module.state_dict().items())


def test_modules_beside_an_optimizer_are_models(tmp_path):
    model, ema = Block(), Block().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = argparse.Namespace(imgsz=640)
    path = save(tmp_path, {"epoch": 3, "model": model, "ema": ema, "optimizer": optimizer.state_dict(), "args": args})
    ck = ckptools.open(path)
    assert [(s.kind, s.name) for s in ck.sections][1:4] == [
        ("model", "model"), ("model", "ema"), ("optimizer", "optimizer")
    ]  # fmt: skip
    assert same(ck.tree["ema"]["steps"], ema.steps) and same(ck.tree["ema"]["embed.weight"], ema.embed.weight)
    assert ck.tree["ema"].module.fields["names"] == {0: "cat", 1: "dog"}


def test_a_whole_module_is_consolidated_with_tied_bytes_once(tmp_path):
    module = Block()
    done = CliRunner().invoke(app, ["consolidate", str(save(tmp_path, module)), "-o", str(tmp_path / "out.pt")])
    assert done.exit_code == 0, done.stderr
    again = torch.load(tmp_path / "out.pt")
    assert list(again) == list(module.state_dict())
    assert all(torch.equal(again[name], value) for name, value in module.state_dict().items())
    assert again["head.weight"].data_ptr() == again["embed.weight"].data_ptr()


def test_a_whole_module_is_told_in_one_line(tmp_path):
    done = CliRunner().invoke(app, ["inspect", str(save(tmp_path, {"model": Block(), "ema": Block()}))])
    (line,) = [line for line in done.stdout.splitlines() if "CK303" in line]
    assert "tests.training_state.test_modules.Block at model and 1 more place" in line
    assert "CK301" not in done.stdout


def test_torch_gives_the_same_state_dict(tmp_path):
    path = save(tmp_path, {"model": Block(), "step": 3})
    ours, torchs = (
        json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json", *more]).stdout)
        for more in ((), ("--engine", "torch", "--trust"))
    )
    assert ours["sections"] == torchs["sections"] and ours["problems"] == torchs["problems"]


def test_a_module_among_hyperparameters_is_no_model_beside_a_state_dict(tmp_path):
    state = nn.Linear(3, 2).state_dict()
    extra = {"backbone": nn.Linear(2, 2), "loss": nn.MSELoss()}
    ck = ckptools.open(save(tmp_path, {"state_dict": state, "hyper_parameters": extra}))
    assert list(ck.model) == ["weight", "bias"]
    assert isinstance(ck.tree["hyper_parameters"]["backbone"], Opaque)


def test_modules_deep_in_a_file_are_models_where_nothing_else_is(tmp_path):
    ck = ckptools.open(save(tmp_path, {"nets": {"g": nn.Linear(2, 3), "d": nn.Linear(3, 1)}, "loss": nn.MSELoss()}))
    assert [s.name for s in ck.of_kind("model")] == ["nets.g", "nets.d"]
    assert isinstance(ck.tree["loss"], Opaque)


def forged(**fields: object) -> Opaque:
    module = Opaque("pkg.Module")
    module.state = {"_parameters": {}, "_buffers": {}, "_modules": {}, **fields}
    return module


@pytest.mark.slow
def test_modules_that_unfold_without_end_are_refused():
    shared = forged()
    for _ in range(40):
        shared = forged(_modules={"a": shared, "b": shared})
    with pytest.raises(ValueError, match="unfold"):
        modules.with_modules({"model": shared})


def test_a_module_that_lies_in_itself_is_refused():
    loop = forged()
    loop.state["_modules"]["me"] = loop
    with pytest.raises(ValueError, match="lie inside of themselves"):
        modules.with_modules(loop)


def test_long_names_that_are_repeated_are_refused():
    leaf = forged(_parameters={str(n): 1 for n in range(1000)})
    inner = forged(_modules={str(n): leaf for n in range(100)})
    with pytest.raises(ValueError, match="unfold"):
        modules.with_modules(forged(_modules={"x" * (1 << 16): inner}))


def test_a_refused_module_is_one_line_with_the_file(tmp_path):
    module = nn.Sequential()
    module.add_module("me", module)
    with pytest.raises(ReadError, match=r"m\.pt: its modules unfold"):
        ckptools.open(save(tmp_path, module))


@pytest.mark.parametrize("odd", [{"_buffers": []}, {"_modules": None}, {"_parameters": "x"}])
def test_what_only_looks_like_a_module_stays_a_foreign_object(odd):
    tree = {"model": forged(**odd)}
    assert modules.with_modules(tree)["model"].name == "pkg.Module"


def test_a_module_behind_a_dict_that_stands_twice_is_unfolded(tmp_path):
    shared = {"seed": 1}
    torch.save({"late": {"net": nn.Linear(2, 3)}, "a": shared, "b": shared}, tmp_path / "run.pt")
    tree = ckptools.open(tmp_path / "run.pt").tree
    assert set(tree["late"]["net"]) == {"weight", "bias"}
