"""Forms of stored weights: each is undone by its own inverse, and agrees with torch's operations on whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptools.formats.open import open_checkpoint
from ckptools.keys import layouts
from ckptools.keys.layouts import LAYOUTS, MEGATRON, Form, Sizes, UnfitError, recognise
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.read import load
from tests.truth import FIXTURES

FORMS = {name: form for name, form in vars(layouts).items() if isinstance(form, Form)}
SIZES = Sizes(heads=6, groups=3, experts=4)


def sharded(values: torch.Tensor, folder: Path, cuts: Sequence[int]) -> Tensor:
    """A float32 tensor on disk, cut into shards of rows at some places, in a file each."""
    ends = [0, *sorted({cut for cut in cuts if 0 < cut < values.shape[0]}), values.shape[0]]
    shards = []
    for low, end in pairwise(ends):
        path, part = folder / f"{low}.bin", values[low:end].contiguous()
        path.write_bytes(part.numpy().tobytes())
        shape = tuple(part.shape)
        source = Source(path, 0, "float32", shape, contiguous_strides(shape), "r", (0, part.numel() * 4))
        shards.append(Shard(Box((low, *(0 for _ in shape[1:])), shape), low, source))
    return Tensor(tuple(values.shape), "float32", tuple(shards))


def stored(form: Form, width: int, unit: int) -> torch.Tensor:
    """A tensor that a form fits, of values that are all different."""
    rows = {layouts._grouped: 12, layouts._queries_keys_values: 12, layouts._halves: 2}.get(form.blocks, 36) * unit
    shape = (width, rows) if form.turned else (rows, width)
    shape = (SIZES.experts, *shape) if form.experts else shape
    return torch.arange(float(np.prod(shape))).reshape(shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_parts_of_a_sharded_tensor_make_it_again(name, data, tmp_path_factory):
    form, whole = FORMS[name], stored(FORMS[name], data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)))
    cuts = data.draw(st.lists(st.integers(1, max(1, whole.shape[0] - 1)), max_size=5))
    tensor = sharded(whole, tmp_path_factory.mktemp("shards"), cuts)
    again = form.join(form.split(tensor, SIZES), SIZES)
    assert torch.equal(load(again), whole)


def parts(name: str, whole: torch.Tensor, tmp_path: Path, cuts: Sequence[int] = (5,)) -> list[torch.Tensor]:
    return [load(part) for part in FORMS[name].split(sharded(whole, tmp_path, cuts), SIZES)]


def test_megatron_has_queries_key_and_value_of_each_group_together(tmp_path):
    whole = torch.arange(12 * 2 * 3.0).reshape(24, 3)
    groups = whole.view(3, 4, 2, 3)  # two queries, a key and a value of two rows each
    q, k, v = parts("GROUPED_QKV", whole, tmp_path)
    assert torch.equal(q, groups[:, :2].reshape(12, 3))
    assert torch.equal(k, groups[:, 2].reshape(6, 3)) and torch.equal(v, groups[:, 3].reshape(6, 3))


def test_gpt2_has_queries_keys_and_values_as_columns(tmp_path):
    whole = torch.arange(4 * 24.0).reshape(4, 24)
    q, k, v = parts("TURNED_QKV", whole, tmp_path, (1, 3))
    expected = whole.t().split([12, 6, 6])
    assert all(map(torch.equal, (q, k, v), expected))


def test_experts_in_one_tensor_have_gates_above_ups(tmp_path):
    whole = torch.arange(4 * 6 * 2.0).reshape(4, 6, 2)
    found = parts("EXPERTS_GATE_UP", whole, tmp_path, (1, 3))
    assert all(torch.equal(part, half) for part, half in zip(found, whole.reshape(8, 3, 2), strict=True))


def test_rotary_pairs_become_halves_as_transformers_permutes_them(tmp_path):
    whole = torch.arange(36 * 2.0).reshape(36, 2)
    (found,) = parts("PAIRED_QUERIES", whole, tmp_path, (1, 2, 17))
    assert torch.equal(found, whole.view(6, 3, 2, 2).transpose(1, 2).reshape(36, 2))


@pytest.mark.parametrize("name", ["FUSED_QKV", "GROUPED_QKV", "GATE_UP", "PAIRED_KEYS", "EXPERTS"])
def test_a_shape_that_cannot_be_divided_is_refused(name, tmp_path):
    with pytest.raises(UnfitError):
        parts(name, torch.zeros(7, 3), tmp_path)


def test_parts_of_other_widths_are_not_joined(tmp_path):
    gate, up = (sharded(torch.zeros(2, width), tmp_path, ()) for width in (3, 4))
    with pytest.raises(UnfitError, match="cannot be joined"):
        layouts.GATE_UP.join([gate, up], SIZES)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_name_of_a_layout_is_recognised_behind_wrappers(layout):
    names = [s.name.replace("{}", "11").replace("{e}", "3") for s in layout.stored]
    found = recognise([f"module._orig_mod.{name}" for name in names], SIZES, [layout])
    assert (len(found.placed), found.prefix) == (len(names), "")


def test_a_number_with_a_zero_in_front_is_none(tmp_path):
    found = recognise(["model.layers.01.input_layernorm.weight"], SIZES)
    assert not found.placed


@pytest.mark.parametrize(
    "path", ["megatron-tp2pp2-fp32/ckpt", "megatron-tp2pp2-fp32/legacy", "megatron-tp2dp2-distopt/ckpt"]
)
def test_every_name_that_megatron_itself_wrote_is_recognised(path):
    model = open_checkpoint(FIXTURES / path, all_ranks=True).tree["model"]
    names = [name for name, value in model.items() if isinstance(value, Tensor)]
    found = recognise(names, SIZES)
    assert (found.layout, {*found.placed, *found.recomputed}) == (MEGATRON, {*names}) and len(names) >= 20
