"""Of several ranks that hold one thing, those are named that more than half contradict, with what they hold."""

from __future__ import annotations

from collections import Counter
from operator import eq

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptools
from ckptools.model.rank_vote import MAX_VALUES, same_value, vote
from ckptools.model.tree import Device, Opaque


def odd(values, same=eq):
    return list(vote(list(enumerate(values)), same).odd)


def told(values):
    return vote(list(enumerate(values)), eq).by_rank()


@given(st.lists(st.integers(0, MAX_VALUES - 1), min_size=1, max_size=40))
def test_who_is_odd_has_another_value_than_more_than_half(values):
    found = odd(values)
    value, count = Counter(values).most_common(1)[0]
    assert found == ([rank for rank, other in enumerate(values) if other != value] if 2 * count > len(values) else [])


@pytest.mark.parametrize("values", [["a", "b"], ["a", "a", "b", "b"], ["a", "a", "b", "c"], list(range(100))])
def test_where_no_value_has_more_than_half_of_the_ranks_nobody_is_odd_and_they_disagree(values):
    found = vote(list(enumerate(values)), eq)
    assert (found.odd, found.agree) == ((), False)


@given(st.lists(st.sampled_from([[n, m] for n in range(6) for m in (0, 0)]), max_size=60))
def test_ranks_that_hold_one_object_are_judged_as_if_each_had_its_own(values):
    own = [(rank, list(value)) for rank, value in enumerate(values)]
    assert vote(list(enumerate(values)), eq).odd == vote(own, eq).odd


def test_an_object_that_a_thousand_ranks_hold_is_compared_once():
    asked, state = [], [1, 2, 3]
    values = [(0, [1, 2, 3]), *((rank, state) for rank in range(1, 1000))]
    assert vote(values, lambda a, b: asked.append(a) or a == b).agree and len(asked) <= 1


def test_values_beyond_those_that_are_grouped_count_as_others():
    assert odd([*range(MAX_VALUES), *[MAX_VALUES] * 30]) == []
    assert odd([*[0] * 30, *range(1, MAX_VALUES + 3)]) == list(range(30, 40))


def test_the_values_are_shown_the_odd_one_first():
    assert told([0.003, 0.02, 0.003]) == "rank 1: 0.02, others: 0.003"
    assert told([1, 1, 2, 2, 1, 3, 1, 1]) == "ranks 2, 3: 2, rank 5: 3, others: 1"


def test_where_nobody_is_odd_every_rank_is_shown_with_its_value():
    assert told([0.02, 0.02, 0.003, 0.003]) == "ranks 0, 1: 0.02, ranks 2, 3: 0.003"


def test_of_many_values_a_few_are_shown_and_the_other_ranks_are_counted():
    assert told(range(100)) == "rank 0: 0, rank 1: 1, rank 2: 2, rank 3: 3 and 96 more ranks"
    assert told([*[7] * 9, *range(6)]) == "rank 9: 0, rank 10: 1, rank 11: 2, rank 12: 3 and 2 more ranks, others: 7"


def test_values_of_classes_and_long_ones_are_one_short_line():
    shown = told([Opaque("a.B"), Device("cuda", 1), "x\n" * 500, list(range(90))])
    assert "a.B" in shown and "device('cuda:1')" in shown and "\n" not in shown and len(shown) < 300


def ranks(folder, values):
    for rank, (dtype, fill, step) in enumerate(values):
        tree = {"model": {"w": torch.full((4,), fill, dtype=dtype)}, "step": step}
        torch.save(tree, folder / f"rank{rank}.pt")
    return folder


F32 = torch.float32


def errors(found):
    return [(p.code, p.rank, p.tensor, p.message) for p in found.problems if p.severity == "error"]


def test_rank_0_is_named_where_its_bytes_are_the_odd_ones(tmp_path):
    found = ckptools.verify(ranks(tmp_path, [(F32, 2.0, 1), (F32, 1.0, 1), (F32, 1.0, 1)]))
    text = "[0:4]: rank 0 holds other bytes than rank 1 (first at [0]: 2.0 and 1.0)"
    assert errors(found) == [("CK105", 0, "model.w", text)]


