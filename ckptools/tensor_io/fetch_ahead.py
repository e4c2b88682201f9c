"""Small parts of many files in a store, fetched at once before threads or ranks work on them one by one.

Whoever compares the copies of a tensor reads them rank by rank, and would wait for each file's request in turn. What
is fetched waits in memory, so it is fetched for no more than fits; large parts are read when they are wanted.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from ckptools.cluster.team import current
from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.opening import File
from ckptools.files.remote.path import RemotePath, stores_are_used
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.text import KeyPath

# -- work shared out to a few threads: the first failure, or an interrupt, ends it in good order -----------------------
# Python raises KeyboardInterrupt between any two steps of the main thread, also inside the code that hands work to
# threads; a lock that is left taken there would never let the process end.


INTERRUPT_SECONDS = 0.1
"""Seconds between two looks of the main thread for an interrupt."""

T = TypeVar("T")
R = TypeVar("R")


def thread_count(jobs: int | None, most: int = 8, per_core: int = 1) -> int:
    """The number of threads that read: as many as were asked for, else some per core, at most `most`.

    Where files lie in a store, threads wait more than they work: twice as many then, whatever the cores.
    """
    return jobs or (2 * most if stores_are_used() else min(most, per_core * (os.cpu_count() or 1)))


def in_threads(
    work: Callable[[T], R], items: Iterable[T], threads: int, give_up: Callable[[], None] = lambda: None
) -> list[R]:
    """Run `work` on every item and return the results in the order of the items.

    Args:
        work: called in some thread, once for each item.
        items: what to work on.
        threads: how many, at least one.
        give_up: called when a call has failed, or the user interrupts, so that running calls can end early; those
            that have not begun never do.

    Raises:
        Exception: whatever a call raised first.
    """
    waiting = deque(enumerate(items))
    results: dict[int, R] = {}

    def work_off() -> None:
        while waiting:
            try:
                number, item = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            results[number] = work(item)

    # A thread takes items itself: a future for each would take longer than a small tensor does.
    count = min(max(1, threads), len(waiting))
    with defer_interrupts() as interrupted, ThreadPoolExecutor(max(1, count)) as pool:
        pending: set[Future[None]] = set()
        failed: BaseException | None = None
        try:
            for _ in range(count):
                pending.add(pool.submit(work_off))
            while pending and not interrupted and failed is None:
                done, pending = wait(pending, INTERRUPT_SECONDS, FIRST_EXCEPTION)
                failed = next((f.exception() for f in done if f.exception() is not None), None)
        finally:  # whatever the caller's own handler of a signal raises ends it too
            waiting.clear()
            if pending:
                give_up()
        if failed is not None:
            raise failed
    return [results[number] for number in sorted(results)]


# -- progress ----------------------------------------------------------------------------------------------------------


Progress = Callable[[int, str], None]
"""Called with bytes that were read or written, and the tensor they are of."""


def no_progress(_nbytes: int, _name: str) -> None:
    """Report nothing: the `Progress` where the caller gave none."""


# -- interrupts --------------------------------------------------------------------------------------------------------


@contextmanager
def defer_interrupts() -> Iterator[list[int]]:
    """Note interrupts in the list that this yields, and raise KeyboardInterrupt at the end if there was one.

    Only in the main thread, and only for signals whose handler would raise it; others stay as they are.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before: dict[int, Any] = {}

    def note(number: int, _: object) -> None:
        noted.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.default_int_handler:
            before[number] = signal.signal(number, note)
    try:
        yield noted
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)
        if noted:
            raise KeyboardInterrupt


# -- small parts, fetched at once --------------------------------------------------------------------------------------


THREADS = 32
"""Requests that are under way together."""

NEAR = 64 << 10
"""Bytes between two parts that are fetched rather than making a second request; their transfer takes less than that."""

WAITING = 16 << 20
"""Bytes that are fetched before the first of them is read; a store keeps four times as much."""


Part = tuple[Path, int, int]
"""A file, and the bytes in it from an offset to before another."""


def _is_fetched(part: Part) -> bool:
    path, start, end = part
    if not isinstance(path, RemotePath):
        return False
    from ckptools.files.remote.cached_file import LARGE

    return 0 < end - start <= LARGE


def _fetch(request: Part) -> None:
    from ckptools.files.remote.cached_file import REQUEST

    path, start, end = request
    with suppress(ReadError), File(path) as file:
        file.prefetch([(start, end)], REQUEST)


def count_requests(parts: Iterable[Part]) -> int:
    """Count the requests that fetching parts takes; none for files on disk."""
    return len(_requests(filter(_is_fetched, parts)))


