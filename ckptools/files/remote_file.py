"""A file that is read through a network, by as few requests as its reader's hints allow, and never as a whole.

A request costs as much time as the transfer of a megabyte. So what lies around a small read comes with it, what a
reader says that it will read comes in one piece, and both are kept for a moment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from threading import Lock
from typing import NamedTuple

from ckptools.files.storage import Status

SMALL = 4 << 10
"""Bytes that a smaller read becomes; the first records and headers of a file lie in them."""

LARGE = 1 << 20
"""Bytes that a small read becomes, at most, where most of what came with earlier ones was read."""

TAIL = 8 << 10
"""Bytes that a read near the end of the file becomes: a zip archive's end and the last entries of its directory."""

TOGETHER = 64 << 10
"""Bytes of a read from which on threads do not wait for what others fetch of the same file."""

BLOCK = 4 << 20
"""Bytes of one request, at most, unless one read asks for more."""

GAP = 16 << 10
"""Bytes between two ranges that are fetched rather than making a second request."""

MAX_KEPT = 32 << 20
"""Bytes that are kept of one file."""

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


class Known:
    """What is here of a file, however often it is opened; threads may share it.

    Attributes:
        lock: held while something is fetched for a small read.
        grown: called with the bytes by which what is kept has grown.
        fetched: bytes that were fetched of it.
        read: bytes that were asked for; fewer where much came that nobody wanted.
    """

    __slots__ = ("_changing", "_pieces", "_starts", "fetched", "grown", "lock", "nbytes", "read", "window")

    def __init__(self, grown: Callable[[int], None] = lambda _: None) -> None:
        self._pieces: dict[int, Held] = {}  # by offset, the latest last; none lies inside of another
        self._starts: list[int] = []
        self._changing = Lock()
        self.grown, self.lock = grown, Lock()
        self.fetched = self.read = self.nbytes = 0
        self.window = SMALL

    def at(self, place: int) -> Held | None:
        """The piece that has the byte at a place."""
        with self._changing:
            found = self._before(place)
        return found if found is not None and found.end > place else None

    def around(self, start: int, end: int) -> tuple[int, int]:
        """The end of the last piece before `start`, 0 if there is none, and the start of the next one before `end`."""
        with self._changing:
            before = self._before(start)
            after = bisect_right(self._starts, start)
            return before.end if before else 0, min([*self._starts[after : after + 1], end])

    def add(self, piece: Held) -> None:
        """Keep a piece, and let go of the oldest where that is too much."""
        with self._changing:
            before, own = self.nbytes, self._before(piece.start)
            if own is not None and own.end >= piece.end:
                return
            self._insert(piece)
            while self.nbytes > MAX_KEPT and len(self._pieces) > 1:
                self._remove(next(iter(self._pieces)))
            more = self.nbytes - before
        self.grown(more)

    def clear(self) -> int:
        """Let go of all pieces; how many bytes they were."""
        with self._changing:
            nbytes, self.nbytes = self.nbytes, 0
            self._pieces, self._starts = {}, []
        return nbytes

    def _before(self, place: int) -> Held | None:
        """The last piece that begins at a place or before; no other reaches further."""
        after = bisect_right(self._starts, place)
        return self._pieces[self._starts[after - 1]] if after else None

    def _insert(self, piece: Held) -> None:
        first = bisect_left(self._starts, piece.start)
        while first < len(self._starts) and self._pieces[self._starts[first]].end <= piece.end:
            self._remove(self._starts[first])
        self._pieces[piece.start] = piece
        insort(self._starts, piece.start)
        self.nbytes += len(piece.data)

    def _remove(self, start: int) -> None:
        self.nbytes -= len(self._pieces.pop(start).data)
        del self._starts[bisect_left(self._starts, start)]

    def next_window(self) -> int:
        """Bytes that a small read becomes now: twice those of before where at least half of all bytes was wanted."""
        self.window = min(2 * self.window, LARGE) if self.fetched <= 2 * self.read and self.fetched else SMALL
        return self.window


