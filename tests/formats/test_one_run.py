"""Rank files of two runs at the same step: told apart by what is one for a run and all of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptools
from ckptools.errors import NotWholeError

WORLD = 3


def state_of(seed: int) -> dict[str, Any]:
    """One rank's RNG states."""
    torch.manual_seed(seed)
    return {"torch": torch.get_rng_state(), "python": (3, tuple(range(seed, seed + 625)), None)}


def save(folder: Path, change: Callable[[dict[str, Any], int], None] = lambda tree, rank: None) -> Path:
    """Files as Composer saves them, each with the RNG states of all ranks."""
    for rank in range(WORLD):
        model = {"w": torch.arange(6.0)}
        state = {"model": model, "run_name": "a", "rank_zero_seed": 7, "timestamp": {"batch": 5, "wct": 0.1 * rank}}
        tree = {"state": state, "rng": [state_of(r) for r in range(WORLD)]}
        change(tree, rank)
        torch.save(tree, folder / f"ep0-ba5-rank{rank}.pt")
    return folder


def of_two_runs(folder: Path) -> list[tuple[int | None, str | None]]:
    found = ckptools.open(folder, all_ranks=True).problems
    return [(p.rank, p.tensor) for p in found if p.code == "CK006"]


def test_files_of_one_run_are_of_one_run(tmp_path):
    assert of_two_runs(save(tmp_path)) == []


@pytest.mark.parametrize("key", ["torch", "python"])
def test_a_file_that_lists_other_rng_states_of_the_ranks_is_refused(tmp_path, key):
    def change(tree, rank):
        if rank == 1:
            tree["rng"][2][key] = state_of(99)[key]

    assert of_two_runs(save(tmp_path, change)) == [(1, "rng")]
    with pytest.raises(NotWholeError, match="another run or save"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt", only="model")


@pytest.mark.parametrize(("key", "value"), [("run_name", "b"), ("rank_zero_seed", 8)])
def test_a_file_of_another_name_or_seed_is_refused(tmp_path, key, value):
    save(tmp_path, lambda tree, rank: tree["state"].update({key: value}) if rank == 2 else None)
    assert of_two_runs(tmp_path) == [(None, f"state.{key}")]
    with pytest.raises(NotWholeError, match="not of one run"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt", only="model")


def test_the_file_that_most_others_contradict_is_named_though_it_is_the_lowest_rank_s(tmp_path):
    def change(tree, rank):
        if rank == 0:
            tree["rng"][1]["torch"] = state_of(99)["torch"]

    assert of_two_runs(save(tmp_path, change)) == [(0, "rng")]


def test_a_file_that_lists_another_number_of_ranks_is_named_alone(tmp_path):
    def change(tree, rank):
        if rank == 1:
            tree["rng"].append(state_of(99))

    assert of_two_runs(save(tmp_path, change)) == [(1, "rng")]


def test_each_rank_s_own_rng_states_may_differ(tmp_path):
    assert of_two_runs(save(tmp_path, lambda tree, rank: tree.update(rng=state_of(rank)))) == []


def test_states_of_a_rank_s_devices_may_differ(tmp_path):
    def change(tree, rank):
        tree["rng"] = [state_of(100 * rank + device)["torch"] for device in range(WORLD)]

    assert of_two_runs(save(tmp_path, change)) == []


@pytest.mark.parametrize("key", ["torch", "python"])
def test_where_each_file_lists_its_own_states_of_the_ranks_no_file_is_named_and_all_are_refused(tmp_path, key):
    def change(tree, rank):
        tree["rng"][2][key] = state_of(99 + rank)[key]

    assert of_two_runs(save(tmp_path, change)) == [(None, "rng")]
    with pytest.raises(NotWholeError, match="several runs or saves"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt", only="model")
