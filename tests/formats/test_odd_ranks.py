"""One rank of several that saved something else: what it lacks, or has otherwise, is told of it and of nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptools
from ckptools.errors import NotWholeError

State = dict[str, Any]


def saved(folder: Path, odd: Callable[[State], Any], rank: int = 1) -> Path:
    """Four ranks' files of a model that each has all of, one of them changed."""
    folder.mkdir(exist_ok=True)
    for number in range(4):
        model = {f"l{i}.weight": torch.arange(12.0).reshape(3, 4) + i for i in range(4)}
        state = {"model": model, "optimizer": optimizer(), "step": 7}
        if number == rank:
            odd(state)
        torch.save(state, folder / f"ep0-ba7-rank{number}.pt")
    return folder


def optimizer() -> State:
    state = {f"l{i}.weight": {"exp_avg": torch.ones(3, 4)} for i in range(4)}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}


def told(folder: Path) -> list[tuple[str, int | None, str | None]]:
    return [(p.code, p.rank, p.tensor) for p in ckptools.open(folder).problems if p.severity == "error"]


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("model.l2.weight", lambda s: s["model"].pop("l2.weight")),
        ("optimizer", lambda s: s.pop("optimizer")),
    ],
)
def test_what_one_rank_lacks_is_told_and_taken_from_the_others(name, odd, tmp_path):
    folder = saved(tmp_path / "run", odd)
    verdict = ckptools.open(folder).verdict
    assert told(folder) == [("CK005", 1, name)]
    assert (verdict.whole, verdict.recoverable, verdict.joinable, verdict.lost) == (False, True, True, ())
    done = ckptools.consolidate(folder, tmp_path / "all.pt", only="all")
    assert any("what rank 1 shared is read from ranks 0, 2, 3" in note for note in done.notes)
    assert torch.equal(torch.load(tmp_path / "all.pt")["model"]["l2.weight"], torch.arange(12.0).reshape(3, 4) + 2)


@pytest.mark.parametrize(
    ("word", "value"), [("dtype float16", torch.zeros(3, 4).half()), ("shape [5, 4]", torch.zeros(5, 4))]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_that_one_rank_has_differently_blames_that_rank_and_keeps_the_others(word, value, rank, tmp_path):
    folder = saved(tmp_path, lambda s: s["model"].update({"l2.weight": value}), rank)
    ck = ckptools.open(folder)
    (problem,) = (p for p in ck.problems if p.severity == "error")
    assert (problem.code, problem.rank) == ("CK104", rank) and problem.message.startswith(word)
    kept = ck.model["l2.weight"]
    assert (kept.shape, kept.dtype, {s.rank for s in kept.found}) == ((3, 4), "float32", {0, 1, 2, 3} - {rank})


def test_a_copy_that_differs_by_its_stated_checksum_is_seen_without_reading_it(tmp_path):
    folder = saved(tmp_path / "run", lambda s: s["model"].update({"l2.weight": torch.zeros(3, 4)}))
    (problem,) = (p for p in ckptools.open(folder).problems if p.severity == "error")
    assert (problem.code, problem.rank, problem.tensor) == ("CK105", 1, "model.l2.weight")
    assert "rank 1: " in problem.message and "others: " in problem.message
    with pytest.raises(NotWholeError, match="NOT WHOLE: rank 1 at odds with other copies"):
        ckptools.consolidate(folder, tmp_path / "all.pt", only="all")
    assert ckptools.consolidate(folder, tmp_path / "of0.pt", only="all", prefer_rank=0).files


@pytest.mark.parametrize(
    ("code", "odd"),
    [
        ("CK105", lambda s: s["optimizer"]["param_groups"][0].update(lr=0.7)),
        ("CK006", lambda s: s.update(step=9)),
    ],
)
def test_another_learning_rate_or_step_is_told_with_its_values(code, odd, tmp_path):
    (problem,) = (p for p in ckptools.open(saved(tmp_path, odd)).problems if p.severity == "error")
    assert (problem.code, problem.ranks) == (code, (1,)) and "(rank 1: " in problem.message
    assert ckptools.open(tmp_path).verdict.whole is False


def test_a_tensor_that_only_one_rank_has_is_seen_and_nobody_lacks_it(tmp_path):
    folder = saved(tmp_path, lambda s: s["model"].update(extra=torch.ones(2)))
    ck = ckptools.open(folder)
    assert told(folder) == [] and ck.verdict.whole and "extra" in ck.model
    assert ck.model["extra"].numpy().tolist() == [1, 1]
