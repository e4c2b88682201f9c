"""Files of the local disk, read by ranges, and what those of a store (`remote.cached_file`) share with them.

The type of the path decides: a `RemotePath` is in a store, any other on the disk. Whether it exists, and what a folder
holds, is asked of the path as of any `pathlib.Path`; a `RemotePath` answers from its store.
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
    """The facts about a file or folder that are known without reading it.

    Attributes:
        size: bytes; 0 for a folder.
        modified: file time, seconds since 1970; 0 when unknown.
        version: changes when the file does, such as an object's ETag; "" where the storage has no such thing.
    """

    size: int
    modified: float
    version: str = ""
    is_folder: bool = False


FOLDER = Status(0, 0.0, is_folder=True)


# -- the local disk: regular files only, read at offsets through a descriptor that is kept -----------------------------


# O_NONBLOCK: opening a FIFO must not wait for a writer.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)


class NotRegularError(OSError):
    """Raised for a device, a pipe, a socket or a folder that was to be opened."""


class DiskFile:
    """A regular file, open, whose bytes are read by ranges; its methods raise OSError where the storage fails.

    Attributes:
        size: bytes when it was opened.
        modified: file time then.
        bytes_read: how many bytes were read of it so far.
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
        """Up to `length` bytes at `offset`; fewer only where the file has become shorter."""
        data = os.pread(self.descriptor, length, offset)
        self.bytes_read += len(data)
        return data

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Up to a buffer full at `offset`; how many bytes."""
        count = os.preadv(self.descriptor, [buffer], offset)
        self.bytes_read += count
        return count

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: the system reads ahead by itself."""

    def prefetch(self, ranges: Iterable[tuple[int, int]], most: int) -> None:
        """Do nothing, for the same reason."""

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


UNIT = 512
"""Bytes that `st_blocks` counts in, whatever the blocks of the file system. Source: stat(2)."""

SLACK = 1 << 16
"""Bytes that a file may lack in blocks without being asked for its holes: file systems pack and compress."""


def takes_less(path: Path) -> bool:
    """Whether a file takes clearly less room on its disk than it has bytes, as sparse and compressed ones do.

    Raises:
        OSError: it is gone.
        AttributeError: the system does not say.
    """
    known = path.stat()
    return known.st_size - known.st_blocks * UNIT > SLACK


# -- errors of a store, each in one line without the file's name -------------------------------------------------------


MAX_REASON = 300
"""Characters of a store's error: what it answers may be a page."""


class RemoteError(OSError):
    """A store that does not give what it was asked for; `passing` where the same request may succeed a moment later."""

    def __init__(self, reason: str, code: int = errno.EIO, passing: bool = False) -> None:
        super().__init__(code, clip(reason, MAX_REASON))
        self.passing = passing


class DeniedError(RemoteError):
    """A store that does not list a folder, or not let us see a file; some say so too of those that are not there."""


def replaced() -> RemoteError:
    """The error for a file that has changed since it was opened."""
    return RemoteError("was replaced by another version while it was read; open it again", errno.ESTALE)


def in_one_line(error: BaseException) -> OSError:
    """The error of a file system as one line."""
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


# -- how long ago the files of a checkpoint were written, where that is so short that a save may still be going on -----


JUST_NOW = 120.0
"""A checkpoint that is not whole may still be written if its last write was less than this many seconds ago."""

UNFINISHED = "the save has not ended, or it died, or the file was not copied"
"""What it means that the file is missing that a writer writes last."""

MAX_FILES = 1 << 16


def just_written(last: float | None) -> str:
    """Say that a checkpoint may not be finished, by the time of its last write; empty if that is long ago."""
    ago = None if last is None else time.time() - last
    return "" if ago is None or ago >= JUST_NOW else f"last written {max(0, round(ago))} s ago: it may not be finished"


def last_write(path: Path) -> float | None:
    """When a file, or the last of the files in a folder and those in it, was written; None without files."""
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