def test_of_two_copies_neither_rank_is_named_as_the_odd_one(tmp_path):
    found = ckptools.verify(ranks(tmp_path, [(F32, 2.0, 1), (F32, 1.0, 1)]))
    text = "[0:4]: rank 1 holds other bytes than rank 0 (first at [0]: 1.0 and 2.0)"
    assert errors(found) == [("CK105", None, "model.w", text)]


def test_rank_0_is_named_where_its_dtype_is_the_odd_one(tmp_path):
    found = ckptools.open(ranks(tmp_path, [(torch.float64, 1.0, 1), (F32, 1.0, 1), (F32, 1.0, 1)]), all_ranks=True)
    assert [(p.code, p.rank, p.ranks) for p in found.problems] == [("CK104", 0, (0,))]


def test_of_two_dtypes_that_as_many_ranks_have_both_are_told_and_nobody_is_odd(tmp_path):
    found = ckptools.open(ranks(tmp_path, [(F32, 1.0, 1)] * 2 + [(torch.float64, 1.0, 1)] * 2), all_ranks=True)
    text = "dtype float64 on rank 2, rank 0 has float32; the ranks are not of one run"
    assert [(p.code, p.rank, p.ranks, p.message) for p in found.problems] == [("CK104", None, (), text)]


def test_rank_0_is_named_where_its_step_is_the_odd_one(tmp_path):
    found = ckptools.open(ranks(tmp_path, [(F32, 1.0, 9), (F32, 1.0, 1), (F32, 1.0, 1)]), all_ranks=True)
    assert [(p.code, p.message, p.ranks) for p in found.problems] == [
        ("CK006", "differs between ranks (rank 0: 9, others: 1); they are not of one step", (0,))
    ]


def test_nobody_is_odd_with_two_against_two_steps(tmp_path):
    found = ckptools.open(ranks(tmp_path, [(F32, 1.0, 9), (F32, 1.0, 9), (F32, 1.0, 1), (F32, 1.0, 1)]))
    assert [(p.code, p.message, p.ranks) for p in found.problems] == [
        ("CK006", "differs between ranks (ranks 0, 1: 9, ranks 2, 3: 1); they are not of one step", ())
    ]


def test_a_learning_rate_of_one_rank_s_own_is_shown_beside_that_of_the_others(tmp_path):
    for rank in range(3):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.02 if rank == 1 else 0.003)
        torch.save({"model": {"w": torch.ones(2)}, "optimizer": optimizer.state_dict()}, tmp_path / f"rank{rank}.pt")
    found = ckptools.verify(tmp_path)
    text = "differs between ranks (rank 1: 0.02, others: 0.003)"
    assert errors(found) == [("CK105", None, "optimizer.param_groups.0.lr", text)]


def test_the_evidence_names_the_odd_rank_with_what_the_others_have(tmp_path):
    steps = ckptools.open(ranks(tmp_path, [(F32, 1.0, 1), (F32, 1.0, 9), (F32, 1.0, 1)]), all_ranks=True)
    cause = steps.verdict.causes[0]
    assert (cause.culprit, cause.what) == (
        "rank 1",
        "differs between ranks (rank 1: 9, others: 1); they are not of one step",
    )


def test_the_evidence_shows_both_values_of_two_copies_in_the_order_of_their_ranks(tmp_path):
    found = ckptools.verify(ranks(tmp_path, [(F32, 2.0, 1), (F32, 1.0, 1)]))
    assert found.verdict.causes[0].what == "[0:4]: rank 1 holds other bytes than rank 0 (first at [0]: 1.0 and 2.0)"


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("x" * 500 + "0", "x" * 500 + "1", "0', rank 1: ...xxxxxxxxxxxxxxxxxxxx1'"),
        (["a"] * 90 + ["b"], ["a"] * 90 + ["c"], "rank 0: 90 is 'b', rank 1: 90 is 'c'"),
        (["a"] * 90, ["a"] * 91, "rank 0: 90 values, rank 1: 91 values"),
        ({"k": {"q": 1}}, {"k": {"q": 2}}, "rank 0: k.q is 1, rank 1: k.q is 2"),
    ],
)
def test_two_values_that_differ_are_never_shown_alike(one, other, said):
    found = vote([(0, one), (1, other)], same_value)
    assert said in found.by_rank() and len(found.by_rank()) < 160
    assert len({text for text, _ in found.differing("x").values}) == 2
