"""Trees of names, and their folding."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptools.keys.entries import Branch, fold, label_text, layer_and_role, numbers_folded, tree_of, unfold

WORDS = st.sampled_from(["a", "q", "k", "norm1", "norm2", "0", "1", "2", "10", "007", "", "w_proj", "v_proj", "é"])
NAMES = st.lists(WORDS, min_size=1, max_size=4).map(".".join)
TRIED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ITEMS = st.dictionaries(NAMES, st.integers(0, 2), max_size=30)


def folded(items):
    """The tree of `{name: content}`, folded where contents are equal."""
    return fold(
        tree_of((name, (name, n)) for name, n in items.items()), lambda i: i[1], lambda i: i[1], lambda i: i[1] > 0
    )


@pytest.mark.slow
@TRIED
@given(ITEMS)
def test_what_is_folded_unfolds_to_what_it_was(items):
    found = list(unfold(folded(items)))
    assert sorted(name for name, _ in found) == sorted(items)
    assert all({n for _, n in held} == {items[name]} for name, held in found)


@pytest.mark.slow
@TRIED
@given(ITEMS)
def test_items_stand_in_the_order_of_the_names_that_their_branch_unfolds_to(items):
    by_branch = {}
    for name, held in unfold(folded(items)):
        by_branch.setdefault(id(held), (held, []))[1].append(name)
    assert all([name for name, _ in held] == names for held, names in by_branch.values())


@pytest.mark.slow
@TRIED
@given(ITEMS)
def test_folding_what_is_folded_changes_nothing_that_it_stands_for(items):
    count = sum(len(held) for held in {id(h): h for _, h in unfold(folded(items))}.values())
    assert count == len(items)


def shown(branches: list[Branch], before: str = "") -> list[str]:
    found = []
    for branch in branches:
        name = before + label_text(branch.labels)
        found += [f"{name} x{len(branch.items)}"] if branch.items else []
        found += shown(branch.children, f"{name}.")
    return found


def test_layers_that_hold_the_same_are_one_and_another_one_stays_apart():
    layers = {f"blocks.{n}.{w}.weight": 1 for n in range(24) for w in ("q", "k", "v")}
    assert shown(folded(layers)) == ["blocks.{0..23}.{q,k,v}.weight x72"]
    assert shown(folded({**layers, "blocks.7.k.weight": 2})) == [
        "blocks.{0..6,8..23}.{q,k,v}.weight x69",
        *(f"blocks.7.{word}.weight x1" for word in "qkv"),
    ]


def test_a_layer_with_a_key_more_stays_apart():
    layers = {f"blocks.{n}.w": 1 for n in range(4)}
    assert shown(folded({**layers, "blocks.2.bias": 1})) == ["blocks.{0,1,3}.w x3", "blocks.2.{w,bias} x2"]


def test_words_fold_with_their_neighbours_only_and_numbers_wherever_they_stand():
    assert shown(folded({"emb.w": 1, "x": 2, "head.w": 1})) == ["emb.w x1", "x x1", "head.w x1"]
    assert shown(folded({"norm1.w": 1, "x": 2, "norm2.w": 1})) == ["norm{1,2}.w x2", "x x1"]


def test_words_do_not_fold_where_the_items_forbid_it():
    assert shown(folded({"a": 0, "b": 0, "c1": 0, "c2": 0})) == ["a x1", "b x1", "c{1,2} x2"]


def test_what_differs_beside_each_other_may_be_folded_inside_of_siblings():
    items = {"lr1": 1, "lr2": 2, "groups.0.lr": 1, "groups.1.lr": 2}
    named = tree_of((name, (name, n)) for name, n in items.items())
    found = fold(named, lambda item: "number", lambda item: item[1], lambda item: False)
    assert shown(found) == ["lr1 x1", "lr2 x1", "groups.{0,1}.lr x2"]


def test_a_key_may_hold_something_and_have_more_below_it():
    assert shown(folded({"a.0": 1, "a.0.x": 2, "a.1": 1, "a.1.x": 2})) == ["a.{0,1} x2", "a.{0,1}.x x2"]


def test_labels_are_spelled_so_that_each_can_be_told():
    assert label_text(("q_proj", "k_proj", "v_proj")) == "{q,k,v}_proj"
    assert label_text(("proj", "q_proj")) == "{proj,q_proj}"
    assert label_text(("_b", "a_b")) == "{_b,a_b}"
    assert label_text(("h0x", "h1x", "h2x", "h5x")) == "h{0..2,5}x"
    assert label_text(tuple(f"w{2 * n}" for n in range(10))) == "w{0,2,4,6,8,10,12,14 and 2 more}"
    assert numbers_folded(["10", "3", "4", "007"]) == ["3", "4", "10", "007"]


def test_a_name_of_a_million_dots_or_digits_is_a_name():
    long = {"a." * 1_000_000: 1, "9" * 100_000 + "1": 1, "9" * 100_000 + "2": 1}
    assert sorted(name for name, _ in unfold(folded(long))) == sorted(long)


@pytest.mark.parametrize(
    ("name", "layer", "role"),
    [
        ("blocks.3.up.weight", "3", "blocks.*.up.weight"),
        ("layer1.2.conv.weight", "2", "layer1.*.conv.weight"),
        ("layer3.conv.weight", "3", "layer*.conv.weight"),
        ("emb.weight", None, "emb.weight"),
    ],
)
def test_the_layer_of_a_name_is_its_first_word_that_is_a_number(name, layer, role):
    assert layer_and_role(name) == (layer, role)
