"""A rank that is gone without a word is noticed by the one before it, which tells all others."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from ckptools.cluster import ranks
from ckptools.cluster.ranks import Watch
from ckptools.cluster.rendezvous import Meeting
from ckptools.errors import ReadError


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Meeting]]:
    """Three ranks that have met; looks are short."""
    monkeypatch.setattr(ranks, "BEAT", 0.02)
    monkeypatch.setattr(ranks, "GRACE", 60.0)
    store = HashStore()
    yield [Meeting(store, "rank", number, 3, 5.0) for number in range(3)]


def watching(meetings: list[Meeting], numbers: list[int]) -> list[Watch]:
    found = [Watch(meetings[number], 0.5) for number in numbers]
    for one in found:
        one.start()
    return found


def failures(watches: list[Watch], seconds: float) -> list[str]:
    """What each has noticed, once all have or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(one.failure for one in watches):
        time.sleep(0.01)
    for one in watches:
        one.stop()
        one.join()
    return [str(one.failure) for one in watches]


def test_all_is_well_while_all_are_heard(meetings: list[Meeting]) -> None:
    assert failures(watching(meetings, [0, 1, 2]), 1.5) == ["None"] * 3


def test_a_rank_that_is_not_heard_is_named_to_all(meetings: list[Meeting]) -> None:
    said = failures(watching(meetings, [0, 2]), 20)
    assert said == ["rank 1 is gone: no sign of it for 0.5 s; was it killed?"] * 2


def test_the_error_of_a_rank_is_that_of_all_others(meetings: list[Meeting]) -> None:
    watches = watching(meetings, [0, 1])
    meetings[2].fail(ReadError("x.pt", "is cut short"))
    assert failures(watches, 20) == ["x.pt: is cut short"] * 2
