"""A file that is read through a network, by as few requests as its reader's hints allow, and never as a whole.

A request costs as much time as the transfer of a megabyte. So what lies around a small read comes with it, what a
reader says that it will read comes in one piece, and both are kept for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ckptools.files.storage import Status

SMALL = 4 << 10
"""Bytes that a smaller read becomes; the first records and headers of a file lie in them."""

TAIL = 8 << 10
"""Bytes that a read near the end of the file becomes: a zip archive's end and the last entries of its directory."""

BLOCK = 8 << 20
"""Bytes of one request, at most, unless one read asks for more."""

GAP = 16 << 10
"""Bytes between two ranges that are fetched rather than making a second request."""

HELD = 4 * BLOCK
"""Bytes that are kept of one file, at most."""

MAX_ENDS = 4
"""Small pieces that are remembered of a file once it is closed."""

Fetch = Callable[[int, int], bytes]
"""Gives the bytes from an offset to before another, all of them, or raises OSError."""


class Held(NamedTuple):
    """Bytes of the file that are here.

    Attributes:
        start: offset of the first.
        data: they.
    """

    start: int
    data: bytes

    @property
    def end(self) -> int:
        """One past the last."""
        return self.start + len(self.data)


class RemoteFile:
    """An open file of a store; its attributes are those of `storage.Ranges`.

    Args:
        fetch: what reads a range of the version of the file that `status` is of.
        status: of the file.
        ends: what is known of its beginning and end, to which what is read of them is added.
    """

    descriptor = None

    def __init__(self, fetch: Fetch, status: Status, ends: list[Held] | None = None) -> None:
        self._fetch = fetch
        self.size, self.modified, self.version, self.bytes_read = status.size, status.modified, status.version, 0
        self._ends = [] if ends is None else ends
        self._held = list(self._ends)
        self._expected: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        """The `length` bytes at `offset`."""
        end = min(offset + length, self.size)
        pieces, at = [], offset
        while at < end:
            held = self._holding(at) or self._bring(at, end)
            piece = held.data[at - held.start : end - held.start]
            pieces.append(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """A buffer full at `offset`, or what one request gives of it."""
        end = min(offset + len(buffer), self.size)
        held = self._holding(offset) or self._bring(offset, end)
        piece = held.data[offset - held.start : end - held.start]
        buffer[: len(piece)] = piece
        return len(piece)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take note of bytes that will be read; those that lie close together will come by one request."""
        joined: list[tuple[int, int]] = []
        for start, end in sorted((max(start, 0), end) for start, end in ranges):
            if joined and start - joined[-1][1] <= GAP:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((start, end))
        self._expected = joined

    def close(self) -> None:
        """Forget what is here of it."""
        self._held.clear()

    def _holding(self, at: int) -> Held | None:
        return next((held for held in self._held if held.start <= at < held.end), None)

    def _bring(self, start: int, end: int) -> Held:
        """Fetch from `start` to `end`, or what is better fetched for it: more, or the first part."""
        first, last = self._widened(start, end)
        # What is here already is not fetched again.
        last = min((held.start for held in self._held if start < held.start < last), default=last)
        first = max((held.end for held in self._held if first < held.end <= start), default=first)
        held = Held(first, self._fetch(first, last))
        self.bytes_read += len(held.data)
        self._held.append(held)
        if len(held.data) <= TAIL and len(self._ends) < MAX_ENDS:
            self._ends.append(held)
        while len(self._held) > 1 and sum(len(one.data) for one in self._held) > HELD:
            del self._held[0]
        return held

    def _widened(self, start: int, end: int) -> tuple[int, int]:
        for first, last in self._expected:
            if first <= start < last:
                # From the range's beginning where it fits into one request with what is asked for.
                first = first if min(max(last, end), self.size) - first <= BLOCK else start
                return first, min(max(end, min(last, first + BLOCK)), self.size)
        if end - start >= SMALL:
            return start, end
        if start >= self.size - TAIL:
            return max(self.size - TAIL, 0), self.size
        return start, min(start + SMALL, self.size)
