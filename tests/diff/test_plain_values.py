"""Keys that look alike, and long lists: what differs in them, and where first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptools


def saved(path: Path, tree: Any) -> Path:
    torch.save(tree, path)
    return path


@pytest.mark.parametrize("swapped", [False, True])
def test_a_key_that_is_a_number_is_not_the_text_of_it(tmp_path, swapped):
    trees = [{"w": torch.ones(2)}, {"w": torch.ones(2)}]
    trees[0]["seen"], trees[1]["seen"] = {1: 5, 2: 6}, {"1": 5, 2: 6}
    paths = [saved(tmp_path / f"{n}.pt", {"model": {"w": torch.ones(2)}, "extra": t}) for n, t in enumerate(trees)]
    found = ckptools.diff(*paths[:: -1 if swapped else 1], every_byte=True)
    (row,) = [row for row in found.values if row.verdict != "same"]
    assert (row.verdict, row.name, row.value_a, row.value_b) == ("differs", "extra.seen.1", "5", "5")
    assert "a number on one side and its text on the other" in row.detail and found.same is False


def test_a_number_and_its_text_beside_each_other_are_two_keys(tmp_path):
    def tree(one: int) -> dict[str, Any]:
        return {"model": {"w": torch.ones(2)}, "seen": {1: one, "1": 7}}

    paths = saved(tmp_path / "a.pt", tree(5)), saved(tmp_path / "b.pt", tree(6))
    found = ckptools.diff(*paths)
    assert [(r.verdict, r.value_a, r.value_b) for r in found.values] == [("differs", "5", "6"), ("same", "7", "7")]


@pytest.mark.parametrize("keys", [(1, 2), ("1", "2")])
def test_a_folder_whose_keys_are_all_texts_is_the_same_as_what_it_was_made_of(tmp_path, keys):
    from torch.distributed.checkpoint import save

    tree = {"model": {"w": torch.ones(2)}, "seen": {key: {"n": torch.arange(3)} for key in keys}}
    save(tree, checkpoint_id=tmp_path / "b")
    assert ckptools.diff(saved(tmp_path / "a.pt", tree), tmp_path / "b", every_byte=True).same is True
    assert ckptools.diff(tmp_path / "b", tmp_path / "a.pt", every_byte=True).same is True


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (list(range(500)), [*range(300), -1, *range(301, 500)], "first at [300]: 300 → -1"),
        (tuple(range(500)), list(range(499)), "the first 499 are the same; A has 500, B 499"),
        ([0.5] * 20, [0.5] * 19 + [float("nan")], "first at [19]: 0.5 → nan"),
        (["x"] * 20, ["x", "y"] + ["x"] * 18, "first at [1]: 'x' → 'y'"),
        (np.arange(12.0).reshape(3, 4), np.arange(12.0).reshape(3, 4) + np.eye(3, 4)[::-1], "first at [0, 2]: 2 → 3"),
        (np.arange(4, dtype=">i2"), np.array([0, 1, 9, 3], dtype=">i2"), "first at [2]: 2 → 9"),
    ],
    ids=["numbers", "lengths", "NaN", "texts", "array", "big-endian"],
)  # fmt: skip
def test_of_two_long_lists_the_first_index_that_differs_is_told_with_both_values(tmp_path, a, b, says):
    paths = [saved(tmp_path / f"{n}.pt", {"model": {"w": torch.ones(2)}, "x": v}) for n, v in enumerate((a, b))]
    found = ckptools.diff(*paths)
    (row,) = [row for row in found.values if row.verdict == "differs"]
    assert row.detail == says and (row.value_a != row.value_b or any(says in s.detail for s in found.subjects))


@pytest.mark.parametrize(
    ("made", "says"), [(tuple, "list → tuple"), (lambda v: [0.0, *v[1:]], "first at [0]: 0 → 0.0")]
)
def test_lists_of_equal_numbers_differ_in_their_classes(tmp_path, made, says):
    trees = [{"model": {"w": torch.ones(2)}, "x": v} for v in (list(range(500)), made(list(range(500))))]
    found = ckptools.diff(*[saved(tmp_path / f"{n}.pt", t) for n, t in enumerate(trees)], every_byte=True)
    assert found.same is False and says in next(row.detail for row in found.values if row.name == "x")


@pytest.mark.parametrize("swapped", [False, True])
def test_a_value_that_one_side_has_is_shown_on_that_side(tmp_path, swapped):
    trees = [{"w": torch.ones(2), "extra": {"seen": 7}}, {"w": torch.ones(2), "extra": {}}]
    paths = [saved(tmp_path / f"{n}.pt", tree) for n, tree in enumerate(trees)]
    (row,) = [row for row in ckptools.diff(*paths[:: -1 if swapped else 1]).values if row.name == "extra.seen"]
    expected = ("only in B", None, "7") if swapped else ("only in A", "7", None)
    assert (row.verdict, row.value_a, row.value_b) == expected


GROUPS = [{"lr": 0.1, "params": ["a"]}, {"lr": 0.2, "eps": 0.5, "params": ["b", "c"]}]


@pytest.mark.parametrize(("sides", "word"), [(slice(None), "only in B"), (slice(None, None, -1), "only in A")])
def test_a_param_group_of_one_side_is_listed_with_its_settings(tmp_path, sides, word):
    state = {name: {"exp_avg": torch.ones(2)} for name in "abc"}
    trees = [{"optimizer": {"state": state, "param_groups": groups}} for groups in (GROUPS[:1], GROUPS)]
    paths = [saved(tmp_path / f"{n}.pt", tree) for n, tree in enumerate(trees)]
    rows = [row for row in ckptools.diff(*paths[sides]).values if row.verdict != "same"]
    assert {row.name.removeprefix("optimizer.param_groups."): row.verdict for row in rows} == dict.fromkeys(
        ["1.lr", "1.eps", "1.params"], word
    )
    texts = [row.value_b if word == "only in B" else row.value_a for row in rows]
    assert texts == ["0.2", "0.5", "2 parameters"]


@pytest.mark.parametrize("section", ["model", "optimizer"])
def test_a_key_deep_in_a_model_or_in_a_state_is_not_the_text_of_it(tmp_path, section):
    weights = {name: torch.ones(2) for name in "abc"}
    groups = [{"params": [0, 1, 2], "lr": 0.1}]

    def tree(key: Any) -> Any:
        if section == "model":
            return {"model": {**weights, "extra": {key: 5}}}
        state = {n: {"exp_avg": torch.ones(2), "seen": {key: 5}} for n in range(3)}
        return {"model": weights, "optimizer": {"state": state, "param_groups": groups}}

    paths = [saved(tmp_path / f"{n}.pt", tree(key)) for n, key in enumerate((1, "1"))]
    found = ckptools.diff(*paths, every_byte=True)
    rows = [row for row in found.values if row.verdict == "differs"]
    assert found.same is False and len(rows) == (1 if section == "model" else 3)
    assert {row.detail for row in rows} == {"a key is a number on one side and its text on the other"}


def test_keys_that_look_alike_are_each_compared(tmp_path):
    weights = {name: torch.ones(2) for name in "uvw"}
    trees = [{"model": {**weights, "a.b": 1, "a": {"b": last}}} for last in (2, 3)]
    found = ckptools.diff(*(saved(tmp_path / f"{n}.pt", tree) for n, tree in enumerate(trees)), every_byte=True)
    (row,) = [row for row in found.values if row.verdict != "same"]
    assert (found.same, row.name, row.value_a, row.value_b) == (False, "model.a.b", "2", "3")
