"""Trees of several ranks become one, whatever is in them; disagreement is said, nothing is guessed."""

from __future__ import annotations

import datetime
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import CkptoolsError
from ckptools.formats.shared.merge import Merge
from ckptools.model.rank_vote import difference, same_value
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Device, Global, NumpyArray, NumpyScalar, Opaque, Size, TorchName, walk


def merged(*trees):
    merge = Merge()
    return merge.trees(list(enumerate(trees))), merge


def tensor(shape=(2,), rank=0, kind="plain", **fields):
    source = Source(f"rank{rank}", 0, "float32", shape, (1,) * len(shape), "data/0", (0, 8))
    return Tensor(shape, "float32", (Shard(Box.whole(shape), None, source),), kind, **fields)


def test_replicas_lie_side_by_side_with_the_rank_that_holds_each():
    tree, merge = merged({"b": tensor()}, {"b": tensor(rank=1)})
    assert [(s.rank, s.source.path) for s in tree["b"].shards] == [(0, "rank0"), (1, "rank1")]
    assert merge.problems == [] and merge.differing == {}


def test_objects_that_look_alike_stay_keys_of_their_own_beside_a_name_of_torch():
    alike = [Opaque("a.B"), Opaque("a.B")]
    trees = [{TorchName("float32"): tensor(rank=rank), alike[0]: 1, alike[1]: 2} for rank in range(2)]
    tree, _ = merged(*trees)
    assert [tree[key] for key in alike] == [1, 2] and len(tree) == 3


