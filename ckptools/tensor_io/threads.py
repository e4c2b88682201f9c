"""Work shared out to a few threads: the first failure, or an interrupt, ends it in good order.

Python raises KeyboardInterrupt between any two steps of the main thread, also inside the code that hands work to
threads; a lock that is left taken there would never let the process end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from ckptools.files.remote.path import stores_are_used

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


# -- progress ---------------------------------------------------------------------------------------------------------


Progress = Callable[[int, str], None]
"""Called with bytes that were read or written, and the tensor they are of."""


def no_progress(_nbytes: int, _name: str) -> None:
    """Report nothing: the `Progress` where the caller gave none."""


# -- interrupts -------------------------------------------------------------------------------------------------------


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
