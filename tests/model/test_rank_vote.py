"""Of several ranks that hold one thing, those are named that most contradict."""

from __future__ import annotations

from collections import Counter
from operator import eq

import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptools
from ckptools.model.rank_vote import MAX_VALUES, minority_ranks


@given(st.lists(st.integers(0, MAX_VALUES - 1), min_size=1, max_size=40))
def test_who_is_not_odd_has_the_most_frequent_value(values):
    odd = minority_ranks(list(enumerate(values)), eq)
    left = {value for rank, value in enumerate(values) if rank not in odd}
    assert len(left) == 1 and Counter(values)[left.pop()] == max(Counter(values).values()) == len(values) - len(odd)


def test_of_two_that_differ_the_lower_rank_is_believed():
    assert minority_ranks([(3, "a"), (5, "b")], eq) == [5]


def test_where_all_have_their_own_all_but_the_lowest_are_odd():
    assert minority_ranks([(rank, rank) for rank in range(100)], eq) == list(range(1, 100))


@given(st.lists(st.sampled_from([[n, m] for n in range(6) for m in (0, 0)]), max_size=60))
def test_ranks_that_hold_one_object_are_judged_as_if_each_had_its_own(values):
    own = [(rank, list(value)) for rank, value in enumerate(values)]
    assert minority_ranks(list(enumerate(values)), eq) == minority_ranks(own, eq)


def test_an_object_that_a_thousand_ranks_hold_is_compared_once():
    asked, state = [], [1, 2, 3]
    values = [(0, [1, 2, 3]), *((rank, state) for rank in range(1, 1000))]
    assert minority_ranks(values, lambda a, b: asked.append(a) or a == b) == [] and len(asked) <= 1


def test_a_value_beyond_those_that_are_told_apart_is_odd_however_many_have_it():
    values = [*range(MAX_VALUES), *[MAX_VALUES] * 3]
    assert minority_ranks(list(enumerate(values)), eq) == list(range(1, len(values)))


def ranks(folder, values):
    for rank, (dtype, fill, step) in enumerate(values):
        tree = {"model": {"w": torch.full((4,), fill, dtype=dtype)}, "step": step}
        torch.save(tree, folder / f"rank{rank}.pt")
    return folder


F32 = torch.float32


def test_rank_0_is_named_where_its_bytes_are_the_odd_ones(tmp_path):
    found = ckptools.verify(ranks(tmp_path, [(F32, 2.0, 1), (F32, 1.0, 1), (F32, 1.0, 1)])).problems
    assert [(p.code, p.rank, p.tensor) for p in found if p.severity == "error"] == [("CK105", 0, "model.w")]


def test_rank_0_is_named_where_its_dtype_is_the_odd_one(tmp_path):
    found = ckptools.open(ranks(tmp_path, [(torch.float64, 1.0, 1), (F32, 1.0, 1), (F32, 1.0, 1)]), all_ranks=True)
    assert [(p.code, p.rank) for p in found.problems] == [("CK104", 0)]


def test_rank_0_is_named_where_its_step_is_the_odd_one(tmp_path):
    found = ckptools.open(ranks(tmp_path, [(F32, 1.0, 9), (F32, 1.0, 1), (F32, 1.0, 1)]), all_ranks=True)
    assert [(p.code, p.message) for p in found.problems] == [
        ("CK006", "differs between ranks (rank 0 from the others); they are not of one step")
    ]
