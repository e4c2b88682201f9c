"""A remote file read by ranges: blocks that were fetched are kept, and a small read brings those behind it.

A request costs as much time as the transfer of a megabyte.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from threading import Lock

from ckptools.files.storage import Status

BLOCK = 1 << 10
"""Bytes of a block; ranges are fetched from a multiple of it, unless they are large."""

SMALL = 4 << 10
"""Bytes that a small read becomes; the first records and headers of a file lie in them."""

TAIL = 8 << 10
"""Bytes fetched for a read near the end of a file: a zip archive's end and the last entries of its directory."""

LARGE = 1 << 20
"""Bytes up to which a read is kept, and that sequential small reads grow to."""

REQUEST = 4 << 20
"""Bytes of one request, at most, that fetches several ranges."""

GAP = 16 << 10
"""Bytes between two ranges that are fetched rather than making a second request."""

MAX_KEPT = 64 << 20
"""Bytes kept of all files of a store together; the file that was used longest ago goes first."""

Fetch = Callable[[int, int], bytes]
"""Returns the bytes from an offset to before another, all of them, or raises OSError."""


class BlockCache:
    """Blocks of the files of one store, by file and number; threads may share it."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, dict[int, bytes]] = OrderedDict()
        self._lock = Lock()
        self.count = 0

    def get(self, key: str, start: int, end: int) -> list[bytes | None]:
        """The blocks that have the bytes of a range, in order; None for each that is not here."""
        with self._lock:
            blocks = self._files.get(key, {})
            if blocks:
                self._files.move_to_end(key)
            return list(map(blocks.get, range(start // BLOCK, -(-end // BLOCK))))

    def put(self, key: str, start: int, data: bytes) -> None:
        """Keep the blocks of a range that begins where a block does and ends where one does, or the file."""
        new = {(start + at) // BLOCK: data[at : at + BLOCK] for at in range(0, len(data), BLOCK)}
        with self._lock:
            kept = self._files.setdefault(key, {})
            self.count -= len(kept)
            kept |= new
            self.count += len(kept)
            self._files.move_to_end(key)
            while self.count * BLOCK > MAX_KEPT and len(self._files) > 1:
                self.count -= len(self._files.popitem(last=False)[1])
            if self.count * BLOCK > MAX_KEPT:  # of this file alone
                self._files[key], self.count = new, len(new)


def joined(ranges: Iterable[tuple[int, int]], most: int | None = None, gap: int = GAP) -> list[tuple[int, int]]:
    """Sort ranges, and join those that overlap or lie at most `gap` bytes apart to requests of at most `most` bytes.

    Each is from an offset to before another; one of more than `most` bytes is left out.
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
    """An open file of a store, read as a `storage.DiskFile` is.

    `fetch` reads a range of the version that `status` is of. `lock` is taken to fetch for a small read, as other
    threads often want the same block.
    """

    descriptor: int | None = None

    def __init__(self, key: str, fetch: Fetch, status: Status, cache: BlockCache, lock: Lock) -> None:
        self._key, self._fetch, self._cache, self._lock = key, fetch, cache, lock
        self.size, self.modified, self.version, self.bytes_read = status.size, status.modified, status.version, 0
        self._next, self._window = -1, SMALL
        self._expected: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        """The `length` bytes at `offset`."""
        end = min(offset + length, self.size)
        if offset >= end:
            return b""
        kept = None not in self._cache.get(self._key, offset, end)
        if not kept and end - offset > LARGE:
            return self._fetched(offset, end)
        with nullcontext() if kept else self._lock:
            first, last = (offset, end) if kept else self._widened(offset, end)
            data = self._bring(first, last)
        skipped = first - first % BLOCK
        return data[offset - skipped : end - skipped]

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer with the bytes at `offset`; return the number of bytes read."""
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Note what will be read, so that ranges close together come by one request."""
        self._expected = joined(ranges)

    def prefetch(self, ranges: Iterable[tuple[int, int]], most: int = REQUEST) -> None:
        """Fetch and keep what is not here yet of some ranges, by requests of at most `most` bytes."""
        for start, end in joined(ranges, most):
            self._bring(start, min(end, self.size))

    def close(self) -> None:
        """Do nothing: what was fetched is kept for who opens it next."""

    def _widened(self, start: int, end: int) -> tuple[int, int]:
        """A range with what is likely to be read next."""
        if None not in self._cache.get(self._key, start, end):  # another thread has brought it
            return start, end
        for first, last in self._expected:
            if first <= start < last:
                # From the range's beginning, where it fits into one request with what is asked for.
                first = first if max(last, end) - first <= REQUEST else start
                return first, min(max(end, min(last, first + REQUEST)), self.size)
        if end > self.size - TAIL:
            return min(start, max(self.size - TAIL, 0)), self.size
        first = start - start % BLOCK
        behind = first <= self._next < end  # one read behind the other
        self._window = min(2 * self._window, LARGE) if behind else SMALL
        return start, min(max(end, first + self._window), self.size)

    def _bring(self, start: int, end: int) -> bytes:
        """The blocks of a range; all between the first and the last that are not here are fetched."""
        first, blocks = start // BLOCK, self._cache.get(self._key, start, end)
        missing = [number for number, block in enumerate(blocks) if block is None]
        if not missing:
            return b"".join(filter(None, blocks))
        begin, stop = (first + missing[0]) * BLOCK, min((first + missing[-1] + 1) * BLOCK, self.size)
        data = self._fetched(begin, stop)
        self._next = stop
        self._cache.put(self._key, begin, data)
        return b"".join(filter(None, [*blocks[: missing[0]], data, *blocks[missing[-1] + 1 :]]))

    def _fetched(self, start: int, end: int) -> bytes:
        data = self._fetch(start, end)
        self.bytes_read += len(data)
        return data
