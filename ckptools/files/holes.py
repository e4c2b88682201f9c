"""Holes of sparse files: bytes without a block on the disk, which are read as zeros.

A file has them where its size was set and nothing was written: by a copy that was interrupted after it had reserved
the space, by a file system that came back after a crash, on purpose. The file itself cannot distinguish them from true
zeros.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, cycle, islice
from operator import sub
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ckptools.files.storage import takes_less

Numbers = npt.NDArray[np.int64]

MAX_HOLES = 1 << 16
"""Holes of a file that are looked for: one for each of its tensors, and more."""


class Holes:
    """The holes of a file, in order and apart.

    Args:
        edges: of each its first byte, and one past its last, one after the other.
    """

    def __init__(self, edges: Sequence[int]) -> None:
        self.starts, self.ends = edges[::2], edges[1::2]
        self.before: list[int] = [0, *accumulate(map(sub, self.ends, self.starts))]

    def overlap(self, start: int, end: int) -> int:
        """How many bytes from `start` to before `end` lie in them."""
        return self._bytes_before(end) - self._bytes_before(start)

    def overlaps(self, starts: Numbers, ends: Numbers) -> Numbers:
        """The same for many extents, by column; offsets are below 2^63."""
        before, first, last = (np.array(column) for column in (self.before, self.starts, [0, *self.ends]))
        begun = [np.searchsorted(first, at) for at in (starts, ends)]
        counts = [before[i] - np.maximum(last[i] - at, 0) for i, at in zip(begun, (starts, ends), strict=True)]
        inside: Numbers = counts[1] - counts[0]
        return inside

    def _bytes_before(self, at: int) -> int:
        begun = bisect_left(self.starts, at)
        return self.before[begun] - (max(self.ends[begun - 1] - at, 0) if begun else 0)

    def from_first_at(self, start: int) -> Sequence[tuple[int, int]]:
        """The holes from the last one that begins before `start`."""
        first = max(bisect_left(self.starts, start) - 1, 0)
        return list(zip(self.starts[first:], self.ends[first:], strict=True))


def holes(path: Path) -> list[int]:
    """The edges of the holes of a file, as `Holes` has them; none where none can be seen."""
    with suppress(OSError, AttributeError):  # gone, or a system that knows no holes
        if takes_less(path):
            return _asked_for(path, path.stat().st_size)
    return []


def _asked_for(path: Path, size: int) -> list[int]:
    """List the edges of holes that the file system knows; the one behind the end of every file does not count."""
    edges: list[int] = []
    at, seek, note = 0, os.lseek, edges.append
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for edge in islice(cycle((os.SEEK_HOLE, os.SEEK_DATA)), 2 * MAX_HOLES):
            at = seek(descriptor, at, edge)
            note(at)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        if len(edges) % 2:  # no data behind it: this hole is the last
            note(size)
    finally:
        os.close(descriptor)
    if edges[-2:] == [size, size]:
        del edges[-2:]
    return edges
