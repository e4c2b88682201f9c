"""The processes that share the work of one command: this one alone, unless it was started as one of several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import TypeVar

from ckptools.errors import CkptoolsError

T = TypeVar("T")


class Team:
    """One process alone; see `ranks.Ranks` for several."""

    rank = 0
    world_size = 1

    def gather(self, value: T) -> list[T]:
        """Exchange a value with all ranks, each of which calls this as often; returns those of all, by rank."""
        return [value]

    def name(self, rank: int) -> str:
        """The name of a rank in a message: `rank 3 on node7`."""
        return f"rank {rank}"

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Do what no other rank does; of several ranks, an error in it names this one."""
        try:
            yield
        except CkptoolsError as error:
            if self.world_size > 1 and not is_named(error):
                raise named(error, self.name(self.rank)) from error
            raise

    def share(self, weights: Sequence[int]) -> range:
        """Which of some things this rank does, by their weights: consecutive ones."""
        return shares(weights, self.world_size)[self.rank]


ALONE = Team()


class _Process:
    team = ALONE


def current() -> Team:
    """The team that shares this command's work."""
    return _Process.team


@contextmanager
def working_in(team: Team) -> Iterator[None]:
    """Let everything within be done together with the other ranks of a team."""
    before, _Process.team = _Process.team, team
    try:
        yield
    finally:
        _Process.team = before


def shares(weights: Sequence[int], count: int) -> list[range]:
    """Cut a sequence into `count` runs of nearly equal weight: none has more than its part and the heaviest item.

    What weighs nothing weighs a little, so that many such things are spread too.
    """
    scaled = [weight + 1 for weight in weights]
    total = sum(scaled)
    ends = [0] * (count + 1)
    for number, (weight, end) in enumerate(zip(scaled, accumulate(scaled), strict=True)):
        # An item belongs where its middle lies.
        owner = (2 * end - weight) * count // (2 * total)
        ends[owner + 1] = number + 1
    ends = list(accumulate(ends, max))
    return [range(first, end) for first, end in pairwise(ends)]


def named(error: CkptoolsError, who: str) -> CkptoolsError:
    """Copy an error with a rank's name before its message."""
    copy = error.__class__.__new__(error.__class__, f"{who}: {error}")
    copy.__dict__.update(error.__dict__)
    copy.__dict__["of_rank"] = who
    return copy


def is_named(error: CkptoolsError) -> bool:
    """Whether an error says which rank it comes from."""
    return "of_rank" in error.__dict__
