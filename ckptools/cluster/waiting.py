"""A wait that ends in time, and says meanwhile what is waited for: silence looks like a hang."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Say = Callable[[str], None]

PAUSE = 0.05
"""Seconds between two looks."""

PATIENCE = 5.0
"""Seconds without a word: whoever comes meanwhile is not late."""

LONGER = 3.0
"""How many times as long each further silence is."""


def say_nothing(_: str) -> None:
    """Keep a line to oneself."""


def say_on_stderr(line: str) -> None:
    """Write a line to stderr, which is where people look and programs do not."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class Wait:
    """One wait for something that others do.

    Args:
        timeout: seconds after which it is over.
        say: what is told a line after some seconds, and others after ever longer ones.
    """

    def __init__(self, timeout: float, say: Say = say_nothing) -> None:
        self._timeout, self._say = timeout, say
        self._started = time.monotonic()
        self._next = PATIENCE

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._started + self._timeout

    def pause(self, what: Callable[[], str]) -> None:
        """Sleep until the next look.

        Args:
            what: says what is waited for, or nothing where somebody else says it; asked only when a line is due.
        """
        waited = time.monotonic() - self._started
        if self._next <= waited < self._timeout and (who := what()):
            self._say(f"waiting for {who}; gives up after {self._timeout:g} s, {waited:.0f} s are over")
            self._next *= LONGER
        time.sleep(PAUSE)
