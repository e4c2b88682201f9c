"""Fetch small parts of many remote files together, before threads or ranks read them one by one.

Comparing a tensor's copies reads them rank by rank and would wait for one request per file. Fetched parts stay in
memory, so no more is fetched than fits; large parts are read when needed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
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

# -- work shared by a few threads: the first failure, or an interrupt, stops them all ----------------------------------
# Python raises KeyboardInterrupt between any two steps of the main thread, also inside the code that hands work to
# threads; a lock that stays locked there would keep the process from ever ending.


INTERRUPT_SECONDS = 0.1
"""Seconds between two checks of the main thread for an interrupt."""

T = TypeVar("T")
R = TypeVar("R")


def thread_count(jobs: int | None, most: int = 8, per_core: int = 1) -> int:
    """The number of reading threads: `jobs` if given, else `per_core` times the cores, at most `most`.

    For remote files, where threads mostly wait, it is twice `most`, whatever the number of cores.
    """
    return jobs or (2 * most if stores_are_used() else min(most, per_core * (os.cpu_count() or 1)))


def in_threads(
    work: Callable[[T], R], items: Iterable[T], threads: int, give_up: Callable[[], None] = lambda: None
) -> list[R]:
    """Run `work` on every item and return the results in the order of the items.

    Args:
        work: called in some thread, once for each item.
        items: the items.
        threads: number of threads, at least one.
        give_up: called when a call has failed, or the user interrupts, so that running calls can end early; no
            further calls are started.

    Raises:
        Exception: the first exception that a call raised.
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

    # Threads take items themselves: a future for each would take longer than a small tensor does.
    count = min(max(1, threads), len(waiting))
    with defer_interrupts() as interrupted, ThreadPoolExecutor(max(1, count)) as pool:
        pending: set[Future[None]] = set()
        failed: BaseException | None = None
        try:
            for _ in range(count):
                pending.add(pool.submit(copy_context().run, work_off))
            while pending and not interrupted and failed is None:
                done, pending = wait(pending, INTERRUPT_SECONDS, FIRST_EXCEPTION)
                failed = next((f.exception() for f in done if f.exception() is not None), None)
        finally:  # also ends the threads if a signal handler of the caller raises
            waiting.clear()
            if pending:
                give_up()
        if failed is not None:
            raise failed
    return [results[number] for number in sorted(results)]


# -- progress ----------------------------------------------------------------------------------------------------------


Progress = Callable[[int, str], None]
"""Called with bytes that were read or written, and the tensor they belong to."""


def no_progress(_nbytes: int, _name: str) -> None:
    """Report nothing: the default `Progress`."""


def begin_stage(progress: Progress | None, stage: str, nbytes: int = 0) -> None:
    """Tell a progress bar which pass over the data begins, and how many bytes more than expected it takes.

    A function of the user's is not told: only an object with a method `begin` is.
    """
    begin = getattr(progress, "begin", None)
    if begin is not None:
        begin(stage, nbytes)


# -- interrupts --------------------------------------------------------------------------------------------------------


@contextmanager
def defer_interrupts() -> Iterator[list[int]]:
    """Yield a list that collects interrupts, and raise KeyboardInterrupt at the end if there was one.

    Only in the main thread, and only for signals whose handler would raise it; other signals are unaffected.
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


# -- small parts, fetched together -------------------------------------------------------------------------------------


THREADS = 32
"""Concurrent requests."""

NEAR = 64 << 10
"""A gap of at most this many bytes between two parts is fetched with them: faster than a second request."""

WAITING = 16 << 20
"""At most this many bytes are fetched ahead; a store caches four times as much."""


Part = tuple[Path, int, int]
"""A byte range of a file: path, first offset, end offset."""


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
    """Count the requests that fetching the parts would take; none for files on disk."""
    return len(_requests(filter(_is_fetched, parts)))


def _requests(parts: Iterable[Part]) -> list[Part]:
    """Merge byte ranges that lie close together into one request."""
    from ckptools.files.remote.cached_file import REQUEST, joined

    found: dict[Path, list[tuple[int, int]]] = {}
    for path, start, end in parts:
        found.setdefault(path, []).append((start, end))
    return [(path, *one) for path, ranges in found.items() for one in joined(ranges, REQUEST, NEAR)]


class _Run:
    """Parts to fetch together."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._nbytes = 0
        self._spans: dict[Path, tuple[int, int]] = {}  # by file: the range added last, merged with its neighbours

    def takes(self, parts: Sequence[Part]) -> bool:
        """Add the parts of an item, if they fit; of a first item that is too large, the parts that do."""
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
        """Fetch the parts; an error is ignored here and occurs again when they are read."""
        in_threads(_fetch, _requests(self.parts), THREADS)