ODD = {
    "a tensor and a number": 3,
    "another dtype": Tensor((2,), "float64", ()),
    "another shape": tensor((2, 1)),
    "another kind": tensor(kind="dtensor"),
    "other placements": tensor(placements=("Shard(0)",)),
    "another mesh": tensor(mesh=(2,)),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_a_tensor_that_another_rank_describes_differently_is_an_error_with_its_name_and_rank(odd):
    _, merge = merged({"m": {"b": tensor()}}, {"m": {"b": tensor()}}, {"m": {"b": odd}})
    assert [(p.code, p.severity, p.rank, p.tensor) for p in merge.problems] == [("CK104", "error", 2, "m.b")]


def cut_at(row: int, rank: int) -> Tensor:
    """A ShardedTensor of two shards, of which a rank has its own."""
    source = Source(f"rank{rank}", 0, "float32", (row,), (1,), "data/0", (0, 16))
    boxes = (Box((0,), (row,)), Box((row,), (4 - row,)))
    shards = tuple(Shard(box, n, source if n == rank else None) for n, box in enumerate(boxes))
    return Tensor((4,), "float32", shards, "sharded_tensor", world_size=2)


def test_ranks_whose_shard_lists_differ_are_an_error():
    _, merge = merged({"w": cut_at(2, 0)}, {"w": cut_at(2, 1)}, {"w": cut_at(1, 1)})
    (problem,) = merge.problems
    assert (problem.code, problem.rank, problem.tensor) == ("CK104", 2, "w")
    assert "another shard list" in problem.message
    assert merged({"w": cut_at(2, 0)}, {"w": cut_at(2, 1)})[1].problems == []


def test_a_tensor_on_some_ranks_only_is_kept_with_the_ranks_that_have_it():
    tree, _ = merged({}, {"b": tensor(rank=1)})
    assert [s.rank for s in tree["b"].shards] == [1]


def test_shards_that_nobody_has_stay_listed():
    whole = [Shard(Box((0,), (1,)), 0, None), Shard(Box((1,), (1,)), 1, None)]
    mine = Source("rank0", 0, "float32", (1,), (1,), "data/0", (0, 4))
    first = Tensor((2,), "float32", (Shard(whole[0].box, 0, mine), whole[1]), "sharded_tensor")
    tree, _ = merged({"w": first})
    assert [(s.rank, s.source is None) for s in tree["w"].shards] == [(0, False), (1, True)]


EQUAL = [
    (1, 1),
    (float("nan"), float("nan")),
    ((1, "a"), (1, "a")),
    ([float("nan")], [float("nan")]),
    (Size((1, 2)), Size((1, 2))),
    (TorchName("float32"), TorchName("float32")),
    (Device("cuda", 1), Device("cuda", 1)),
    (Global("a", "b"), Global("a", "b")),
    (NumpyArray("<f4", (1,), False, b"abcd"), NumpyArray("<f4", (1,), False, b"abcd")),
    (NumpyScalar("<f4", b"abcd"), NumpyScalar("<f4", b"abcd")),
    ({1, 2}, {2, 1}),
    (datetime.timedelta(1), datetime.timedelta(1)),
]
DIFFERENT = [
    (1, 2),
    (1, True),
    (1, 1.0),
    ("a", b"a"),
    ([1], [1, 2]),
    ([1], (1,)),
    (0.0, float("nan")),
    (Size((1,)), Size((2,))),
    (Device("cuda", 1), Device("cuda", 2)),
    (NumpyArray("<f4", (1,), False, b"abcd"), NumpyArray("<f4", (1,), False, b"abce")),
    (NumpyScalar("<f4", b"abcd"), NumpyScalar("<i4", b"abcd")),
    (Opaque("a.B"), Opaque("a.C")),
    ({}, []),
    (None, 0),
]


@pytest.mark.parametrize(("a", "b"), EQUAL, ids=repr)
def test_equal_values_agree(a, b):
    assert merged({"x": a}, {"x": b})[1].differing == {}


@pytest.mark.parametrize(("a", "b"), DIFFERENT, ids=repr)
def test_values_that_differ_are_noted_and_the_lowest_rank_s_is_kept(a, b):
    tree, merge = merged({"x": a}, {"x": a}, {"x": b})
    assert tree["x"] is a or tree["x"] == a
    assert [found.odd for found in merge.differing.values()] == [(2,)]


def test_containers_keep_their_types():
    first = {"o": OrderedDict(a=1), "d": defaultdict(list, a=[tensor()]), "c": Counter(a=1), "t": (tensor(), [1])}
    tree, _ = merged(first, first)
    assert [type(tree[k]) for k in "odct"] == [OrderedDict, defaultdict, Counter, tuple]
    assert tree["d"].default_factory is list


def test_a_state_dict_keeps_its_metadata():
    state = OrderedDict(a=tensor())
    state._metadata = {"": {"version": 1}}
    assert merged(state, state)[0]._metadata == {"": {"version": 1}}


def test_integer_ids_of_all_ranks_come_in_order():
    tree, _ = merged({2: tensor(), 0: tensor()}, {1: tensor(rank=1)})
    assert list(tree) == [0, 1, 2]


@pytest.mark.parametrize("others", [[], [7]], ids=str)
def test_a_negative_key_of_one_rank_is_no_place_in_anothers_list(others):
    merge = Merge()
    merge.trees([(0, {-1: "a"}), (1, others)])
    assert merge.values((-1,)) == {0: "a"}


def test_names_of_classes_as_keys_are_one_key_on_all_ranks(tmp_path):
    for rank in range(2):
        torch.save(
            {"per_dtype": {torch.float32: rank, torch.int64: 1}, "b": torch.ones(1)}, tmp_path / f"rank{rank}.pt"
        )
    tree = ckptools.open(tmp_path / "rank0.pt", all_ranks=True).tree
    assert len(tree["per_dtype"]) == 2


# -- whatever is in them ------------------------------------------------------------------------------------------

WORDS = (
    "state", "param_groups", "params", "model", "optimizers", "optimizer", "AdamW", "schedulers", "last_epoch",
    "base_lrs", "rng", "step", "exp_avg", "w", "b", "_flat_param", "metadata", "world_size", "timestamp", "Timestamp",
    "batch", "epoch", "lr", "0", "", "a.b", "a", "\x1b[2J", "x\ny",
)  # fmt: skip
keys = st.one_of(
    st.sampled_from(WORDS),
    st.just(torch.float32),
    st.integers(-2, 3),
    st.none(),
    st.tuples(st.integers(0, 1)),
    st.booleans(),
)
leaves = st.one_of(
    st.integers(-1, 5),
    st.just(10**40),
    st.floats(),
    st.text(max_size=3),
    st.none(),
    st.booleans(),
    st.binary(max_size=2),
    st.sampled_from(range(6)).map(lambda i: TENSORS[i]),
    st.just(torch.Size([2])),
    st.just(torch.float32),
    st.just(datetime.timedelta(1)),
    st.just(np.arange(3)),
    st.just({1, 2}),
    st.just({(1, (2, 3))}),
    st.just(frozenset({torch.float32})),
    st.just(slice(1)),
    st.just(torch.ones(2).untyped_storage()),
    st.just(np.float32(1)),
    st.just(np.zeros(2, "O")),
    st.just(datetime.datetime(2020, 1, 1, fold=1)),
)
TENSORS = (
    torch.ones(2),
    torch.ones(2, 3),
    torch.tensor(1.0),
    torch.empty(0),
    torch.ones(2, dtype=torch.int64),
    torch.empty(2, device="meta"),
)


def with_metadata(values, metadata):
    state = OrderedDict(values)
    state._metadata = metadata
    return state


trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=5),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(lambda s, p: {"state": s, "param_groups": p}, inner, inner),
        st.builds(
            lambda s, p: {"state": s, "param_groups": [{"params": p}, 3]},
            st.dictionaries(keys, st.dictionaries(keys, inner, max_size=2), max_size=3),
            st.lists(inner, max_size=3),
        ),
        st.builds(lambda e, x: {"last_epoch": e, "x": x}, inner, inner),
        st.builds(with_metadata, st.dictionaries(keys, inner, max_size=3), inner),
    ),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranks=st.lists(trees, min_size=1, max_size=3), again=st.booleans())
