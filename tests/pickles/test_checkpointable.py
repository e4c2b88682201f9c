"""CheckpointableTensor: pieces of a global tensor by the attributes of a plain one, and attributes that are wrong."""

from __future__ import annotations

import pytest
import torch

import ckptools
from ckptools.errors import NotWholeError, ReadError
from ckptools.pickles import reader
from ckptools.tensor_io.read import load
from tests.other_classes import with_pieces


def saved(folder, *values):
    """A file for each rank."""
    for rank, value in enumerate(values):
        torch.save({"w": value}, folder / f"rank{rank}.pt")
    return folder / "rank0.pt"


def test_pieces_lie_where_their_attributes_say(tmp_path):
    whole = torch.randn(7, 6)
    left = with_pieces(whole[:, :2].clone(), (7, 6), ((0, 0), (0, 0), (7, 2)))
    right = with_pieces(whole[:, 2:].clone(), (7, 6), ((0, 2), (0, 0), (7, 4)))
    tensor = ckptools.open(saved(tmp_path, left, right), all_ranks=True).model["w"]
    assert (tensor.kind, tensor.shape, tensor.sharded) == ("checkpointable", (7, 6), True)
    assert torch.equal(tensor.load(), whole)
    assert torch.equal(tensor.load(rank=1), whole[:, 2:])


def test_a_rank_may_hold_several_pieces_and_padding_behind_them(tmp_path):
    whole = torch.arange(30.0).reshape(10, 3)
    first = torch.cat([whole[:2], whole[6:9], torch.full((3, 3), 99.0)])
    second = torch.cat([whole[2:6], whole[9:]])
    one = with_pieces(first, (10, 3), ((0, 0), (0, 0), (2, 3)), ((6, 0), (2, 0), (3, 3)))
    other = with_pieces(second, (10, 3), ((2, 0), (0, 0), (4, 3)), ((9, 0), (4, 0), (1, 3)))
    assert torch.equal(ckptools.open(saved(tmp_path, one, other), all_ranks=True).model["w"].load(), whole)


def test_ranks_that_hold_one_region_are_replicas(tmp_path):
    whole = torch.arange(8.0)
    halves = [with_pieces(whole[a : a + 4].clone(), (8,), ((a,), (0,), (4,))) for a in (0, 4, 0, 4)]
    tensor = ckptools.open(saved(tmp_path, *halves), all_ranks=True).model["w"]
    assert [s.rank for s in tensor.shards] == [0, 1, 2, 3]
    assert torch.equal(tensor.load(), whole)


def test_a_parameter_has_attributes_too(tmp_path):
    parameter = with_pieces(torch.nn.Parameter(torch.ones(2, 3)), (4, 3), ((2, 0), (0, 0), (2, 3)))
    tensor = reader.read(saved(tmp_path, parameter)).tree["w"]
    assert (tensor.kind, tensor.parameter, tensor.requires_grad) == ("checkpointable", True, True)
    assert [str(s.box) for s in tensor.shards] == ["[2:4, 0:3]"]


def test_a_rank_may_hold_nothing(tmp_path):
    whole = torch.arange(6.0)
    full, empty = with_pieces(whole.clone(), (6,), ((0,), (0,), (6,))), with_pieces(torch.zeros(3), (6,))
    nothing = with_pieces(torch.zeros(0), (6,), ((6,), (0,), (0,)))
    tensor = ckptools.open(saved(tmp_path, full, empty, nothing), all_ranks=True).model["w"]
    assert torch.equal(tensor.load(), whole) and {s.rank for s in tensor.shards} == {0}


def test_the_pieces_of_a_rank_that_is_gone_are_missing(tmp_path):
    pieces = [with_pieces(torch.ones(3, 2), (9, 2), ((a, 0), (0, 0), (3, 2))) for a in (0, 3, 6)]
    path = saved(tmp_path, *pieces)
    (tmp_path / "rank2.pt").unlink()
    tensor = ckptools.open(path, all_ranks=True).model["w"]
    with pytest.raises(NotWholeError, match=r"6 of its 18 elements: \[6:9, 0:2\]"):
        tensor.load()


def test_other_ranks_pieces_are_found_when_one_is_loaded(tmp_path):
    whole = torch.randn(6, 2)
    pieces = [with_pieces(whole[a : a + 2].clone(), (6, 2), ((a, 0), (0, 0), (2, 2))) for a in (0, 2, 4)]
    assert torch.equal(ckptools.open(saved(tmp_path, *pieces)).model["w"].load(), whole)


@pytest.mark.parametrize(
    "attributes",
    [
        ((4, 3), (((3, 0),), ((0, 0),), ((2, 3),))),
        ((4, 3), (((0, 0),), ((1, 0),), ((2, 3),))),
        ((4, 3), (((0,),), ((0, 0),), ((2, 3),))),
        ((4, 3), (((0, 0), (2, 0)), ((0, 0),), ((2, 3),))),
        ((4, 3), (((-1, 0),), ((0, 0),), ((2, 3),))),
        ((4, 3), (((0.5, 0),), ((0, 0),), ((2, 3),))),
        ("4, 3", (((0, 0),), ((0, 0),), ((2, 3),))),
        (12, (0, 0, 2)),
    ],
    ids=str,
)
def test_attributes_that_contradict_each_other_place_nothing(tmp_path, attributes):
    tensor = torch.ones(2, 3)
    names = ("global_offsets", "local_offsets", "local_sizes")
    tensor.__dict__.update(global_shape=attributes[0], **dict(zip(names, attributes[1], strict=True)))
    found = reader.read(saved(tmp_path, tensor)).tree["w"]
    assert found.kind == "unreadable" and "contradict each other" in found.note
    with pytest.raises(ReadError, match="contradict"):
        load(found)


def test_a_tensor_with_other_attributes_stays_what_it_is(tmp_path):
    tensor = torch.ones(2, 3)
    tensor.global_shape, tensor.owner = (2, 3), "me"
    found = reader.read(saved(tmp_path, tensor)).tree["w"]
    assert (found.kind, found.note) == ("plain", "")
