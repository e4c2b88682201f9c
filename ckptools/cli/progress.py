"""Show the progress of a command on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from ckptools.cli.terminal import TERMINAL, Printing
from ckptools.text import clip_middle, encodable, plural, printable, size

if TYPE_CHECKING:
    from typing_extensions import Self

TICK = 0.2
"""Seconds between two drawings of a bar."""

FIRST = 1.0
"""Seconds before a bar is drawn, so that a short command shows none."""

LOG = 10.0
"""Seconds before the first line and between two lines where there is no terminal."""

WINDOW = 10.0
"""The rate is that of the last ten seconds: data that was cached at the start says nothing of the rest."""

WIDEST_BAR = 30
NARROWEST_BAR = 10
SHORTEST_NAME = 10


class Progress:
    """The progress of a command: bytes of tensors, of a known or unknown total, or items such as files.

    Workers call it, or `item`, from any thread; a thread of its own draws it while the `with` block runs. The block
    erases the bar at its end, before an error is printed.
    """

    def __init__(
        self,
        total: int = 0,
        stage: str = "",
        noun: str = "",
        clock: Callable[[], float] = time.monotonic,
        ticking: bool = True,
    ) -> None:
        """Begin to count.

        Args:
            total: expected number of bytes; 0 if unknown.
            stage: what is done first: `reading the structure`.
            noun: what an item is: `file`.
            clock: returns seconds.
            ticking: whether the `with` block draws; False if the caller calls `tick`.
        """
        self._stage, self._noun, self._clock, self._ticking = stage, noun, clock, ticking
        self._ranks = 1
        self._total = self._of_this_rank(total)
        self._done = self._items = 0
        self._name = ""
        # A terminal that cannot erase a line is treated as a file.
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn = 0
        self._started = self._shown = clock()
        self._samples = deque([(self._started, 0)])
        self._counting = Lock()  # not TERMINAL: a terminal that is stopped does not stop the work
        self._over = Event()
        self._thread: Thread | None = None

    def __call__(self, nbytes: int, name: str) -> None:
        """Count bytes of the tensor or file of this name."""
        with self._counting:
            self._done += nbytes
            self._name = name

    def item(self, path: Path) -> None:
        """Count the item at a path."""
        with self._counting:
            self._items += 1
            self._name = path.name

    def expect(self, total: int) -> None:
        """Set the expected number of bytes."""
        self._total = self._of_this_rank(total)

    def _of_this_rank(self, nbytes: int) -> int:
        """The part of some bytes that this rank reads, if several share the work."""
        if not nbytes:
            return 0  # items are counted, before ranks start
        from ckptools.cluster.team import current

        self._ranks = current().world_size
        return nbytes // self._ranks

    def begin(self, stage: str, nbytes: int) -> None:
        """Begin a pass over `nbytes` more than was expected; `stage` is its name, such as `reading back`."""
        with self._counting:
            self._stage = stage
            self._total += self._of_this_rank(nbytes)

    def __enter__(self) -> Self:
        if self._ticking and not (Printing.silent or Printing.quiet):
            self._thread = Thread(target=self._tick_on, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.erase()

    def _tick_on(self) -> None:
        while not self._over.wait(TICK):
            self.tick()

    def tick(self) -> None:
        """Draw the bar, or print the next line, if it is time."""
        with TERMINAL, contextlib.suppress(OSError, ValueError):  # stderr may be closed; the work goes on
            now = self._clock()
            due = now - self._started >= FIRST if self._terminal else now - self._shown >= LOG
            known = self._done or self._total or self._stage
            if not due or not known or Printing.silent or Printing.quiet:
                return
            self._shown = now
            self._samples.append((now, self._done))
            while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW:
                self._samples.popleft()
            if self._terminal:
                self._draw()
            else:
                seconds = int(now - self._started)
                parts = [part for part in self._facts() if part]
                line = f"[{seconds // 60:02d}:{seconds % 60:02d}] {'  '.join(parts)}"
                sys.stderr.write(f"{encodable(line, sys.stderr.encoding)}\n")
                sys.stderr.flush()

    def erase(self) -> None:
        """Erase the bar; the next tick draws it again, on the line where the cursor is then."""
        with TERMINAL, contextlib.suppress(OSError, ValueError):
            if self._drawn:
                sys.stderr.write(self._erasure(_columns()))
                sys.stderr.flush()
            self._drawn = 0
            Printing.erase = None

    def _draw(self) -> None:
        columns = _columns()
        line = encodable(self._line(columns - 1), sys.stderr.encoding)  # the last column would move the cursor on
        sys.stderr.write(f"{self._erasure(columns)}{line}")
        sys.stderr.flush()
        self._drawn = len(line)
        Printing.erase = self.erase

    def _erasure(self, columns: int) -> str:
        """Return control characters that erase the bar; a terminal that became narrower has wrapped it."""
        above = max(self._drawn - 1, 0) // columns
        return "\r" + (f"\x1b[{above}A\x1b[J" if above else "\x1b[K")

    def _facts(self) -> tuple[str, str, str, str, str]:
        """Return share, stage, amount, rate and time left, "" if unknown."""
        who = f"(rank 0 of {self._ranks})" if self._ranks > 1 else ""
        stage = " ".join(filter(None, (self._stage, who)))
        if not self._done and not self._total:
            return "", stage, plural(self._items, self._noun) if self._items else "", "", ""
        (then, before), (now, _) = self._samples[0], self._samples[-1]
        rate = (self._done - before) / (now - then) if now > then else 0.0
        if not self._total:
            return "", stage, size(self._done), f"{size(int(rate))}/s", ""
        done = min(self._done, self._total)  # tied weights are read back twice
        left = f"{_time(max(1, round((self._total - done) / rate)))} left" if rate and done < self._total else ""
        return f"{100 * done // self._total:3d}%", stage, _amount(done, self._total), f"{size(int(rate))}/s", left

    def _line(self, width: int) -> str:
        """Fit the facts into a line: the amount gives way first, then the bar, the stage and the rate."""
        share, stage, amount, rate, left = self._facts()
        bar = "#" * max(NARROWEST_BAR, min(WIDEST_BAR, width // 4)) if share else ""
        parts = {"share": share, "bar": bar, "stage": stage, "amount": amount, "rate": rate, "left": left}
        for given_up in ("amount", "bar", "stage", "rate", "left"):
            if _width(parts) <= width:
                break
            parts[given_up] = ""
        if parts["bar"]:
            parts["bar"] = _bar(self._done / self._total, len(bar))
        room = width - _width(parts) - 2
        # A name of other characters may take more columns than it has characters.
        name = [clip_middle(self._name, room)] if self._name.isascii() and room >= SHORTEST_NAME else []
        return printable("  ".join([*filter(None, [*parts.values(), *name])]))[:width]


def _width(parts: dict[str, str]) -> int:
    return len("  ".join(filter(None, parts.values())))


def _columns() -> int:
    """Width of the terminal behind stderr, asked each time: the user may change it."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 80


def _bar(share: float, width: int) -> str:
    """Draw a bar in eighths of a column, or in whole columns if the terminal has no block characters."""
    share = min(share, 1.0)
    blocks = "█▏▎▍▌▋▊▉░"
    if encodable(blocks, sys.stderr.encoding) != blocks:
        return ("#" * int(share * width)).ljust(width, ".")
    full, eighths = divmod(int(share * width * 8), 8)
    return ("█" * full + (blocks[eighths] if eighths else "")).ljust(width, "░")


def _amount(done: int, total: int) -> str:
    """Format a part of a total, the unit once: `7.8 of 12.6 GiB`."""
    part, whole = size(done), size(total)
    unit = whole.rpartition(" ")[2]
    return f"{part.removesuffix(f' {unit}')} of {whole}"


def _time(seconds: int) -> str:
    """Format a time left: `5 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
