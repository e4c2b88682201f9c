"""A rank that is gone without a word is noticed by the one before it, which tells all others."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from ckptools.cluster import ranks
from ckptools.cluster.ranks import Ranks
from ckptools.errors import ReadError

Start = Callable[[int], Ranks]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start one of three ranks, which look at each other often."""
    monkeypatch.setattr(ranks, "BEAT", 0.02)
    monkeypatch.setattr(ranks, "GRACE", 60.0)
    monkeypatch.setattr(ranks, "FAREWELL_SECONDS", 0.1)
    store = HashStore()
    return lambda rank: Ranks(store, ["a", "b", "c"], rank, 0.5)


def failures(watching: list[Ranks], seconds: float) -> list[str]:
    """What each has noticed, once all have or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(one.failure for one in watching):
        time.sleep(0.01)
    said = [str(one.failure) for one in watching]
    for one in watching:
        one.failed(KeyboardInterrupt())
    return said


def test_all_is_well_while_all_are_heard(start: Start) -> None:
    assert failures([start(0), start(1), start(2)], 1.5) == ["None"] * 3


def test_a_rank_that_is_not_heard_is_named(start: Start) -> None:
    before = start(0)
    after = start(2)
    said = "rank 1 on b is gone: no sign of it for 0.5 s; was it killed?"
    assert failures([before], 20) == [said]
    assert failures([after], 20) == [said]


def test_the_error_of_a_rank_is_that_of_all_others(start: Start) -> None:
    watching = [start(0), start(1)]
    failed = start(2).failed(ReadError("x.pt", "is cut short"))
    assert str(failed) == "rank 2 on c: x.pt: is cut short"
    assert failures(watching, 20) == [str(failed)] * 2


def test_an_error_of_all_ranks_names_none(start: Start) -> None:
    three = [start(rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as together:
        said = list(together.map(lambda one: one.failed(ReadError("x.pt", "is cut short")), three))
    assert list(map(str, said)) == ["x.pt: is cut short"] * 3
