"""How far a long copy is: one line that is redrawn on a terminal, a line every ten seconds elsewhere; on stderr."""

from __future__ import annotations

import sys
import time
from threading import Lock

from ckptools.views.words import clip, printable, size

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 10.0


class ProgressLine:
    """Counts bytes and says how many there are to go.

    Attributes:
        total: bytes that will be written.
        shown: whether anything has been printed.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.shown = False
        self._done = 0
        self._lock = Lock()
        self._terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._last = self._started

    def __call__(self, nbytes: int, fqn: str) -> None:
        """Count `nbytes` of the tensor `fqn`."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._last >= (TERMINAL_SECONDS if self._terminal else LOG_SECONDS):
                self._last = now
                self._print(now, fqn)

    def _print(self, now: float, fqn: str) -> None:
        seconds = now - self._started
        rate = self._done / seconds if seconds else 0.0
        percent = 100 * self._done // max(self.total, 1)
        line = f"{percent:3d}%  {size(self._done)} of {size(self.total)}  {size(int(rate))}/s"
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{line}  {clip(printable(fqn), 40)}")
        else:
            sys.stderr.write(f"[{int(seconds) // 60:02d}:{int(seconds) % 60:02d}] {line}\n")
        sys.stderr.flush()
        self.shown = True

    def clear(self) -> None:
        """Take the line off a terminal."""
        if self._terminal and self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
