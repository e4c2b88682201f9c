"""Holes in sparse files: bytes that a file system keeps no block for, and reads as zeros.

A file has them where its size was set and nothing was written: by a copy that was interrupted after it had reserved
the space, by a file system that came back after a crash, on purpose. Nothing in the file tells them from true zeros.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

UNIT = 512
"""Bytes that `st_blocks` counts in, whatever the blocks of the file system. Source: stat(2)."""

SLACK = 1 << 16
"""Bytes that a file may lack in blocks without being asked for its holes: file systems pack and compress."""


MAX_HOLES = 1 << 16
"""Holes of a file that are looked for: one for each of its tensors, and more."""


def unwritten(path: Path) -> int:
    """About how many bytes of a file are holes; 0 where it has none, or none can be seen.

    A compressed file takes fewer blocks than it has bytes too, so the file system is asked for a hole as well.
    """
    return sum(end - start for start, end in holes(path))


def holes(path: Path) -> list[tuple[int, int]]:
    """The holes of a file, each from its first byte to one past its last; none where none can be seen."""
    with suppress(OSError, AttributeError):  # gone, or a system that knows no holes
        if takes_less(path):
            return _asked_for(path, path.stat().st_size)
    return []


def takes_less(path: Path) -> bool:
    """Whether a file takes clearly less room on its disk than it has bytes, as sparse and compressed ones do.

    Raises:
        OSError: it is gone.
        AttributeError: the system does not tell.
    """
    known = path.stat()
    return known.st_size - known.st_blocks * UNIT > SLACK


def _asked_for(path: Path, size: int) -> list[tuple[int, int]]:
    """What the file system calls a hole; every file has one behind its end, which does not count."""
    found: list[tuple[int, int]] = []
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        at = os.lseek(descriptor, 0, os.SEEK_HOLE)
        while at < size and len(found) < MAX_HOLES:
            end = _data_behind(descriptor, at, size)
            found.append((at, end))
            at = os.lseek(descriptor, end, os.SEEK_HOLE) if end < size else size
    finally:
        os.close(descriptor)
    return found


def _data_behind(descriptor: int, at: int, size: int) -> int:
    try:
        return min(os.lseek(descriptor, at, os.SEEK_DATA), size)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size  # nothing but the hole
