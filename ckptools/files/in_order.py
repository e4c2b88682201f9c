"""Bytes that threads write at offsets in any order and one reader takes in order, of which few are in memory.

A thread that is too far ahead of the reader waits. It cannot wait for ever where bytes are begun in the order of their
offsets: the thread that has the lowest of them is at the reader's place, and writes there without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Condition

WINDOW = 32 << 20
"""Bytes behind the reader's place that are taken into memory."""


class StoppedError(Exception):
    """Nothing more is written or taken."""


class InOrder:
    """A run of bytes in the making; all but those at the reader's place lie at most `window` ahead of it.

    Once it is stopped, its methods raise a StoppedError.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._pieces: dict[int, bytes] = {}
        self._taken = 0
        self._stopped = False
        self._changed = Condition()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data` at `offset`, once the reader is near."""
        with self._changed:
            self._wait_while(lambda: offset > self._taken and offset + len(data) > self._taken + self._window)
            self._pieces[offset] = bytes(data)  # the caller uses its buffer again
            self._changed.notify_all()

    def take(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes from `start` to before `end`, when they are written; the reader's place has to come to `start`."""
        self.wait_for(start)
        while start < end:
            with self._changed:
                self._wait_while(lambda at=start: at not in self._pieces)  # type: ignore[misc]
                data = self._pieces.pop(start)
            yield data
            start += len(data)
            self.pass_over(len(data))

    def pass_over(self, nbytes: int) -> None:
        """Move the reader's place over bytes that are not written."""
        with self._changed:
            self._taken += nbytes
            self._changed.notify_all()

    def wait_for(self, place: int) -> None:
        """Return when the reader has come to a place."""
        with self._changed:
            self._wait_while(lambda: self._taken < place)

    def stop(self) -> None:
        """End whatever waits, and all that comes."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _wait_while(self, waits: Callable[[], bool]) -> None:
        while not self._stopped and waits():
            self._changed.wait()
        if self._stopped:
            raise StoppedError
