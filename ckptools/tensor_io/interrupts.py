"""Ctrl-C while threads work: held back to a moment when no lock is half taken.

Python raises KeyboardInterrupt between any two steps of the main thread, also inside the code that hands work to
threads; a lock that is left taken there would never let the process end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
        for held, handler in before.items():
            signal.signal(held, handler)
        if noted:
            raise KeyboardInterrupt
