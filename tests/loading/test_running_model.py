"""`load` finds what the running model and its optimizer name in their own way, and refuses what has two readings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import ckptools
from ckptools.errors import RefusedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """A model whose head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.up = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.up(self.emb(tokens))))
        return out


class Holder(nn.Module):
    """What a Lightning module is: the model is an attribute of it."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, Net())


def adamw(model: nn.Module, decays: Sequence[float] = (0.1, 0.0)) -> torch.optim.AdamW:
    """Parameters with two dimensions are in the first group, all others in the last one."""
    groups: list[list[nn.Parameter]] = [[] for _ in decays]
    for param in model.parameters():
        groups[0 if param.ndim > 1 else -1].append(param)
    made = [{"params": params, "weight_decay": decay} for params, decay in zip(groups, decays, strict=True)]
    return torch.optim.AdamW(made, lr=0.01)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Net, torch.optim.Optimizer]:
    """A file of a model and its optimizer after a step, and both."""
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model)
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    torch.save({**state, "step": 1}, tmp_path / "run.pt")
    return tmp_path / "run.pt", model, optimizer


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_loaded(model: nn.Module, optimizer: torch.optim.Optimizer, was: Net, optimizer_was: torch.optim.Optimizer):
    for here, there in zip(model.parameters(), was.parameters(), strict=True):
        assert same(here, there)
        for name, value in optimizer_was.state[there].items():
            assert same(optimizer.state[here][name], value), name


def test_a_model_and_its_optimizer_stand_in_a_module_that_the_checkpoint_does_not_have(saved):
    path, was, optimizer_was = saved
    holder = Holder("net")
    optimizer = adamw(holder, (0.5, 0.5))
    ckptools.load(holder, path, optimizer)
    assert_loaded(holder.net, optimizer, was, optimizer_was)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_a_compiled_model_and_its_optimizer_are_loaded(saved):
    path, was, optimizer_was = saved
    model = torch.compile(Net())
    optimizer = adamw(model)
    ckptools.load(model, path, optimizer)
    assert_loaded(model, optimizer, was, optimizer_was)


def test_two_models_do_not_get_the_weights_of_one(saved):
    with pytest.raises(RefusedError, match=r"model is asked for under model\.one and model\.two"):
        ckptools.load(Holder("one", "two"), saved[0])


@pytest.mark.parametrize("word", ["ema", "teacher"])
def test_an_average_does_not_get_the_moments_of_the_trained_model(saved, word):
    with pytest.raises(RefusedError, match=rf"lacks 6 keys: model\.{word}\.emb\.weight"):
        ckptools.load(holder := Holder(word), saved[0], adamw(holder))


def test_a_new_module_with_names_of_the_model_is_missing(saved):
    model = Net()
    model.added = Holder()
    model.added.norm = nn.LayerNorm(4)
    with pytest.raises(RefusedError, match=r"lacks 2 keys: model\.added\.norm\.bias, model\.added\.norm\.weight"):
        ckptools.load(model, saved[0])


def test_a_parameter_that_the_saved_optimizer_did_not_train_is_named(saved):
    path = saved[0]
    state = torch.load(path)
    del state["optimizer"]["state"]["up.weight"]
    state["optimizer"]["param_groups"][0]["params"].remove("up.weight")
    torch.save(state, path)
    model = Net()
    model.up.weight.requires_grad_(False)
    with pytest.raises(RefusedError, match=r"\.pt: the optimizer here has 1 more parameter: up\.weight$"):
        ckptools.load(model, path, adamw(model))


def test_one_group_here_of_parameters_that_were_saved_with_other_hyperparameters_is_refused(saved):
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    text = r"emb\.weight and up\.bias were saved with different weight_decay, and are in one param group here \(group 0"
    with pytest.raises(RefusedError, match=text):
        ckptools.load(model, saved[0], torch.optim.AdamW(model.parameters()))
    assert all(same(value, before[name]) for name, value in model.state_dict().items())


def test_more_groups_than_were_saved_get_the_hyperparameters_of_their_parameters(saved):
    path, was, optimizer_was = saved
    model = Net()
    groups = [{"params": [param]} for param in model.parameters()]
    optimizer = torch.optim.AdamW(groups)
    ckptools.load(model, path, optimizer)
    assert_loaded(model, optimizer, was, optimizer_was)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0, 0.0, 0.0]


def test_parameters_that_are_tied_on_the_meta_device_stay_tied(saved):
    with torch.device("meta"):
        model = Net()
    ckptools.load(model, saved[0])
    assert model.head.weight is model.emb.weight and len(list(model.parameters())) == 5
    assert all(same(here, there) for here, there in zip(model.parameters(), saved[1].parameters(), strict=True))
