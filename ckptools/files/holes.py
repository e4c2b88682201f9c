"""Holes of sparse files: byte ranges without a block on the disk, which read as zeros.

A file has holes where its size was set and nothing was written: by a copy that was interrupted after it had reserved
the space, by a file system that came back after a crash, on purpose. Its bytes alone cannot distinguish holes from true
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
"""At most this many holes of a file are searched for: one for each of its tensors, and more."""


class Holes:
    """The holes of a file, in order and disjoint.

    Args:
        edges: the first byte and the end of each hole, one after the other.
    """

    def __init__(self, edges: Sequence[int]) -> None:
        self.starts, self.ends = edges[::2], edges[1::2]
        self.before: list[int] = [0, *accumulate(map(sub, self.ends, self.starts))]

    def overlap(self, start: int, end: int) -> int:
        """The number of bytes in holes from `start` to before `end`."""
        return self._bytes_before(end) - self._bytes_before(start)

    def overlaps(self, starts: Numbers, ends: Numbers) -> Numbers:
        """The number of bytes in holes for many extents, by column; offsets are below 2^63."""
        before, first, last = (np.array(column) for column in (self.before, self.starts, [0, *self.ends]))
        begun = [np.searchsorted(first, at) for at in (starts, ends)]
        counts = [before[i] - np.maximum(last[i] - at, 0) for i, at in zip(begun, (starts, ends), strict=True)]
        inside: Numbers = counts[1] - counts[0]
        return inside

    def _bytes_before(self, at: int) -> int:
        begun = bisect_left(self.starts, at)
        return self.before[begun] - (max(self.ends[begun - 1] - at, 0) if begun else 0)

    def from_first_at(self, start: int) -> Sequence[tuple[int, int]]:
        """The holes, beginning with the last one that starts before `start`."""
        first = max(bisect_left(self.starts, start) - 1, 0)
        return list(zip(self.starts[first:], self.ends[first:], strict=True))


def holes(path: Path) -> list[int]:
    """Find the edges of a file's holes, as `Holes` takes them; empty if the system reports none."""
    with suppress(OSError, AttributeError):  # the file is gone, or the system cannot report holes
        if takes_less(path):
            return _edges(path, path.stat().st_size)
    return []


def _edges(path: Path, size: int) -> list[int]:
    """List the edges of the holes that the file system reports, without the implied one at the end of every file."""
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
        if len(edges) % 2:  # no data behind the last hole
            note(size)
    finally:
        os.close(descriptor)
    if edges[-2:] == [size, size]:
        del edges[-2:]
    return edges
