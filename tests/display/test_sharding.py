from __future__ import annotations

from dataclasses import replace

import ckptools
from ckptools.keys.sharding import ShardingRow, placement, sharding_name, sharding_rows
from ckptools.model.regions import Box
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from tests.display.made import checkpoint, dtensor, plain, sharded
from tests.truth import FIXTURES


def layout_of(*tensors: Tensor, **facts):
    return sharding_rows(checkpoint({"model": {f"w{n}": t for n, t in enumerate(tensors)}}, **facts))


def test_even_rows_are_told_from_uneven_ones():
    assert layout_of(sharded(8, 2, ranks=4)) == (ShardingRow("dim 0 over 4 ranks", 1, True, 0, 0),)
    assert layout_of(sharded(7, 2, ranks=4)) == (ShardingRow("dim 0 over 4 ranks", 1, True, 1, 0),)


def test_a_tensor_that_leaves_ranks_empty_is_counted():
    (layout,) = layout_of(sharded(8, ranks=4), sharded(3, ranks=4), sharded(1, 9, ranks=4))
    assert (layout.tensors, layout.uneven, layout.empty) == (3, 2, 2)
    assert layout.how == "dim 0 over 4 ranks"


def test_ranks_that_every_tensor_leaves_empty_are_no_group():
    assert layout_of(sharded(1, ranks=4)) == (ShardingRow("dim 0 over 4 ranks", 1, True, 1, 1),)


def test_a_group_as_large_as_the_world_is_none():
    (layout,) = layout_of(replace(sharded(8), shards=tuple(s._replace(rank=None) for s in sharded(8).shards)))
    assert layout.how == "dim 0 over 4 ranks"


def test_the_most_frequent_way_comes_first_and_whole_tensors_last():
    found = layout_of(plain(3), plain(3), plain(3), sharded(8, ranks=4))
    assert [one.how for one in found] == ["dim 0 over 4 ranks", "whole"]


def test_what_is_not_cut_is_neither_uneven_nor_empty():
    assert [(one.uneven, one.empty) for one in layout_of(plain(3), plain(0))] == [(0, 0)]


def test_the_models_tensors_are_counted_whether_they_are_sharded_or_whole():
    moments = {"state": {0: {"exp_avg": plain(3)}}, "param_groups": [{"params": [0], "lr": 0.1}]}
    for tensor in (plain(3), sharded(8)):
        (layout,) = sharding_rows(checkpoint({"model": {"w": tensor}, "optim": moments}))
        assert layout.tensors == 1


def test_what_is_sharded_outside_of_a_whole_model_is_told_behind_it():
    moments = {"state": {0: {"exp_avg": sharded(8)}}, "param_groups": [{"params": [0], "lr": 0.1}]}
    found = sharding_rows(checkpoint({"model": {"w": plain(8)}, "optim": moments}))
    assert [(one.how, one.tensors) for one in found] == [("whole", 1), ("dim 0 over 4 ranks, outside the model", 1)]


def test_groups_that_hold_replicas_are_named_seen_from_one_rank():
    shards = (Shard(Box((0,), (4,)), 0, None), Shard(Box((4,), (4,)), None, None))
    (layout,) = layout_of(replace(sharded(8), shards=shards), sharded(1))
    assert layout == ShardingRow("dim 0 over groups of 2 of 4 ranks", 2, True, 1, 1)


def test_groups_that_hold_replicas_are_named_seen_from_all_ranks():
    boxes = [Box((0,), (4,)), Box((4,), (4,))] * 2
    shards = tuple(Shard(box, rank, None) for rank, box in enumerate(boxes))
    (layout,) = layout_of(replace(sharded(8), shards=shards))
    assert layout == ShardingRow("dim 0 over groups of 2 of 4 ranks", 1, True, 0, 0)


def test_a_dtensor_is_told_in_its_own_words():
    rows = [Box((n * 2, 0), (2, 4)) for n in range(2)]
    one = dtensor((4, 4), ("Shard(0)",), (2,), rows)
    two = dtensor((4, 4), ("Replicate()", "Shard(0)"), (2, 2), rows * 2)
    strided = dtensor((4, 4), ("_StridedShard(0, sf=2)", "Shard(0)"), (2, 2), rows)
    assert [x.how for x in layout_of(one, two, strided)] == [
        "Shard(0) on 2 ranks",
        "(Replicate(), Shard(0)) on 2 x 2 ranks",
        "(_StridedShard(0, sf=2), Shard(0)) on 2 x 2 ranks",
    ]
    assert layout_of(two)[0].empty == 0 and layout_of(strided)[0].empty == 1


def test_pieces_of_flattened_parameters_are_neither_even_nor_uneven():
    piece = replace(plain(12), kind="flat_pieces")
    assert layout_of(piece) == (ShardingRow("pieces of flattened parameters", 1, True),)


def test_a_tensor_of_a_table_says_how_it_lies():
    assert placement(sharded(3, 8, ranks=4)) == "dim 0 over 4 ranks"
    assert placement(plain(3)) == "whole"
    assert placement(replace(plain(3), kind="meta")) == "meta"


def test_programs_get_one_word():
    assert sharding_name(checkpoint({"model": {"w": sharded(8)}})) == "fsdp1-sharded-tensor"
    assert sharding_name(checkpoint({"model": {"w": plain(8)}})) == "none"
    assert sharding_name(checkpoint({"model": {"w": dtensor((4,), ("Shard(0)",), (2,), [])}})) == "dtensor"


def test_of_the_ways_that_tensors_lie_that_of_most_comes_first():
    rows = sharding_rows(ckptools.open(FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt"))
    cut = [row.tensors for row in rows if row.sharded]
    assert len(cut) > 1 and cut == sorted(cut, reverse=True)
    assert [row.sharded for row in rows] == sorted([row.sharded for row in rows], reverse=True)
