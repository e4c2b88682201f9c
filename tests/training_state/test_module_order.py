"""Whether a state dict has the order of its module, told by the list of modules that torch puts on it."""

from __future__ import annotations

import io
from collections import OrderedDict

import pytest
import torch
from torch import nn

import ckptools
from ckptools.model.facts import ModuleOrder
from ckptools.model.tensor import Tensor
from ckptools.training_state.optimizers import AS_SAVED, believed, model_for_names
from tests.state_dicts import state_dict
from tests.truth import WHOLE

W = Tensor((2, 2), "float32", ())
B = Tensor((2,), "float32", ())


class Model(nn.Module):
    """A parameter of its own, a nested block, norms with weight and bias of one shape, a tied head, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(12)))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(4))


def described(values: OrderedDict[str, torch.Tensor]) -> OrderedDict[str, Tensor]:
    found = OrderedDict((k, Tensor(tuple(v.shape), "float32", ())) for k, v in values.items())
    if hasattr(values, "_metadata"):
        found._metadata = values._metadata  # type: ignore[attr-defined]
    return found


def order(values: OrderedDict[str, torch.Tensor]) -> ModuleOrder:
    return believed(AS_SAVED, described(values))


def test_what_a_module_gives_is_believed_also_from_a_file_and_under_ddp():
    assert order(Model().state_dict()).kept
    assert order(nn.ModuleDict({"module": Model()}).state_dict()).kept
    file = io.BytesIO()
    torch.save(Model().state_dict(), file)
    file.seek(0)
    assert order(torch.load(file)).kept


@pytest.mark.parametrize(
    "rebuilt",
    [dict, OrderedDict, lambda d: {k: v.cpu() for k, v in d.items()}],
    ids=["dict", "OrderedDict", "comprehension"],
)
def test_a_dict_that_was_built_anew_says_nothing_of_its_order(rebuilt):
    found = order(rebuilt(Model().state_dict()))
    assert not found.kept and "_metadata" in found.why


def test_names_that_were_sorted_under_the_same_list_of_modules_contradict_it():
    values = Model().state_dict()
    for name in sorted(values):
        values.move_to_end(name)
    assert not order(values).kept


def test_a_bias_before_its_weight_is_believed_only_where_their_shapes_tell_them_apart():
    assert not believed(AS_SAVED, state_dict({"n.bias": B, "n.weight": B})).kept
    assert believed(AS_SAVED, state_dict({"n.bias": B, "n.weight": W})).kept


def test_a_name_in_no_listed_module_makes_the_order_doubtful():
    values = state_dict({"a.w": W})
    values["b.w"] = W
    assert "b.w" in believed(AS_SAVED, values).why


def test_wrappers_are_no_modules():
    values = OrderedDict({"a.w": W, "b.w": W})
    names = ("", "_fsdp_wrapped_module", "_fsdp_wrapped_module.a", "_fsdp_wrapped_module.b._orig_mod")
    values._metadata = OrderedDict.fromkeys(names)  # type: ignore[attr-defined]
    assert believed(AS_SAVED, values).kept


@pytest.mark.parametrize("odd", [3, "a", [""], {}, {1: 2}], ids=repr)
def test_a_list_of_modules_that_is_none_is_not_believed(odd):
    values = OrderedDict({"a.w": W})
    values._metadata = odd  # type: ignore[attr-defined]
    assert not believed(AS_SAVED, values).kept


@pytest.mark.slow
@pytest.mark.parametrize("known", WHOLE, ids=lambda k: k.name)
def test_every_format_states_its_order_and_why(known):
    stated = known.open().module_order
    assert isinstance(stated, ModuleOrder) and len(stated.why) > 20


def test_an_average_of_the_weights_beside_the_model_leaves_its_names_to_the_model():
    own, average = state_dict({"a.w": W, "b.w": W, "b.running_mean": B}), {"b.w": W, "a.w": W}
    assert model_for_names([average, own], AS_SAVED) is own
    assert model_for_names([dict(own), own], AS_SAVED) is own


@pytest.mark.parametrize("other", [{"c.w": W}, {"a.w": B}], ids=["another name", "another shape"])
def test_of_two_models_that_are_no_copies_none_names_an_optimizer(other):
    assert model_for_names([state_dict({"a.w": W, "b.w": W}), other], AS_SAVED) is None
    assert model_for_names([], AS_SAVED) is None


def test_an_optimizer_beside_a_model_and_its_average_is_named(tmp_path):
    net = Model()
    optimizer = torch.optim.AdamW(net.parameters())
    sum(p.sum() for p in net.parameters()).backward()
    optimizer.step()
    average = {k: v.clone() for k, v in net.state_dict().items()}
    torch.save({"ema": average, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    state = ckptools.open(tmp_path / "both.pt").optimizers["optimizer"].state
    for name, parameter in net.named_parameters():
        assert torch.equal(state[name]["exp_avg"].load(), optimizer.state[parameter]["exp_avg"])


def test_models_with_the_same_names_in_other_orders_name_no_numbers(tmp_path):
    layers = {name: nn.Linear(4, 4, bias=False) for name in "ab"}
    one, other = nn.ModuleDict(layers), nn.ModuleDict(dict(reversed(layers.items())))
    optimizer = torch.optim.AdamW(other.parameters())
    other["b"](other["a"](torch.ones(4))).sum().backward()
    optimizer.step()
    saved = {"model": one.state_dict(), "model_1": other.state_dict(), "optimizer_1": optimizer.state_dict()}
    torch.save(saved, tmp_path / "two.pt")
    naming = ckptools.open(tmp_path / "two.pt").optimizers["optimizer_1"].naming
    assert (naming.names, naming.unnamed) == ({}, (0, 1))
