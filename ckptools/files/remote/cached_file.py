"""A remote file, read by ranges: fetched blocks are kept, and a small read also fetches the blocks after it.

A request costs as much time as the transfer of a megabyte.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from threading import Lock

from ckptools.files.storage import Status

BLOCK = 1 << 10
"""Bytes of a block; a range is fetched from a multiple of it on, unless the range is large."""

SMALL = 4 << 10
"""Bytes that a small read fetches; the first records and headers of a file lie in them."""

TAIL = 8 << 10
"""Bytes fetched for a read near the end of a file: a zip archive's end and the last entries of its directory."""

LARGE = 1 << 20
"""Reads of at most this many bytes are kept; sequential small reads grow up to it."""

REQUEST = 4 << 20
"""Bytes of one request, at most, that fetches several ranges."""

GAP = 16 << 10
"""At most this many bytes between two ranges are fetched with them, to save a second request."""

MAX_KEPT = 64 << 20
"""Bytes kept of all files of a store together; the least recently used file is dropped first."""

Fetch = Callable[[int, int], bytes]
"""Returns all bytes from an offset to before another offset, or raises OSError."""


class BlockCache:
    """Blocks of the files of one store, by file and number; threads may share it."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, dict[int, bytes]] = OrderedDict()
        self._lock = Lock()
        self.count = 0

    def get(self, key: str, start: int, end: int) -> list[bytes | None]:
        """The blocks with the bytes of a range, in order; None for a block that is not in the cache."""
        with self._lock:
            blocks = self._files.get(key, {})
            if blocks:
                self._files.move_to_end(key)
            return list(map(blocks.get, range(start // BLOCK, -(-end // BLOCK))))

    def put(self, key: str, start: int, data: bytes) -> None:
        """Keep the blocks of a range, which begins with a block and ends with a block or with the file."""
        new = {(start + at) // BLOCK: data[at : at + BLOCK] for at in range(0, len(data), BLOCK)}
        with self._lock:
            kept = self._files.setdefault(key, {})
            self.count -= len(kept)
            kept |= new
            self.count += len(kept)
            self._files.move_to_end(key)
            while self.count * BLOCK > MAX_KEPT and len(self._files) > 1:
                self.count -= len(self._files.popitem(last=False)[1])
            if self.count * BLOCK > MAX_KEPT:  # This file alone is too large.
                self._files[key], self.count = new, len(new)


def joined(ranges: Iterable[tuple[int, int]], most: int | None = None, gap: int = GAP) -> list[tuple[int, int]]:
    """Sort ranges, and join ranges at most `gap` bytes apart, or overlapping, to requests of at most `most` bytes.

    Each range is from an offset to before another; a range of more than `most` bytes is left out.
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
    """An open file of a store, with the methods of `storage.DiskFile`.

    `fetch` reads a range of the file's version that `status` describes. `lock` is held while a small read fetches,
    because other threads often want the same block.
    """

    descriptor: int | None = None

    def __init__(self, key: str, fetch: Fetch, status: Status, cache: BlockCache, lock: Lock) -> None:
        self._key, self._fetch, self._cache, self._lock = key, fetch, cache, lock
        self.size, self.modified, self.version, self.bytes_read = status.size, status.modified, status.version, 0
        self._next, self._window = -1, SMALL
        self._expected: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes at `offset`; fewer at the end of the file."""
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
        """Announce ranges that will be read, so that one request fetches ranges that lie close together."""
        self._expected = joined(ranges)

    def prefetch(self, ranges: Iterable[tuple[int, int]], most: int = REQUEST) -> None:
        """Fetch the parts of some ranges that are not in the cache, by requests of at most `most` bytes."""
        for start, end in joined(ranges, most):
            self._bring(start, min(end, self.size))

    def close(self) -> None:
        """Do nothing: fetched blocks stay in the cache for the next user of the file."""

    def _widened(self, start: int, end: int) -> tuple[int, int]:
        """Extend a range by bytes that are likely to be read next."""
        if None not in self._cache.get(self._key, start, end):  # Another thread has fetched it.
            return start, end
        for first, last in self._expected:
            if first <= start < last:
                # From the beginning of the expected range, if one request can hold it and the bytes asked for.
                first = first if max(last, end) - first <= REQUEST else start
                return first, min(max(end, min(last, first + REQUEST)), self.size)
        if end > self.size - TAIL:
            return min(start, max(self.size - TAIL, 0)), self.size
        first = start - start % BLOCK
        behind = first <= self._next < end  # The read continues the previous one.
        self._window = min(2 * self._window, LARGE) if behind else SMALL
        return start, min(max(end, first + self._window), self.size)

    def _bring(self, start: int, end: int) -> bytes:
        """The bytes of a range's blocks; all blocks from the first to the last that the cache lacks are fetched."""
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
