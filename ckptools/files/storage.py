"""Files on the local disk, read by ranges, and code shared with remote files (`remote.cached_file`).

The type of the path decides: a `RemotePath` is in a store, any other on the disk. Existence and the content of a folder
are asked of the path as of any `pathlib.Path`; a `RemotePath` asks its store.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ckptools.text import clip, first_line


class Status(NamedTuple):
    """Facts about a file or folder that are available without reading it.

    Attributes:
        size: bytes; 0 for a folder.
        modified: file time, seconds since 1970; 0 when unknown.
        version: changes whenever the file does, such as an object's ETag; "" if the storage has none.
    """

    size: int
    modified: float
    version: str = ""
    is_folder: bool = False


FOLDER = Status(0, 0.0, is_folder=True)


# -- the local disk: regular files only, read at offsets through an open descriptor ------------------------------------


# O_NONBLOCK: opening a FIFO must not wait for a writer.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)


class NotRegularError(OSError):
    """Raised when the opened path is a device, a pipe, a socket or a folder."""


class DiskFile:
    """An open regular file whose bytes are read by ranges; its methods raise OSError if the disk fails.

    Attributes:
        size: bytes when it was opened.
        modified: file time when it was opened.
        bytes_read: number of bytes read from it so far.
    """

    version = ""
    __slots__ = ("bytes_read", "descriptor", "modified", "size")

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, _FLAGS)
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self.descriptor)
            raise NotRegularError
        self.size, self.modified, self.bytes_read = status.st_size, status.st_mtime, 0

    def read(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes at `offset`; fewer only if the file has become shorter."""
        data = os.pread(self.descriptor, length, offset)
        self.bytes_read += len(data)
        return data

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read into a buffer at `offset`; return the number of bytes read."""
        count = os.preadv(self.descriptor, [buffer], offset)
        self.bytes_read += count
        return count

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: the system reads ahead by itself."""

    def prefetch(self, ranges: Iterable[tuple[int, int]], most: int) -> None:
        """Do nothing: the system reads ahead by itself."""

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


UNIT = 512
"""The unit of `st_blocks` in bytes, whatever the blocks of the file system. Source: stat(2)."""

SLACK = 1 << 16
"""A file with at most this many bytes more than its blocks is not checked for holes: file systems pack and compress."""


def takes_less(path: Path) -> bool:
    """Whether a file takes clearly less room on its disk than its size, as sparse and compressed ones do.

    Raises:
        OSError: the file is gone.
        AttributeError: the system does not report blocks.
    """
    known = path.stat()
    return known.st_size - known.st_blocks * UNIT > SLACK


# -- errors of a store, each in one line without the file's name -------------------------------------------------------


MAX_REASON = 300
"""Characters of a store's error: its response may be a web page."""


class RemoteError(OSError):
    """An error of a store; `passing` if the same request may succeed a moment later."""

    def __init__(self, reason: str, code: int = errno.EIO, passing: bool = False) -> None:
        super().__init__(code, clip(reason, MAX_REASON))
        self.passing = passing


class DeniedError(RemoteError):
    """The store denies listing a folder or reading a file; some stores also answer so for missing files."""


def replaced() -> RemoteError:
    """The error for a file that has changed since it was opened."""
    return RemoteError("was replaced by another version while it was read; open it again", errno.ESTALE)


def in_one_line(error: BaseException) -> OSError:
    """Turn an error of a file system library into one line."""
    if isinstance(error, RemoteError):
        return error
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "no such file or folder")
    if isinstance(error, PermissionError):
        return DeniedError("access denied by the store", errno.EACCES)
    if isinstance(error, ImportError):
        return RemoteError(f"needs a package: {first_line(error)}", errno.ENOTSUP)
    passing = isinstance(error, (ConnectionError, TimeoutError))
    return RemoteError(f"the store does not answer as it should: {first_line(error)}", passing=passing)


# -- time since a checkpoint's last write, to recognise a save that may still be running -------------------------------


JUST_NOW = 120.0
"""A checkpoint that is not whole may be unfinished if its last write was less than this many seconds ago."""

UNFINISHED = "the save has not ended, or it died, or the file was not copied"
"""The possible reasons why the file that a writer writes last is missing."""

MAX_FILES = 1 << 16


def just_written(last: float | None) -> str:
    """A note that a checkpoint may not be finished, by the time of its last write; empty if that is long ago."""
    ago = None if last is None else time.time() - last
    return "" if ago is None or ago >= JUST_NOW else f"last written {max(0, round(ago))} s ago: it may not be finished"


def last_write(path: Path) -> float | None:
    """The time of the last write to a file, or to any file in a folder and its subfolders; None without files."""
    times = list[float]()
    for file in islice(_files_in(path), MAX_FILES):
        with suppress(OSError):
            times.append(file.lstat().st_mtime)
    return max(times, default=None)


def _files_in(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        yield path
        return
    for entry in path.iterdir():
        yield from entry.iterdir() if entry.is_dir() and not entry.is_symlink() else (entry,)
