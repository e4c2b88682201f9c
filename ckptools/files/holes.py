"""Holes in sparse files: bytes that a file system keeps no block for, and reads as zeros.

A file has them where its size was set and nothing was written: by a copy that was interrupted after it had reserved
the space, by a file system that came back after a crash, on purpose. Nothing in the file tells them from true zeros.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

UNIT = 512
"""Bytes that `st_blocks` counts in, whatever the blocks of the file system. Source: stat(2)."""

SLACK = 1 << 16
"""Bytes that a file may lack in blocks without being asked for its holes: file systems pack and compress."""


def unwritten(path: Path) -> int:
    """About how many bytes of a file are holes; 0 where it has none, or none can be seen.

    A compressed file takes fewer blocks than it has bytes too, so the file system is asked for a hole as well.
    """
    with suppress(OSError, AttributeError):  # gone, or a system that knows no holes
        known = path.stat()
        lacking = known.st_size - known.st_blocks * UNIT
        if lacking > SLACK and _has_hole(path, known.st_size):
            return lacking
    return 0


def _has_hole(path: Path, size: int) -> bool:
    """Whether a hole begins before the end of a file, where every file has one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE) < size
    finally:
        os.close(descriptor)
