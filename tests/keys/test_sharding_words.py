"""How a tensor is sharded, in words: each kind, cut and whole."""

from __future__ import annotations

import pytest

from ckptools.keys.sharding import placement, sharding_rows
from ckptools.model.regions import Box
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from tests.display.made import checkpoint

HALVES = (Box((0, 0), (2, 4)), Box((2, 0), (2, 4)))
COLUMNS = (Box((0, 0), (4, 2)), Box((0, 2), (4, 2)))
QUARTERS = tuple(Box((i, j), (2, 2)) for i in (0, 2) for j in (0, 2))


def tensor(kind, boxes, **more):
    shards = tuple(Shard(box, rank, None) for rank, box in enumerate(boxes))
    return Tensor((4, 4), "float32", shards, kind, **more)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (tensor("tensor_parallel", HALVES), "dim 0 over 2 ranks"),
        (tensor("tensor_parallel", COLUMNS, world_size=4), "dim 1 over 4 ranks"),
        (tensor("tensor_parallel", HALVES[:1]), "dim 0 over 1 rank"),
        (tensor("tensor_parallel", HALVES, note="no rule"), "pieces of 2 ranks, not joined"),
        (tensor("tensor_parallel", HALVES, world_size=8, note="no rule"), "pieces of 8 ranks, not joined"),
        (tensor("sharded_tensor", HALVES, world_size=2), "dim 0 over 2 ranks"),
        (tensor("sharded_tensor", (*HALVES, *HALVES), world_size=4), "dim 0 over groups of 2 of 4 ranks"),
        (tensor("chunks", QUARTERS), "dim 0 and 1 in 4 pieces"),
        (tensor("chunks", [Box.whole((4, 4))]), "dim 0 in 1 piece"),
        (tensor("flat_pieces", []), "pieces of flattened parameters"),
        (tensor("dtensor", HALVES, placements=("Shard(0)",), mesh=(2,)), "Shard(0) on 2 ranks"),
        (tensor("dtensor", HALVES, placements=("Shard(0)",), mesh=(1,)), "Shard(0) on 1 rank"),
        (
            tensor("dtensor", HALVES, placements=("Replicate()", "Shard(0)"), mesh=(2, 2)),
            "(Replicate(), Shard(0)) on 2 x 2 ranks",
        ),
        (tensor("dtensor", HALVES), "() on  ranks"),
        (tensor("plain", HALVES[:1]), "whole"),
        (tensor("meta", ()), "meta"),
        (tensor("sparse", ()), "sparse"),
    ],
)
def test_a_placement_is_in_words(made, words):
    assert placement(made) == words


def test_what_is_sharded_comes_first_however_much_is_whole():
    whole = {name: tensor("plain", HALVES[:1]) for name in "abc"}
    rows = sharding_rows(checkpoint({"model": {**whole, "w": tensor("tensor_parallel", HALVES)}}))
    assert [(row.how, row.tensors) for row in rows] == [("dim 0 over 2 ranks", 1), ("whole", 3)]
