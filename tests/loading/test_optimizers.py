"""The optimizer of every fixture goes into a running one, whatever framework has saved it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptools
from ckptools.errors import RefusedError
from ckptools.model.tensor import Tensor
from tests.loading.test_boxes import bits
from tests.truth import LOCAL, OWN_BUFFERS, WHOLE, Known, one_of_each_form

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NO_MEMBERS = (
    "megatron-tp2pp2-fp32",
    "megatron-tp2dp2-distopt",
    "megatron-core0.20-ep2dp2-dpr",
    "megatron-core0.16-pp2dp2",
    "megatron-core0.16-pp2dp2-fully",
)
"""Nothing in them says which parameter is in which group."""

LEFT_OUT = {
    "lightning-trainer-ddp": "one of its numbers has no name",
    "megatron-tp2pp2-fp32-legacy": "its model has extra states, which a plain module has not",
    "megatron-ep2dp2-bf16-legacy": "two optimizers",
}

CASES = [known for known in (*WHOLE, *LOCAL, *OWN_BUFFERS) if known.label not in LEFT_OUT]
FIRST = {known.label for known in one_of_each_form(CASES)[::3]}
"""Fixtures of every run of the tests."""


def _param(known: Known) -> object:
    return pytest.param(known, id=known.label, marks=() if known.label in FIRST else pytest.mark.slow)


def module_like(tensors: dict[str, Tensor]) -> nn.Module:
    """Modules in modules whose state dict has these tensors, all of ones."""
    root = nn.Module()
    for name, saved in tensors.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        ones = torch.ones(saved.shape, dtype=getattr(torch, saved.dtype))
        if ones.is_floating_point():
            at.register_parameter(last, nn.Parameter(ones))
        else:
            at.register_buffer(last, ones)
    return root


@pytest.mark.parametrize("known", map(_param, CASES))
def test_model_moments_and_hyperparameters_are_those_of_the_checkpoint(known: Known) -> None:
    given: dict[str, Any] = {name: value for name, value in known.options.items() if value is not None}
    given |= {"prefer_rank": 0} if known in OWN_BUFFERS else {}
    ck = known.open(all_ranks=True)
    model = module_like({name: value for name, value in ck.model.items() if isinstance(value, Tensor)})
    named = dict(model.named_parameters())
    optimizer = next(iter(ck.optimizers.values()), None)
    if optimizer is None:
        ckptools.load(model, known.file, **given)
    elif known.label in NO_MEMBERS:
        running = torch.optim.AdamW([named[name] for name in optimizer.state if name in named])
        with pytest.raises(RefusedError, match=r"its param groups do not list their parameters"):
            ckptools.load(model, known.file, running, **given)
        return
    else:
        groups = [[named[name] for name in group.names if name in named] for group in optimizer.param_groups]
        if optimizer.naming.by == "fqn":
            groups.reverse()  # the groups of parameters are found by their names
        running = torch.optim.AdamW([{"params": group} for group in groups if group], lr=9.0)
        ckptools.load(model, known.file, running, **given)
        for name, slots in optimizer.state.items():
            for slot, value in slots.items() if name in named else ():
                found = running.state[named[str(name)]][slot]
                expected = value.load() if isinstance(value, Tensor) else torch.tensor(value)
                assert torch.equal(found, expected) if found.ndim == 0 else bits(found) == bits(expected), (name, slot)
        lr = {id(parameter): group["lr"] for group in running.param_groups for parameter in group["params"]}
        for group in optimizer.param_groups:
            assert {lr[id(named[name])] for name in group.names if name in named} <= {group["lr"]}
    for name, value in model.state_dict().items():
        saved = ck.model[name]
        assert isinstance(saved, Tensor) and bits(value) == bits(saved.load()), name


def test_of_groups_without_members_only_values_that_all_share_are_given() -> None:
    known = next(known for known in WHOLE if known.label == "megatron-tp2dp2-distopt")
    optimizer = next(iter(known.open(all_ranks=True).optimizers.values()))
    alike = [name for name in optimizer.param_groups[0] if len({repr(g[name]) for g in optimizer.param_groups}) == 1]
    state = {"optimizer": {"param_groups": [{"lr": None, "params": ["mine"]}, {"betas": None, "params": ["other"]}]}}
    assert {"lr", "betas"} <= set(alike) and "wd_mult" not in alike
    reader = ckptools.StorageReader(known.file, strict=False, weights="module")
    dcp.load(state, storage_reader=reader, no_dist=True)
    groups = state["optimizer"]["param_groups"]
    assert groups[0] == {"lr": optimizer.param_groups[0]["lr"], "params": ["mine"]} and groups[1]["params"] == ["other"]
    assert not reader.has("optimizer.param_groups.0.wd_mult")
