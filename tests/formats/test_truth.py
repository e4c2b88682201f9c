"""Every value of every fixture, read through the model, against what the framework itself held."""

from __future__ import annotations

import pytest
import torch

import ckptools
from ckptools import Tensor
from ckptools.errors import ReadError
from ckptools.model.regions import Box
from ckptools.tensor_io import read
from tests.truth import ASKED, LOCAL, OWN_BUFFERS, WHOLE, Known, load_truth


def raw(tensor: Tensor) -> tuple[str, bytes, tuple[int, ...]]:
    whole = tensor.dequantize() if tensor.encoded_as else tensor.load()
    return tensor.dtype, whole.reshape(-1).view(torch.uint8).numpy().tobytes(), tuple(whole.shape)


def values(known: Known) -> dict[str, object]:
    """What ckptools reads, under the truth's names; plain numbers as they are."""
    ck = known.open(all_ranks=True)
    model = {k.removeprefix(known.prefix): v for k, v in ck.model.items()}
    found: dict[str, object] = {f"{kind}/{k}": v for k, v in model.items() for kind in ("model", "buffer")}
    states = [o.state for o in ck.optimizers.values()] or [ck.raw.get("optim", {}).get("state", {})]
    for fqn, slots in ((fqn, slots) for state in states for fqn, slots in state.items()):
        # Megatron's distributed optimizer calls its master copies `param`.
        named = {"fp32_param" if slot == "param" else slot: v for slot, v in slots.items()}
        found |= {f"optim/{str(fqn).removeprefix(known.prefix)}/{slot}": v for slot, v in named.items()}
    return found


def same(value: object, dtype: str, data: bytes, shape: tuple[int, ...]) -> bool:
    if isinstance(value, Tensor):
        return raw(value) == (dtype, data, shape)
    return value == int.from_bytes(data, "little", signed=True)


@pytest.mark.parametrize("known", (*WHOLE, *LOCAL, *OWN_BUFFERS, *ASKED), ids=lambda k: k.name)
def test_every_value_equals_the_truth_bit_for_bit(known):
    found = values(known)
    truth = {k: v for k, v in load_truth(known.name).items() if not k.startswith(known.absent or "-")}
    assert [k for k, v in truth.items() if not same(found.get(k), *v)] == []
    assert len(truth) > 6


@pytest.mark.slow
@pytest.mark.parametrize("known", (*WHOLE, *LOCAL, *OWN_BUFFERS, *ASKED), ids=lambda k: k.name)
def test_world_size_and_step_come_from_the_content(known):
    ck = known.open()
    assert (ck.world_size.value, ck.step.value) == (known.world_size, known.step)
    differing = known in OWN_BUFFERS or "prefer_rank" in known.written_with
    assert (ck.whole, [p.code for p in ck.problems if p.severity == "error"]) == (
        (False, ["CK105"]) if differing else (True, [])
    )


@pytest.mark.slow
@pytest.mark.parametrize("known", (*WHOLE[:11], *LOCAL), ids=lambda k: k.name)
def test_a_tensor_of_one_rank_finds_the_others_when_it_is_loaded(known):
    one, every = known.open(), known.open(all_ranks=True)
    fqn = next(k for k, t in one.model.items() if t.sharded and (t.unread or one.all_ranks))
    assert raw(one.model[fqn]) == raw(every.model[fqn])


@pytest.mark.parametrize("known", LOCAL, ids=lambda k: k.name)
def test_flat_parameters_without_shapes_are_shown_and_not_put_together(known):
    ck = ckptools.open(known.file, all_ranks=True)
    assert any(p.code == "CK106" and "flattened parameter" in p.message for p in ck.problems)
    flat = next(t for k, t in ck.model.items() if k.endswith("_flat_param"))
    with pytest.raises(ReadError, match="give them with shapes "):
        read.read_box(flat, Box.whole(flat.shape))