def joined(ranges: Iterable[tuple[int, int]], most: int | None = None, gap: int = GAP) -> list[tuple[int, int]]:
    """Ranges in order, those as one that overlap or lie so close together that one request is better than two.

    Args:
        ranges: each from an offset to before another.
        most: bytes of one request; a range that is larger is left out. None for any.
        gap: bytes between two ranges that are fetched rather than making a second request.
    """
    found: list[tuple[int, int]] = []
    for start, end in sorted((max(start, 0), end) for start, end in ranges):
        if most is not None and end - start > most:
            continue
        if found and start - found[-1][1] <= gap and (most is None or end - found[-1][0] <= most):
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


class RemoteFile:
    """An open file of a store; its attributes are those of `storage.Ranges`.

    Args:
        fetch: what reads a range of the version of the file that `status` is of.
        status: of the file.
        known: what is here of it already, and to which what is fetched is added.
    """

    descriptor: int | None = None

    def __init__(self, fetch: Fetch, status: Status, known: Known | None = None) -> None:
        self._fetch, self._known = fetch, known or Known()
        self.size, self.modified, self.bytes_read = status.size, status.modified, 0
        self.version = status.version
        self._block: Held | None = None
        self._expected: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        """The `length` bytes at `offset`."""
        end = min(offset + length, self.size)
        self._known.read += max(end - offset, 0)
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
        piece = memoryview(held.data)[offset - held.start : end - held.start]
        self._known.read += len(piece)
        buffer[: len(piece)] = piece
        return len(piece)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take note of bytes that will be read; those that lie close together will come by one request."""
        self._expected = joined(ranges)

    def prefetch(self, ranges: Iterable[tuple[int, int]], most: int) -> None:
        """Fetch what is not here yet of some ranges, those that lie close together by one request, and keep it."""
        for first, last in joined(ranges, most):
            start, end = first, min(last, self.size)
            while start < end and (held := self._known.at(start)):
                start = held.end
            while start < end and (held := self._known.at(end - 1)):
                end = held.start
            if start < end:
                self._known.add(self._fetched(start, end))

    def close(self) -> None:
        """Let go of its last block; small pieces are kept for who opens it next."""
        self._block = None

    def _holding(self, at: int) -> Held | None:
        block = self._block
        return block if block is not None and block.start <= at < block.end else self._known.at(at)

    def _bring(self, start: int, end: int) -> Held:
        """Fetch from `start` to `end`, or what is better fetched for it: more, or the first part."""
        if end - start >= TOGETHER:
            return self._brought(start, end)
        # What one thread fetches for a small read is often what others are about to ask for.
        with self._known.lock:
            return self._holding(start) or self._brought(start, end)

    def _brought(self, start: int, end: int) -> Held:
        first, last = self._widened(start, end)
        # What is here already is not fetched again.
        before, last = self._known.around(start, last)
        held = self._fetched(max(first, before), last)
        if len(held.data) <= LARGE:
            self._known.add(held)
        else:
            self._block = held
        return held

    def _fetched(self, start: int, end: int) -> Held:
        held = Held(start, self._fetch(start, end))
        self.bytes_read += len(held.data)
        self._known.fetched += len(held.data)
        return held

    def _widened(self, start: int, end: int) -> tuple[int, int]:
        window = self._known.next_window()
        for first, last in self._expected:
            if first <= start < last and (last - first >= window or window == SMALL):
                # From the range's beginning where it fits into one request with what is asked for.
                first = first if min(max(last, end), self.size) - first <= BLOCK else start
                return first, min(max(end, min(last, first + BLOCK)), self.size)
        if end - start < SMALL and start >= self.size - TAIL:
            return max(self.size - TAIL, 0), self.size
        return start, min(max(end, start + window), self.size)
