"""Ranks that are killed at a moment of their own."""

from __future__ import annotations

import itertools
import os
import signal
import sys


def die_at(rank: int, event: str, name: str, count: int) -> None:
    """Kill this process, if it is that rank, before it does something for the so-manieth time.

    Args:
        rank: which one dies.
        event: an audit event, see sys.addaudithook.
        name: part of the name of the file or folder, in a set that is being written.
        count: which of these events.
    """
    seen = itertools.count(1)

    def killed(happened: str, arguments: tuple[object, ...]) -> None:
        if happened == event and "growing" in str(arguments[0]) and name in str(arguments[0]) and next(seen) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("RANK") == str(rank):
        sys.addaudithook(killed)
