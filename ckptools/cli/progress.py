"""Progress of long work on stderr: one line that is redrawn on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from ckptools.cli.printing import Printing
from ckptools.text import clip_middle, duration, plural, printable, size

if TYPE_CHECKING:
    from typing_extensions import Self


TERMINAL_SECONDS = 0.2
LOG_SECONDS = 10.0
SECONDS_FOR_A_RATE = 5.0
SHARE_FOR_A_RATE = 0.02
"""Before so much has passed and is done, the time that is left would be a guess."""


class Line:
    """A line on stderr that says how far something is; it goes when the `with` ends, so that an error has its own."""

    def __init__(self) -> None:
        self.shown = False
        # A terminal that cannot erase a line gets one every ten seconds.
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._started = self._last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to print again."""
        now = time.monotonic()
        quiet = Printing.silent or Printing.quiet
        if quiet or now - self._last < (TERMINAL_SECONDS if self._terminal else LOG_SECONDS):
            return False
        self._last = now
        return True

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._last - self._started

    def print(self, line: str, name: str) -> None:
        """Show how far it is; on a terminal also what it is at."""
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{line}  {clip_middle(printable(name), 40)}")
        else:
            seconds = int(self.seconds)
            sys.stderr.write(f"[{seconds // 60:02d}:{seconds % 60:02d}] {line}\n")
        sys.stderr.flush()
        self.shown = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class ProgressLine(Line):
    """Counts bytes and says how many there are to go; of several ranks, those that this one does. 0 is for unknown."""

    def __init__(self, total: int = 0) -> None:
        super().__init__()
        self.expect(total)
        self._done = 0
        self._lock = Lock()

    def expect(self, total: int) -> None:
        """Set how many bytes there will be."""
        from ckptools.cluster.team import current

        self._ranks = current().world_size
        self.total = total // self._ranks

    def __call__(self, nbytes: int, fqn: str) -> None:
        """Count `nbytes` of the tensor `fqn`."""
        with self._lock:
            self._done += nbytes
            if self.due():
                who = f"  (rank 0 of {self._ranks})" if self._ranks > 1 else ""
                self.print(self._share() + who, fqn)

    def _share(self) -> str:
        """The share that is done, or the bytes read if the total is unknown."""
        if not self.total:
            return f"{size(self._done)} read"
        percent = min(100, 100 * self._done // self.total)  # tied weights are read back twice
        rate = f"{size(int(self._done / self.seconds))}/s" if self.seconds else ""
        return f"{percent:3d}%  {size(self._done)} of {size(self.total)}  {rate}{self._left()}"

    def _left(self) -> str:
        """The time that the rest takes at this rate, once there is a rate."""
        if self.seconds < SECONDS_FOR_A_RATE or not self.total * SHARE_FOR_A_RATE < self._done < self.total:
            return ""
        return f"  {duration(self.seconds * (self.total - self._done) / self._done)} left"


class CountLine(Line):
    """Counts what is done one by one: a run may have hundreds of checkpoints, and of a thousand files."""

    def __init__(self, done: str, noun: str) -> None:
        super().__init__()
        self._words, self._noun = done, noun
        self._count = 0

    def __call__(self, path: Path) -> None:
        """Count the one at a path."""
        self._count += 1
        if self.due():
            self.print(f"{self._words} {plural(self._count, self._noun)}", path.name)
