"""A file's bytes as everything above sees them, wherever it lies: how large it is, and ranges of it.

The local disk is one implementation (`local_disk`); a store that is reached through a network is another
(`remote_store`). The path itself tells which one it is in: a `RemotePath` in a store, any other on the disk. What is
there, and what a folder holds, is asked of the path as of any `pathlib.Path`; a `RemotePath` answers from its store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Status(NamedTuple):
    """What is known of a file or folder without reading it.

    Attributes:
        size: bytes; 0 for a folder.
        modified: file time, seconds since 1970; 0 where it is not told.
        version: what changes when the file does, such as an object's ETag; "" where the storage has no such thing.
        is_folder: whether others lie below it.
    """

    size: int
    modified: float
    version: str = ""
    is_folder: bool = False


FOLDER = Status(0, 0.0, is_folder=True)


class Ranges(Protocol):
    """A file whose bytes are read by ranges.

    Attributes:
        size: bytes when it was opened.
        modified: file time then.
        version: what changes when the file does; "" where the storage has no such thing.
        bytes_read: how many bytes were read of it so far.
        descriptor: of a file on the local disk; None elsewhere.
    """

    size: int
    modified: float
    version: str
    bytes_read: int

    @property
    def descriptor(self) -> int | None: ...  # noqa: D102

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes at `offset`; fewer only where the file has become shorter.

        Raises:
            OSError: the storage fails.
        """

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Up to a buffer full at `offset`; how many bytes.

        Raises:
            OSError: the storage fails.
        """

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take note that these bytes, from the first offset to before the second, are going to be read."""

    def prefetch(self, ranges: Iterable[tuple[int, int]], most: int) -> None:
        """Have ranges at hand for who reads them, also who opens the file again; those of more bytes are left out.

        Raises:
            OSError: the storage fails.
        """

    def close(self) -> None:
        """Let go of it."""
