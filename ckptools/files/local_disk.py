"""Files of the local disk: regular ones only, read at offsets through a descriptor that is kept."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

# O_NONBLOCK: opening a FIFO must not wait for a writer.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)


class NotRegularError(OSError):
    """What was to be opened is a device, a pipe, a socket or a folder."""


class DiskFile:
    """A regular file, open; its attributes are those of `storage.Ranges`."""

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
        """Up to `length` bytes at `offset`."""
        data = os.pread(self.descriptor, length, offset)
        self.bytes_read += len(data)
        return data

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Up to a buffer full at `offset`."""
        count = os.preadv(self.descriptor, [buffer], offset)
        self.bytes_read += count
        return count

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """The system reads ahead by itself."""

    def prefetch(self, ranges: Iterable[tuple[int, int]], most: int) -> None:
        """The system has its own ways."""

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)
