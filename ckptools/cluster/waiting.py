"""A wait with a limit that prints what it waits for: silence looks like a hang."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Say = Callable[[str], None]

PAUSE = 0.05
"""Seconds between two looks."""

PATIENCE = 5.0
"""Seconds before the first line is printed."""

LONGER = 3.0
"""Factor by which the time to each further line grows."""


def say_nothing(_: str) -> None:
    """Print nothing."""


def say_on_stderr(line: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class Wait:
    """One wait for other processes, over after `timeout` seconds, which prints lines at growing intervals."""

    def __init__(self, timeout: float, say: Say = say_nothing) -> None:
        self._timeout, self._say = timeout, say
        self._started = time.monotonic()
        self._next = PATIENCE

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._started + self._timeout

    def pause(self, what: Callable[[], str]) -> None:
        """Sleep until the next look; `what` names what is waited for, or "" where another process prints it."""
        waited = time.monotonic() - self._started
        if self._next <= waited < self._timeout and (who := what()):
            self._say(f"waiting for {who}; gives up after {self._timeout:g} s, {waited:.0f} s are over")
            self._next *= LONGER
        time.sleep(PAUSE)
