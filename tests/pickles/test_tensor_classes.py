"""Tensors of other classes: wrappers are what they hold, quantized ones are named, others are never read as plain."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptools
from ckptools.errors import ReadError
from ckptools.pickles import reader
from ckptools.pickles.classes.codings import CODINGS
from ckptools.pickles.classes.tensors import WRAPPERS
from ckptools.tensor_io.read import dequantized, load
from tests.fake_world import fake_group
from tests.other_classes import adam_state, of_class
from tests.truth import FIXTURES

FLOAT8 = "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor"


def described(tmp_path, value):
    torch.save({"w": value}, tmp_path / "one.pt")
    return reader.read(tmp_path / "one.pt").tree["w"]


def of_rank(rank, local, shape):
    """A DTensor, cut by rows, as one of two ranks has it."""
    with fake_group(rank, 2):
        whole = {"run_check": False, "shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
        return DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], **whole)


def test_a_wrapper_is_the_tensor_that_it_holds(tmp_path, monkeypatch):
    values = torch.randn(4, 6)
    found = described(tmp_path, of_class(monkeypatch, FLOAT8, (4, 6), torch.float32, _tensor=values))
    assert (found.kind, found.note) == ("plain", "")
    assert torch.equal(load(found), values)


def test_a_wrapper_around_a_tensor_of_another_shape_is_no_wrapper(tmp_path, monkeypatch):
    found = described(tmp_path, of_class(monkeypatch, FLOAT8, (4, 6), torch.float32, _tensor=torch.ones(2, 12)))
    assert found.kind == "unreadable" and FLOAT8 in found.note


def test_a_class_of_the_same_name_from_elsewhere_is_not_trusted_to_be_the_same(tmp_path, monkeypatch):
    name = "mine.OptimState8bit"
    parts = {"codes": torch.zeros(4, 64, dtype=torch.uint8), "scale": torch.ones(1), "qmap": torch.ones(256)}
    found = described(tmp_path, of_class(monkeypatch, name, (4, 64), torch.float32, **parts))
    assert found.kind == "unreadable"
    assert found.note.startswith("a tensor of class mine.OptimState8bit, which holds codes, scale, qmap;")


def test_what_an_unknown_class_holds_is_listed_with_its_place(tmp_path, monkeypatch):
    inside = {"a": torch.ones(3), "rest": {"b": [torch.zeros(2, dtype=torch.uint8)]}}
    found = described(tmp_path, of_class(monkeypatch, "mine.Packed", (4, 6), torch.bfloat16, **inside))
    (shard,) = found.found
    named = [(name, source.dtype, source.shape, source.record) for name, source in shard.encoded.parts]
    assert named == [("a", "float32", (3,), "data/0"), ("rest.b.0", "uint8", (2,), "data/1")]
    with pytest.raises(ReadError, match=r"class mine\.Packed"):
        load(found)


def test_a_class_that_holds_no_tensors_is_named(tmp_path, monkeypatch):
    found = described(tmp_path, of_class(monkeypatch, "mine.Empty", (4, 6), torch.float32, words=["a"]))
    assert (found.kind, found.shards) == ("unreadable", ()) and "class mine.Empty;" in found.note


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": torch.ones(3)},
        {"scale": torch.ones(2, 2)},
        {"scale": torch.ones(4, dtype=torch.float64)},
        {"codes": torch.zeros(4, 256)},
        {"codes": torch.zeros(2, 256, dtype=torch.uint8)},
        {"qmap": torch.ones(255)},
        {"qmap": None},
    ],
    ids=lambda wrong: "-".join(f"{k} {getattr(v, 'dtype', v)} {getattr(v, 'shape', '')}" for k, v in wrong.items()),
)
def test_parts_that_do_not_fit_their_class_are_not_computed_with(tmp_path, monkeypatch, wrong):
    state = adam_state(monkeypatch, (4, 256))
    state.__dict__.update(wrong)
    found = described(tmp_path, state)
    assert found.kind == "unreadable" and "does not know" in found.note
    assert dequantized(found).note == found.note


def test_blocks_that_do_not_divide_a_weight_are_not_computed_with(tmp_path, monkeypatch):
    parts = {"qdata": torch.zeros(6, 8, dtype=torch.int8), "scale": torch.ones(6, 3), "block_size": [1, 3]}
    found = described(
        tmp_path, of_class(monkeypatch, "torchao.quantization.Int8Tensor", (6, 8), torch.float32, **parts)
    )
    assert found.kind == "unreadable"


def test_a_dtensor_of_codes_is_cut_as_one_of_values_is(tmp_path, monkeypatch):
    state = adam_state(monkeypatch, (3, 256))
    found = described(tmp_path, of_rank(0, state, (5, 256)))
    assert (found.kind, found.placements) == ("dtensor", ("Shard(0)",))
    assert [(s.rank, s.box.sizes, s.was_read) for s in found.shards] == [(0, (3, 256), True), (1, (2, 256), False)]
    assert found.note.startswith("quantized as torchao OptimState8bit (codes, scale, qmap)")


def test_a_dtensor_of_an_unknown_class_is_no_gap(tmp_path, monkeypatch):
    local = of_class(monkeypatch, "mine.Packed", (3, 256), torch.float32, inner=torch.ones(3))
    found = described(tmp_path, of_rank(0, local, (5, 256)))
    assert found.kind == "dtensor" and "class mine.Packed" in found.note
    empty = of_class(monkeypatch, "mine.Empty", (3, 256), torch.float32)
    found = described(tmp_path, of_rank(0, empty, (5, 256)))
    assert found.kind == "dtensor" and "class mine.Empty" in found.note


def test_a_dtensor_of_meta_tensors_has_no_shards_to_look_for(tmp_path):
    meta = described(tmp_path, of_rank(0, torch.empty(3, 3, device="meta"), (5, 3)))
    assert (meta.kind, meta.shards) == ("meta", ())


def dequantized_by_torch(state):
    return (state.qmap[state.codes.int()].view(-1, 256) * state.scale.view(-1, 1)).view(state.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_may_hold_small_pieces_as_they_are(tmp_path, monkeypatch, dtype):
    """torchao quantizes pieces of 4096 elements and more; a state says that it has its parameter's dtype."""
    state, small = adam_state(monkeypatch, (3, 256), dtype=dtype), torch.randn(2, 256).to(dtype)
    for rank, local in enumerate((state, small)):
        torch.save({"w": of_rank(rank, local, (5, 256))}, tmp_path / f"rank{rank}.pt")
    tensor = ckptools.open(tmp_path / "rank1.pt", all_ranks=True).model["w"]
    assert torch.equal(load(dequantized(tensor)), torch.cat([dequantized_by_torch(state), small.float()]))


def test_ranks_whose_values_have_several_dtypes_are_not_joined(tmp_path, monkeypatch):
    state, small = adam_state(monkeypatch, (3, 256), dtype=torch.float64), torch.randn(2, 256).double()
    for rank, local in enumerate((state, small)):
        torch.save({"w": of_rank(rank, local, (5, 256))}, tmp_path / f"rank{rank}.pt")
    tensor = ckptools.open(tmp_path / "rank0.pt", all_ranks=True).model["w"]
    assert dequantized(tensor).note == "ranks hold it as values of several dtypes: float32, float64"


def test_the_page_names_the_classes_that_are_known():
    page = (FIXTURES.parent / "docs/consolidate.md").read_text()
    table = page.partition("## Tensors of other classes")[2].partition("| any other")[0]
    others = {"tree", "inspect", "show", "consolidate", "AdamW8bit"}
    assert set(re.findall(r"`(\w+)`", table)) - others == {*WRAPPERS, *CODINGS}
