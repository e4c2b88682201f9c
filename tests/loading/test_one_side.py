"""Names that only the model or only the checkpoint has: refused, or kept when that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ckptools
from ckptools.errors import RefusedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """Two layers and the output, whose weight is that of the first or its own."""

    def __init__(self, layers: int = 2, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def saved(folder: Path, model: nn.Module, *without: str) -> Path:
    state = {name: value for name, value in model.state_dict().items() if name not in without}
    torch.save({"model": state, "step": 3}, folder / "saved.pt")
    return folder / "saved.pt"


def test_a_name_that_the_checkpoint_lacks_is_refused_and_keeps_its_value_when_asked(tmp_path: Path) -> None:
    one, other = Net(2), Net(3)
    path, own = saved(tmp_path, one), other.layers[2].weight.clone()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(RefusedError, match=r"lacks 2 keys: model\.layers\.2\.bias, model\.layers\.2\.weight"):
        ckptools.load(other, path)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    loaded = ckptools.load(other, path, strict=False)
    assert loaded.kept == ("model.layers.2.weight", "model.layers.2.bias")
    assert torch.equal(other.layers[2].weight, own) and torch.equal(other.layers[1].weight, one.layers[1].weight)


def test_a_name_that_the_model_lacks_is_refused_and_told_when_it_is_left(tmp_path: Path) -> None:
    one, other = Net(3), Net(2)
    path = saved(tmp_path, one)
    with pytest.raises(RefusedError, match=r"has 2 keys: model\.layers\.2\.weight, .* that nothing here asks for"):
        ckptools.load(other, path)
    loaded = ckptools.load(other, path, strict=False)
    assert loaded.not_loaded == ("model.layers.2.weight", "model.layers.2.bias", "step")
    assert torch.equal(other.emb.weight, one.emb.weight)


def test_dcp_load_keeps_what_the_checkpoint_lacks_when_asked(tmp_path: Path) -> None:
    one, other = Net(2), Net(3)
    own, state = other.layers[2].weight.clone(), {"model": other.state_dict(), "epoch": 7}
    reader = ckptools.StorageReader(saved(tmp_path, one), strict=False)
    dcp.load(state, storage_reader=reader)
    assert set(reader.kept) == {"model.layers.2.weight", "model.layers.2.bias", "epoch"}
    assert torch.equal(other.layers[2].weight, own) and state["epoch"] == 7
    assert torch.equal(other.emb.weight, one.emb.weight)


@pytest.mark.parametrize("gone", ["head.weight", "emb.weight"])
def test_of_a_tied_tensor_one_name_is_enough(gone: str, tmp_path: Path) -> None:
    one, other = Net(), Net()
    assert ckptools.load(other, saved(tmp_path, one, gone)).kept == ()
    assert torch.equal(other.head.weight, one.emb.weight) and other.head.weight is other.emb.weight


def test_two_tensors_of_equal_values_are_not_tied(tmp_path: Path) -> None:
    other = Net(tied=False)
    with torch.no_grad():
        other.head.weight.copy_(other.emb.weight)
    with pytest.raises(RefusedError, match=r"lacks 1 key: model\.head\.weight"):
        ckptools.load(other, saved(tmp_path, Net(), "head.weight"))


def test_tied_weights_of_a_model_on_the_meta_device_stay_tied(tmp_path: Path) -> None:
    one = Net()
    with torch.device("meta"):
        other = Net()
    for net in (one, other):
        net.register_buffer("scale", torch.ones(2, device=net.emb.weight.device))
        net.head.register_buffer("scale", net.scale)
    ckptools.load(other, saved(tmp_path, one))
    assert other.head.weight is other.emb.weight and torch.equal(other.emb.weight, one.emb.weight)
    assert other.head.scale is other.scale and not torch.__future__.get_swap_module_params_on_conversion()


class Trained(nn.Module):
    """A model below the name `model`, as a LightningModule has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def optimizer_of(model: nn.Module, lr: float, first: int) -> torch.optim.Optimizer:
    """Two groups, of which one has no decay: biases, or all other parameters."""
    parts = [[p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False)]
    groups = [{"params": parts[n], "weight_decay": (0.1, 0.0)[n]} for n in (first, 1 - first)]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("around", [True, False], ids=["with the module around", "without it"])
@pytest.mark.parametrize("flat", [True, False])
def test_groups_in_another_order_get_their_own_hyperparameters_in_dcp_load(
    flat: bool, around: bool, tmp_path: Path
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    one, other = Trained(Net()), Net()
    saving = optimizer_of(one, 0.5, first=1)
    state = {"model": one.state_dict(), "optim": get_optimizer_state_dict(one, saving, options=options)}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    into = Trained(other) if around else other
    running = optimizer_of(other, 0.1, first=0)
    wanted = {"model": into.state_dict(), "optimizer": get_optimizer_state_dict(into, running)}
    dcp.load(wanted, storage_reader=ckptools.StorageReader(tmp_path / "saved"))
    set_optimizer_state_dict(into, running, wanted["optimizer"])
    assert [(group["weight_decay"], group["lr"]) for group in running.param_groups] == [(0.1, 0.5), (0.0, 0.5)]
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(saving.state[a]["exp_avg"], running.state[b]["exp_avg"])


@pytest.mark.parametrize("around", ["", "model."])
def test_an_optimizer_by_number_is_named_by_the_running_one(around: str, tmp_path: Path) -> None:
    one, other = Net(), Net()
    saving, running = optimizer_of(one, 0.5, first=0), optimizer_of(other, 0.1, first=0)
    # Sorted, so that nothing says in which order the optimizer has its parameters: two layers have one shape.
    model = {f"{around}{name}": value for name, value in sorted(one.state_dict().items())}
    torch.save({"state_dict": model, "optimizer_states": [saving.state_dict()], "epoch": 1}, tmp_path / "saved.ckpt")
    loaded = ckptools.load(other, tmp_path / "saved.ckpt", running)
    assert loaded.kept == () and running.param_groups[0]["lr"] == 0.5
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(saving.state[a]["exp_avg"], running.state[b]["exp_avg"])


def test_an_optimizer_by_number_in_other_groups_is_refused(tmp_path: Path) -> None:
    one, other = Net(), Net()
    model = dict(sorted(one.state_dict().items()))
    saving = optimizer_of(one, 0.5, first=0)
    torch.save({"state_dict": model, "optimizer_states": [saving.state_dict()], "epoch": 1}, tmp_path / "saved.ckpt")
    with pytest.raises(RefusedError, match="the running optimizer is not the saved one, whose parameters have numbers"):
        ckptools.load(other, tmp_path / "saved.ckpt", torch.optim.AdamW(other.parameters()))
