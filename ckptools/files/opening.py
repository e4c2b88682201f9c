"""Opening a stranger's files: regular files only, and bytes at offsets, or one line that says why not.

A descriptor is opened once and kept, so that what was checked is what is read.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.remote.path import RemotePath
from ckptools.files.storage import DiskFile, NotRegularError, Ranges, RemoteError

_COUNTING = Lock()


class File:
    """A file open for reading at offsets, on the local disk or in a store.

    Attributes:
        path: as the caller named it.
        size: bytes when it was opened.
        modified: file time then, seconds since 1970.
    """

    start = 0
    """Byte offset where it begins in its file, as of a `Window`."""

    total_read = 0
    """Bytes read by this process through files that are closed by now."""

    __slots__ = ("_ranges", "modified", "path", "size")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._ranges: Ranges = _opened(path)
        except NotRegularError:
            raise UnsafePathError(path, "not a regular file") from None
        except OSError as error:
            raise _refused(path, error) from error
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
        """Read exactly `length` bytes at `offset`.

        Raises:
            ReadError: the file ends before that, or the storage fails.
        """
        self._check_has(offset, length)
        piece = self._piece(offset, length)
        return piece if len(piece) == length else b"".join([piece, *self._others(offset, length, len(piece))])

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Read a buffer full at `offset`.

        Raises:
            ReadError: the file ends before that, or the storage fails.
        """
        self._check_has(offset, len(buffer))
        self.read_all_into(offset, buffer)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take note that ranges, each from an offset to before another, will be read; a store is then asked less."""
        self._ranges.expect(ranges)

    def prefetch(self, ranges: Iterable[tuple[int, int]], most: int) -> None:
        """Fetch ranges of a file in a store, and keep them there for who reads them next.

        Args:
            ranges: each from an offset to before another; those that lie close together come by one request.
            most: bytes of one request; a range that is larger is left to who reads it.

        Raises:
            ReadError: the store fails.
        """
        try:
            self._ranges.prefetch(ranges, most)
        except OSError as error:
            raise _refused(self.path, error) from error

    def _check_has(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ReadError(self.path, f"ends at byte {self.size}; expected {length} bytes at {offset}")

    def _piece(self, offset: int, length: int) -> bytes:
        try:
            return self._ranges.read(offset, length)
        except OSError as error:
            raise _refused(self.path, error) from error

    def _others(self, offset: int, length: int, done: int) -> Iterator[bytes]:
        """What is left of a range of which `done` bytes were read."""
        while done < length:
            piece = self._piece(offset + done, length - done)
            if not piece:
                raise ReadError(self.path, f"became shorter while it was read: no byte {offset + done}")
            yield piece
            done += len(piece)

    def read_all_into(self, offset: int, buffer: memoryview) -> None:
        """Read a buffer full at `offset`, of a file that may have grown or shrunk since it was opened.

        Raises:
            ReadError: the file ends before that, or the storage fails.
        """
        done = 0
        while done < len(buffer):
            done += self.read_into(offset + done, buffer[done:])

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read up to a buffer full at `offset`; return how many bytes.

        Raises:
            ReadError: the file ends before `offset`, or the storage fails.
        """
        try:
            n = self._ranges.read_into(offset, buffer)
        except OSError as error:
            raise _refused(self.path, error) from error
        if n == 0:
            raise ReadError(self.path, f"became shorter while it was read: no byte {offset}")
        return n

    def close(self) -> None:
        """Let go of the file."""
        self._ranges.close()
        with _COUNTING:
            File.total_read += self.bytes_read

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened(path: Path) -> Ranges:
    return path.store.open(path.key) if isinstance(path, RemotePath) else DiskFile(os.fspath(path))


class Window:
    """A part of an open file that is a file of its own: an item of a `.distcp`, an uncompressed member of a tar.

    Attributes:
        path: of the file that it lies in.
        start: byte offset of its first byte there.
        size: bytes.
    """

    __slots__ = ("_file", "path", "size", "start")

    def __init__(self, file: File, start: int, size: int) -> None:
        if start < 0 or size < 0 or start + size > file.size:
            raise ReadError(file.path, f"ends at byte {file.size}; expected {size} bytes at {start}")
        self._file = file
        self.path, self.start, self.size = file.path, start, size

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes at `offset` of the window.

        Raises:
            ReadError: the window ends before that, or the disk fails.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ReadError(self.path, f"ends at byte {self.size}; expected {length} bytes at {offset}")
        return self._file.read(self.start + offset, length)

    @property
    def descriptor(self) -> int | None:
        """The descriptor of the file on the local disk that it lies in; None of one in a store."""
        return self._file.descriptor

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take note that ranges of the window will be read."""
        self._file.expect((self.start + first, self.start + end) for first, end in ranges)


class OpenFiles:
    """Source files kept open between uses, a bounded number of them; threads may share it.

    Attributes:
        limit: how many unused ones stay open.
    """

    def __init__(self, limit: int = 64) -> None:
        self.limit = limit
        self._idle: OrderedDict[Path, list[File]] = OrderedDict()
        self._count = 0
        self._lock = Lock()

    @contextmanager
    def open(self, path: Path) -> Iterator[File]:
        """Lend an open file to one user at a time."""
        file = self._take(path) or File(path)
        try:
            yield file
        except BaseException:
            file.close()
            raise
        self._give_back(file)

    def _take(self, path: Path) -> File | None:
        with self._lock:
            idle = self._idle.get(path)
            if not idle:
                return None
            self._count -= 1
            return idle.pop()

    def _give_back(self, file: File) -> None:
        with self._lock:
            self._idle.setdefault(file.path, []).append(file)
            self._idle.move_to_end(file.path)
            self._count += 1
            while self._count > self.limit:
                oldest = next(iter(self._idle))
                idle = self._idle[oldest]
                if idle:
                    idle.pop().close()
                    self._count -= 1
                else:
                    del self._idle[oldest]

    def close(self) -> None:
        """Close every file that is not in use."""
        with self._lock:
            for files in self._idle.values():
                for file in files:
                    file.close()
            self._idle.clear()
            self._count = 0

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refused(path: Path, error: OSError) -> ReadError:
    """The error for a file that the system does not let us read."""
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