def _first(parts: Sequence[Part]) -> Iterator[Part]:
    """The first parts, up to `WAITING` bytes."""
    nbytes = 0
    for path, start, end in parts:
        nbytes += end - start
        if nbytes <= WAITING:
            yield path, start, end


def fetched_runs(items: Iterable[T], reads: Callable[[T], Iterable[Part]]) -> Iterator[list[T]]:
    """Yield the items in runs; the small remote parts that a run reads are fetched before it is yielded.

    Args:
        items: the items; without remote files they are one run.
        reads: the parts that an item reads.
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
    """Yield the items, after fetching the small remote parts that each reads."""
    for run in fetched_runs(items, reads):
        yield from run


def fetched_in_threads(
    work: Callable[[T], R],
    items: Iterable[T],
    threads: int,
    reads: Callable[[T], Iterable[Part]],
    give_up: Callable[[], None] = lambda: None,
) -> list[R]:
    """Run `work` on every item as `in_threads` does; `reads` is as in `fetched_runs`."""
    return [result for run in fetched_runs(items, reads) for result in in_threads(work, run, threads, give_up)]


def copies_of(tensor: Tensor) -> list[Part]:
    """The byte ranges that comparing a tensor's replicas reads."""
    return copies_among(tensor.found) if tensor.has_copies else []


def copies_among(shards: Sequence[Shard]) -> list[Part]:
    """The byte ranges that comparing shards of equal boxes reads."""
    count = Counter(shard.box for shard in shards)
    return [part for shard in shards if count[shard.box] > 1 for part in parts_of(shard)]


def parts_of_all(shards: Iterable[Shard]) -> list[Part]:
    """The byte ranges that reading some shards reads."""
    return [part for shard in shards for part in parts_of(shard)]


def parts_of(shard: Shard) -> Iterator[Part]:
    """The byte ranges in files that hold a shard's elements."""
    for source in shard.sources:
        if source.contiguous:
            yield source.path, source.offset, source.offset + prod(source.shape) * ITEMSIZE[source.dtype]
        else:
            start, nbytes = source.record_span
            yield source.path, start, start + nbytes


class CopiesAhead:
    """Fetches copies of tensors when the first is about to be compared, together with the next tensors' copies.

    Args:
        tensors: by their key paths, in the order in which they will be compared.
    """

    def __init__(self, tensors: Iterable[tuple[KeyPath, Tensor]] = ()) -> None:
        self._coming = dict(tensors) if stores_are_used() else {}

    def reach(self, path: KeyPath) -> None:
        """Fetch the copies of a tensor, if they are not fetched yet."""
        if path not in self._coming:
            return
        paths = list(self._coming)
        batch = next(fetched_runs(paths[paths.index(path) :], lambda at: copies_of(self._coming[at])))
        for at in batch:
            del self._coming[at]


# -- work shared by the ranks that run a command together --------------------------------------------------------------


def in_ranks(
    work: Callable[[T], R],
    items: Iterable[T],
    threads: int,
    weight: Callable[[T], int],
    give_up: Callable[[], None] = lambda: None,
    reads: Callable[[T], Iterable[Part]] = lambda _: (),
) -> list[R]:
    """Run `work` on every item, each on one rank, and return all results on all ranks, in the order of the items.

    Args:
        work: called in some thread of some rank, once for each item; its result is sent to the other ranks.
        items: the items, the same on every rank.
        threads: number of threads of each rank, at least one.
        weight: the cost of an item, in bytes.
        give_up: called when a call has failed, or the user interrupts, so that running calls can end early.
        reads: the parts that an item reads; remote parts are fetched for many items together.

    Raises:
        Exception: the first exception that a call raised, on any rank.
    """
    team = current()
    if team.world_size == 1:
        return fetched_in_threads(work, items, threads, reads, give_up)
    every = list(items)
    own = team.share([weight(item) for item in every])
    results = fetched_in_threads(work, every[own.start : own.stop], threads, reads, give_up)
    return [result for part in team.gather(results) for result in part]
