"""Rank files of which each holds parameters of its own, made by hand: what joins, and what stays an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptools
from ckptools.errors import NotWholeError


def stage(*names: str, listed: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """What a rank saves that has these parameters."""
    state = {name: {"exp_avg": torch.ones(2)} for name in names}
    groups = [{"lr": 0.1, "params": list(names) if listed is None else listed}]
    model = {name: torch.full((2,), float(len(name))) for name in names}
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}, **more}


def save(folder: Path, *ranks: dict[str, Any]) -> Path:
    for rank, content in enumerate(ranks):
        torch.save(content, folder / f"ckpt-rank{rank}.pt")
    return folder


def codes(ck: ckptools.Checkpoint) -> list[str]:
    return [problem.code for problem in ck.problems if problem.severity == "error"]


def groups(ck: ckptools.Checkpoint) -> list[list[str]]:
    return [group["params"] for group in ck.tree["optimizer"]["param_groups"]]


def test_a_param_group_is_all_that_the_ranks_list_in_theirs(tmp_path):
    ck = ckptools.open(save(tmp_path, stage("a", "b"), stage("c"), stage("d", "a")))
    assert (codes(ck), groups(ck)) == ([], [["a", "b", "c", "d"]])


def test_other_values_of_a_group_still_have_to_be_equal(tmp_path):
    second = stage("b")
    second["optimizer"]["param_groups"][0]["lr"] = 0.2
    assert codes(ckptools.open(save(tmp_path, stage("a"), second))) == ["CK105"]


def test_a_rank_that_has_a_parameter_has_to_list_it(tmp_path):
    ck = ckptools.open(save(tmp_path, stage("a", "b", listed=["a"]), stage("b", "c")))
    assert (codes(ck), groups(ck)) == (["CK105"], [["a"]])


def test_a_parameter_that_one_rank_alone_has_and_lists_is_its_own(tmp_path):
    ck = ckptools.open(save(tmp_path, stage("a", "b"), stage("a")))
    assert (codes(ck), groups(ck)) == ([], [["a", "b"]])


def test_where_most_ranks_have_a_parameter_another_that_lacks_it_is_wrong(tmp_path):
    assert "CK005" in codes(ckptools.open(save(tmp_path, stage("a", "b"), stage("a", "b"), stage("a"))))


def test_a_rank_that_is_missing_takes_parameters_with_it(tmp_path):
    folder = save(tmp_path, stage("a"), stage("b"), stage("c"))
    (folder / "ckpt-rank1.pt").unlink()
    assert codes(ckptools.open(folder)) == ["CK001", "CK107"]
    with pytest.raises(NotWholeError, match="those of rank 1 are nowhere else"):
        ckptools.consolidate(folder, tmp_path / "all.pt")


def test_where_every_rank_has_all_a_missing_one_takes_nothing_with_it(tmp_path):
    folder = save(tmp_path, stage("a"), stage("a"), stage("a"))
    (folder / "ckpt-rank1.pt").unlink()
    ck = ckptools.open(folder)
    assert (codes(ck), ck.verdict.whole, ck.verdict.recoverable) == (["CK001"], False, True)


def test_a_stage_may_be_far_smaller_than_the_others(tmp_path):
    large = {"big": torch.zeros(100_000)}
    with_parts = [stage("a") | {"model": {f"a{rank}": large["big"]}} for rank in range(2)]
    (problem,) = ckptools.open(save(tmp_path, *with_parts, stage("z"))).problems
    assert problem.message == "ranks hold parameters of their own, and nothing states how many ranks there were"


def test_stages_of_one_model_may_draw_alike_and_ranks_that_have_all_may_not(tmp_path):
    states = {"rng": [{"torch": torch.zeros(8, dtype=torch.uint8)}] * 2}
    for name, second in (("stages", "b"), ("replicas", "a")):
        (tmp_path / name).mkdir()
        report = ckptools.verify(save(tmp_path / name, stage("a", **states), stage(second, **states)))
        assert ("CK206" in [problem.code for problem in report.problems]) == (name == "replicas")
