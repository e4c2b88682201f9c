"""How long a request may take, how often one is made again that failed, and how long is waited before."""

from __future__ import annotations

import os
import random
import re
import time

from ckptools.files.remote_store import RemoteError

TIMEOUT = "CKPTOOLS_TIMEOUT"
"""Environment variable with the seconds that a request may take."""

RETRIES = 5
FIRST_WAIT = 0.2
"""Seconds before the second try, at most; each further wait is at most twice as long."""

LONGEST_WAIT = 30.0
"""Seconds that a server may ask us to wait (`Retry-After`)."""


def timeout() -> float:
    """Seconds that a request may take: 30, or what the environment says."""
    told = os.environ.get(TIMEOUT, "")
    return float(told) if re.fullmatch(r"\d+(\.\d+)?", told) and float(told) else 30.0


class Tries:
    """How often a request has failed; it waits between tries, longer each time."""

    def __init__(self) -> None:
        self._failures = 0

    def failed(self, reason: str, wait: float | None = None, fresh: bool = False) -> None:
        """Wait before the next try.

        Args:
            reason: why this one failed.
            wait: seconds that the server asks for.
            fresh: whether much had come, so that failures before do not count.

        Raises:
            RemoteError: it has failed too often, or is to wait for too long.
        """
        self._failures = 1 if fresh else self._failures + 1
        if self._failures > RETRIES:
            raise RemoteError(f"{reason}, {self._failures} times; try again later")
        if wait is not None and wait > LONGEST_WAIT:
            raise RemoteError(f"{reason} and asks to wait {wait:.0f} seconds; try again then")
        longest = FIRST_WAIT * 2 ** (self._failures - 1)
        time.sleep(random.uniform(longest / 2, longest) if wait is None else wait)
