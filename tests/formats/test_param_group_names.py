"""Names of the param groups of DeepSpeed, from those of its flat tensors."""

from __future__ import annotations

import pytest

from ckptools.formats.deepspeed.assembler import _join_group, names_by_param_group


@pytest.mark.parametrize(
    ("groups", "names", "found"),
    [
        ([], [["a"], ["b", "c"]], [["a"], ["b", "c"]]),
        ([{"params": [0]}, {"params": [1]}], [["a"], ["b", "c"]], [["a"], ["b", "c"]]),
        ([{"params": [0, 1]}, {"params": [2]}], [["a"], ["b", "a"], ["c"]], [["a", "b"], ["c"]]),
        ([{"params": []}, {"params": [0]}], [["a", "b"]], [[], ["a", "b"]]),
        ([{"params": [0]}, {"params": [1]}], [["a"]], [["a"], []]),
    ],
)
def test_a_group_has_the_names_of_all_its_flat_tensors(groups, names, found):
    assert names_by_param_group(groups, names) == found


def test_groups_of_stages_are_joined_by_number_and_settings():
    joined: list[dict[str, object]] = []
    stages = [
        (0, {"lr": 1, "params": [0]}, ["a"]),
        (1, {"lr": 2, "params": [1]}, ["b"]),
        (0, {"lr": 1, "params": [0]}, ["c", "a"]),
        (1, {"lr": 1}, ["d"]),
        (0, {"lr": 2, "wd": 0}, ["e"]),
        (3, {}, ["f"]),
    ]
    for number, settings, names in stages:
        _join_group(joined, number, settings, names)
    assert joined == [
        {"lr": 1, "params": ["a", "c", "d"]},
        {"lr": 2, "params": ["b"]},
        {"lr": 2, "wd": 0, "params": ["e"]},
        {"params": ["f"]},
    ]
