"""Opening a stranger's files: regular files only, and bytes at offsets, or one line that says why not.

A descriptor is opened once and kept, so that what was checked is what is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.remote.path import RemotePath
from ckptools.files.storage import DiskFile, NotRegularError, RemoteError

if TYPE_CHECKING:
    from ckptools.files.remote.cached_file import RemoteFile

_COUNTING = Lock()


class File:
    """A file open for reading at offsets, on the local disk or in a store; its size and time are those of then.

    Its methods raise a ReadError where it ends too early, or where the disk or store fails.
    """

    start = 0
    """Byte offset where it begins in its file, as of a `Window`."""

    total_read = 0
    """Bytes read by this process through files that are closed by now."""

    __slots__ = ("_ranges", "modified", "path", "size")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ranges: DiskFile | RemoteFile
        with reading(path):
            self._ranges = path.store.open(path.key) if isinstance(path, RemotePath) else DiskFile(os.fspath(path))
        self.size, self.modified = self._ranges.size, self._ranges.modified

    @property
    def bytes_read(self) -> int:
        """The number of bytes read of it."""
        return self._ranges.bytes_read

    @property
    def identity(self) -> tuple[object, ...]:
        """An identity that no other file, and no other content of this one, has."""
        if self.descriptor is None:
            return self.path, self.size, self.modified, self._ranges.version
        status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    @property
    def descriptor(self) -> int | None:
        """The descriptor of a file on the local disk; None of one in a store."""
        return self._ranges.descriptor

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes at `offset`."""
        _check_range(self, offset, length)
        try:
            data = self._ranges.read(offset, length)
            if len(data) == length:
                return data
            pieces, done = [data], self._checked(len(data), offset)
            while done < length:
                pieces.append(self._ranges.read(offset + done, length - done))
                done += self._checked(len(pieces[-1]), offset + done)
        except OSError as error:  # `reading` would take longer than a small read
            raise _refused(self.path, error) from error
        return b"".join(pieces)

    @property
    def read_most(self) -> Callable[[int, int], bytes]:
        """Reads up to a number of bytes at an offset, fewer at the end of the file; raises OSError."""
        return self._ranges.read

    def read_each(self, offsets: Sequence[int], lengths: Sequence[int]) -> bytes:
        """Read exactly so many bytes at each of many offsets, one behind the other; for a file on the local disk."""
        data = b"".join(self.read_rows(offsets, lengths))
        if len(data) != sum(lengths):
            raise ReadError(self.path, "became shorter while it was read")
        return data

    def read_rows(self, offsets: Iterable[int], lengths: Iterable[int]) -> list[bytes]:
        """Read up to so many bytes at each of many offsets, fewer at the end; for a file on the local disk."""
        assert self.descriptor is not None
        with reading(self.path):
            rows = list(map(os.pread, repeat(self.descriptor), lengths, offsets))
        self._ranges.bytes_read += sum(map(len, rows))
        return rows

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Read a buffer full at `offset`."""
        _check_range(self, offset, len(buffer))
        self.read_all_into(offset, buffer)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take note that ranges, each from an offset to before another, will be read; a store is then asked less."""
        self._ranges.expect(ranges)

    def prefetch(self, ranges: Iterable[tuple[int, int]], most: int) -> None:
        """Fetch ranges of a file in a store, and keep them there for who reads them next.

        Ranges that lie close together come by one request of at most `most` bytes; a larger one is left out.
        """
        with reading(self.path):
            self._ranges.prefetch(ranges, most)

    def read_all_into(self, offset: int, buffer: memoryview) -> None:
        """Read a buffer full at `offset`, of a file that may have grown or shrunk since it was opened."""
        done = 0
        with reading(self.path):
            while done < len(buffer):
                count = self._ranges.read_into(offset + done, buffer[done:])
                done += self._checked(count, offset + done)

    def _checked(self, count: int, offset: int) -> int:
        if count == 0:
            raise ReadError(self.path, f"became shorter while it was read: no byte {offset}")
        return count

    def close(self) -> None:
        """Let go of the file."""
        self._ranges.close()
        with _COUNTING:
            File.total_read += self.bytes_read

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Window:
    """A part of an open file that is a file of its own: an item of a `.distcp`, an uncompressed member of a tar."""

    __slots__ = ("_file", "path", "size", "start")

    def __init__(self, file: File, start: int, size: int) -> None:
        _check_range(file, start, size)
        self._file = file
        self.path, self.start, self.size = file.path, start, size

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes at `offset` of the window."""
        _check_range(self, offset, length)
        return self._file.read(self.start + offset, length)

    @property
    def descriptor(self) -> int | None:
        """The descriptor of the file on the local disk that it lies in; None of one in a store."""
        return self._file.descriptor

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take note that ranges of the window will be read."""
        self._file.expect((self.start + first, self.start + end) for first, end in ranges)


def _check_range(file: File | Window, offset: int, length: int) -> None:
    if offset < 0 or length < 0 or offset + length > file.size:
        raise ReadError(file.path, f"ends at byte {file.size}; expected {length} bytes at {offset}")


class OpenFiles:
    """Source files kept open between uses, of which at most `limit` stay open unused; threads may share it."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._idle: dict[Path, list[File]] = {}
        """By path, the one that was used last behind the others; no list is empty."""
        self._count = 0
        self._lock = Lock()

    @contextmanager
    def open(self, path: Path) -> Iterator[File]:
        """Lend an open file to one user at a time."""
        with self._lock:
            file = self._take(path) if path in self._idle else None
        file = file or File(path)
        try:
            yield file
        except BaseException:
            file.close()
            raise
        with self._lock:
            self._idle[path] = [*self._idle.pop(path, ()), file]
            self._count += 1
            if self._count > self._limit:
                self._take(next(iter(self._idle))).close()

    def _take(self, path: Path) -> File:
        """A file of this path that is not in use."""
        files = self._idle[path]
        file = files.pop()
        self._count -= 1
        if not files:
            del self._idle[path]
        return file

    def close(self) -> None:
        """Close every file that is not in use."""
        with self._lock:
            for file in chain.from_iterable(self._idle.values()):
                file.close()
            self._idle.clear()
            self._count = 0

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refused(path: Path, error: OSError) -> ReadError:
    """The error for a file that the system does not let us read."""
    if isinstance(error, NotRegularError):
        return UnsafePathError(path, "not a regular file")
    if isinstance(error, RemoteError):
        return ReadError(path, f"cannot be read: {error.strerror}", "no access")
    why = (error.strerror or type(error).__name__).lower()
    if isinstance(error, FileNotFoundError):
        return ReadError(path, why, "absent")
    return ReadError(path, f"cannot be read: {why}", "no access")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError while looking at `path` into one line."""
    try:
        yield
    except OSError as error:
        raise _refused(path, error) from error