def _requests(parts: Iterable[Part]) -> list[Part]:
    """Join parts that lie close together into one request."""
    from ckptools.files.remote.cached_file import REQUEST, joined

    found: dict[Path, list[tuple[int, int]]] = {}
    for path, start, end in parts:
        found.setdefault(path, []).append((start, end))
    return [(path, *one) for path, ranges in found.items() for one in joined(ranges, REQUEST, NEAR)]


class _Run:
    """Parts that are fetched together."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._nbytes = 0
        self._spans: dict[Path, tuple[int, int]] = {}  # of each file what was added last, with what lies close to it

    def takes(self, parts: Sequence[Part]) -> bool:
        """Add the parts of an item, if they fit in; of the first one those that do."""
        spans: dict[Path, tuple[int, int]] = {}
        more = 0
        for path, start, end in parts:
            first, last = spans.get(path) or self._spans.get(path) or (start, start)
            if start - last > NEAR or first - end > NEAR:
                first = last = start
            spans[path] = min(first, start), max(last, end)
            more += spans[path][1] - spans[path][0] - (last - first)
        if self.parts and self._nbytes + more > WAITING:
            return False
        self.parts += parts if more <= WAITING else _first(parts)
        self._nbytes += more
        self._spans |= spans
        return True

    def fetch(self) -> None:
        """Fetch them; an error is left to who reads them."""
        in_threads(_fetch, _requests(self.parts), THREADS)


def _first(parts: Sequence[Part]) -> Iterator[Part]:
    """The first of them, as many as fit in."""
    nbytes = 0
    for path, start, end in parts:
        nbytes += end - start
        if nbytes <= WAITING:
            yield path, start, end


def fetched_runs(items: Iterable[T], reads: Callable[[T], Iterable[Part]]) -> Iterator[list[T]]:
    """The items in runs; what those of a run read is at hand, as far as it is small and lies in a store.

    Args:
        items: to go through; where no store is used they are one run.
        reads: what an item reads.
    """
    if not stores_are_used():
        yield list(items)
        return
    run, ahead = list[T](), _Run()
    for item in items:
        parts = list(filter(_is_fetched, reads(item)))
        if not ahead.takes(parts):
            ahead.fetch()
            yield run
            run, ahead = [], _Run()
            ahead.takes(parts)
        run.append(item)
    ahead.fetch()
    yield run


def fetched(items: Iterable[T], reads: Callable[[T], Iterable[Part]]) -> Iterator[T]:
    """The items; what each reads is at hand, as far as it is small and lies in a store."""
    for run in fetched_runs(items, reads):
        yield from run


def fetched_in_threads(
    work: Callable[[T], R],
    items: Iterable[T],
    threads: int,
    reads: Callable[[T], Iterable[Part]],
    give_up: Callable[[], None] = lambda: None,
) -> list[R]:
    """Run `work` on every item as `in_threads` does; `reads` is of `fetched_runs`."""
    return [result for run in fetched_runs(items, reads) for result in in_threads(work, run, threads, give_up)]


def copies_of(tensor: Tensor) -> list[Part]:
    """The parts that are read to compare the copies of a tensor's regions on several ranks."""
    return copies_among(tensor.found) if tensor.has_copies else []


def copies_among(shards: Sequence[Shard]) -> list[Part]:
    """The parts that are read to compare shards of one region."""
    count = Counter(shard.box for shard in shards)
    return [part for shard in shards if count[shard.box] > 1 for part in parts_of(shard)]


def parts_of_all(shards: Iterable[Shard]) -> list[Part]:
    """The parts that reading some shards reads."""
    return [part for shard in shards for part in parts_of(shard)]


def parts_of(shard: Shard) -> Iterator[Part]:
    """The parts that reading a shard reads."""
    for source in shard.sources:
        if source.contiguous:
            yield source.path, source.offset, source.offset + prod(source.shape) * ITEMSIZE[source.dtype]
        else:
            start, nbytes = source.record_span
            yield source.path, start, start + nbytes


class CopiesAhead:
    """Fetches copies of tensors when the first of them is to be compared, with those of the tensors that come next.

    Args:
        tensors: by their key paths, in the order in which they will be compared.
    """

    def __init__(self, tensors: Iterable[tuple[KeyPath, Tensor]] = ()) -> None:
        self._coming = dict(tensors) if stores_are_used() else {}

    def reach(self, path: KeyPath) -> None:
        """Have the copies of a tensor at hand."""
        if path not in self._coming:
            return
        paths = list(self._coming)
        batch = next(fetched_runs(paths[paths.index(path) :], lambda at: copies_of(self._coming[at])))
        for at in batch:
            del self._coming[at]


# -- work on many items, shared out to the ranks that do a command together --------------------------------------------


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
