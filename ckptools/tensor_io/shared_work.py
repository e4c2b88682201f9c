"""Work shared out to the ranks that do a command together, and by each to its threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ckptools.cluster.team import current
from ckptools.tensor_io.fetch_ahead import Part, fetched_in_threads

T = TypeVar("T")
R = TypeVar("R")


def in_ranks(
    work: Callable[[T], R],
    items: Iterable[T],
    threads: int,
    weight: Callable[[T], int],
    give_up: Callable[[], None] = lambda: None,
    reads: Callable[[T], Iterable[Part]] = lambda _: (),
) -> list[R]:
    """Run `work` on every item, each on one rank, and return on all ranks the results in the order of the items.

    Args:
        work: called in some thread of some rank, once for each item; what it returns is sent to the others.
        items: what to work on, the same on every rank.
        threads: how many each rank has, at least one.
        weight: how long an item takes, in bytes.
        give_up: called when a call has failed, or the user interrupts, so that running calls can end early.
        reads: what of which files an item reads; of files in a store it is fetched for many items together.

    Raises:
        Exception: whatever a call raised first, on whatever rank.
    """
    team = current()
    if team.world_size == 1:
        return fetched_in_threads(work, items, threads, reads, give_up)
    every = list(items)
    own = team.share([weight(item) for item in every])
    with team.own_work():
        results = fetched_in_threads(work, every[own.start : own.stop], threads, reads, give_up)
    return [result for part in team.gather(results) for result in part]
