"""`dcp.load` fills a state dict from a checkpoint of any format, bit for bit."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptools
from ckptools.model.tensor import Tensor
from tests.consolidate.test_outputs import raw
from tests.truth import ASKED, LOCAL, OWN_BUFFERS, WHOLE, Known

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NEEDS_NAMES = ("lightning-trainer-ddp",)
"""An optimizer with numbers for which the file has no names."""

NO_STATES = ("torchrec-w3",)
"""Its optimizer's states are in no param group."""


def empty(value: Any) -> Any:
    """A value to be filled: a tensor of ones, or None."""
    return torch.ones(value.shape, dtype=getattr(torch, value.dtype)) if isinstance(value, Tensor) else None


def wanted_of(ck: ckptools.Checkpoint, with_optimizer: bool) -> dict[str, Any]:
    """An empty state dict as torch's state_dict API has it for the model and the one optimizer of a checkpoint."""
    state: dict[str, Any] = {"model": {name: empty(value) for name, value in ck.model.items()}}
    for optimizer in ck.optimizers.values() if with_optimizer else ():
        groups = [
            {**{name: empty(value) for name, value in group.items()}, "params": list(group.names)}
            for group in optimizer.param_groups
            if group.names  # Megatron's do not say which parameters they have
        ]
        states = {str(fqn): {n: empty(v) for n, v in own.items()} for fqn, own in optimizer.state.items()}
        state["optimizer"] = {"state": states} | ({"param_groups": groups} if groups else {})
    return state


def test_each_fixture_has_a_case():
    assert {known.label for known in WHOLE} > {*NEEDS_NAMES, *NO_STATES}


@pytest.mark.parametrize("known", [*WHOLE, *LOCAL, *OWN_BUFFERS, *ASKED], ids=lambda known: known.label)
def test_every_value_is_that_of_the_checkpoint(known: Known):
    given = {name: value for name, value in known.options.items() if value is not None} | dict(known.written_with)
    if known in OWN_BUFFERS:
        given["prefer_rank"] = 0
    ck = known.open(all_ranks=True)
    ck = ck.dequantized() if given.get("dequantize") else ck
    state = wanted_of(ck, len(ck.optimizers) == 1 and known.label not in NEEDS_NAMES)
    reader = ckptools.StorageReader(known.file, **given)
    dcp.load(state, storage_reader=reader)
    for name, value in ck.model.items():
        if isinstance(value, Tensor):
            assert raw(state["model"][name]) == raw(value.load()), name
    for fqn, own in next(iter(ck.optimizers.values())).state.items() if "optimizer" in state else ():
        for name, value in own.items():
            loaded = state["optimizer"]["state"][str(fqn)][name]
            assert raw(loaded) == raw(value.load()) if isinstance(value, Tensor) else loaded == value, (fqn, name)
    assert reader.step == known.step
    assert pickle.loads(pickle.dumps(reader.state)) == reader.state  # as rank 0 tells it to the others
    assert reader.checksums is not None and not reader.checksums.damaged
    assert reader.checksums.right == reader.checksums.of
    assert reader.bytes_read <= 1.1 * reader.bytes_kept or known in ASKED
