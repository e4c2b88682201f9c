"""The processes that share the work of one command: this one alone, unless it was started as one of several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import TypeVar

T = TypeVar("T")


class Team:
    """One process alone; see `ranks.Ranks` for several."""

    rank = 0
    world_size = 1

    def gather(self, value: T) -> list[T]:
        """Exchange a value with all ranks, which must all call this; return the values of all, by rank."""
        return [value]

    def name(self, rank: int) -> str:
        """The name of a rank in a message: `rank 3 on node7`."""
        return f"rank {rank}"

    def share(self, weights: Sequence[int]) -> range:
        """The consecutive items that this rank works on, given the weight of every item."""
        return shares(weights, self.world_size)[self.rank]


ALONE = Team()


class _Process:
    team = ALONE


def current() -> Team:
    """The team that shares this command's work."""
    return _Process.team


@contextmanager
def working_in(team: Team) -> Iterator[None]:
    """Inside this context `current` returns `team`, so that its ranks share the work."""
    before, _Process.team = _Process.team, team
    try:
        yield
    finally:
        _Process.team = before


def shares(weights: Sequence[int], count: int) -> list[range]:
    """Cut a sequence into `count` runs of nearly equal weight.

    No run weighs more than its equal part and the heaviest item together. Every item counts one more than its weight,
    so that many items of weight 0 are spread too.
    """
    scaled = [weight + 1 for weight in weights]
    total = sum(scaled)
    ends = [0] * (count + 1)
    for number, (weight, end) in enumerate(zip(scaled, accumulate(scaled), strict=True)):
        # An item belongs to the run in which its middle lies.
        owner = (2 * end - weight) * count // (2 * total)
        ends[owner + 1] = number + 1
    ends = list(accumulate(ends, max))
    return [range(first, end) for first, end in pairwise(ends)]
