"""Which messages this process prints, and which of its threads has the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock


class Printing:
    """Which messages this process prints, and whether in colour; set from `OutputOptions`.

    If `silent`, it prints nothing: another rank prints for it. `erase` erases a progress bar that is on the terminal.
    """

    quiet = verbose = debug = silent = False
    color = "auto"
    erase: Callable[[], None] | None = None


TERMINAL = RLock()
"""Held by the thread that prints, so that a progress bar is not drawn into a message."""


@contextmanager
def without_bar() -> Iterator[None]:
    """Erase a progress bar, and draw none while the `with` block prints."""
    with TERMINAL:
        if Printing.erase is not None:
            Printing.erase()
        yield