def test_any_trees_are_opened_together_shown_and_planned_or_refused_in_one_line(tmp_path, ranks, again):
    for old in tmp_path.iterdir():
        old.unlink()
    for rank, tree in enumerate(ranks[:1] * 3 if again else ranks):
        torch.save(tree, tmp_path / f"rank{rank}.pt")
    try:
        ck = ckptools.open(tmp_path / "rank0.pt", all_ranks=True)
        repr(ck), ck._repr_html_(), dict(ck.model), dict(ck.optimizers), dict(ck.schedulers), ck.rng
        assert all(str(p).isprintable() or "\\" not in str(p) for p in ck.problems)
        leaves_in = [leaf for s in ck.sections for _, leaf in walk(s.value)]
        assert len(leaves_in) >= len([x for _, x in walk(ck.tree) if isinstance(x, Tensor)])
        ckptools.consolidate(ck, tmp_path / "out.pt", dry_run=True)
    except CkptoolsError as error:
        assert "\n" not in str(error).replace(str(tmp_path), "")


def stored(crc: int, *shape: int, dtype: str = "float32") -> Tensor:
    """A plain tensor whose record has a checksum."""
    source = Source(Path("f"), 0, dtype, shape, contiguous_strides(shape), "data/0", (0, 64), crc)
    return Tensor(shape, dtype, (Shard(Box.whole(shape), 0, source),))


def test_tensors_inside_a_value_are_the_same_by_what_is_stated_of_them():
    assert same_value([stored(5, 2)], [stored(5, 2)])
    assert not same_value([stored(5, 2)], [stored(6, 2)])
    assert not same_value([stored(5, 2)], [stored(5, 2, dtype="int32")])


def test_only_plain_tensors_of_one_dimension_may_differ_in_length():
    assert difference(stored(5, 3), stored(6, 4)) is None
    assert difference(stored(5, 3, 1), stored(6, 4, 1)) == ("shape [4, 1]", "[3, 1]")
    assert difference(stored(5, 3), stored(6, 3, 1)) == ("shape [3, 1]", "[3]")


@pytest.mark.parametrize("other", [(1, 2, 4), (1, 2), (1, 2, 3.0), (1, 2, True), [1, 2, 3]])
def test_numbers_of_another_value_type_or_count_are_another_value(other):
    assert same_value((1, 2, 3), (1, 2, 3))
    assert not same_value((1, 2, 3), other)
    assert not same_value((0, 1, 1), (False, True, True))


@pytest.mark.parametrize(("shorter", "longer"), [((), ("a",)), (("a", 1), ("a", 1, None)), ([0.5], [0.5, 0.5])])
def test_values_in_a_row_that_is_longer_are_another_value(shorter, longer):
    assert not same_value(shorter, longer) and not same_value(longer, shorter)
    assert same_value([longer], [longer])
