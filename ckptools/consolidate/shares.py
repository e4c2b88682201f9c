"""Who of several ranks copies what: the bytes of a plan, cut into as many shares of equal weight as there are ranks.

All copies are put in a line by the file that they read and the byte offset in it, and the line is cut. So a rank reads
few files, each in one stretch, and a tensor whose shards are in many files is written by many ranks. Where a copy lies
in the line follows from itself alone: nobody has to keep a list of millions.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptools.consolidate.plan import Job
from ckptools.errors import original_of
from ckptools.tensor_io.byte_plan import Band, Copy

GRAIN = 4096
"""A copy is cut at a multiple of so many bytes, which is one of every element's width too."""

Position = tuple[str, int]
"""Path of a source file, and a byte offset in it; `("", n)` for byte n of what is read from no file."""


def position(job: Job, part: Copy | Band) -> Position:
    """Where a part of a tensor is in the line; one that is put together of several shards, where the first is."""
    if isinstance(part, Copy):
        return str(original_of(part.source)), part.source_offset
    for shard in job.tensor.shards:
        common = shard.box.intersect(part.box) if part.box.sizes else shard.box
        if common is None or not shard.was_read:
            continue
        if shard.source is not None:
            return str(original_of(shard.source.path)), shard.source.part(common.seen_from(shard.box)).offset
        codes, rows = shard.sources[0], common.seen_from(shard.box).offsets[:1]
        return str(original_of(codes.path)), codes.offset + sum(rows)
    return "", job.offset + part.offset


@dataclass(frozen=True)
class Share:
    """What one rank copies of a plan.

    Attributes:
        first: where its stretch of the line begins; None for the line's beginning.
        end: where the next rank's begins; None for the line's end.
    """

    first: Position | None = None
    end: Position | None = None

    def parts(self, job: Job) -> Iterator[Copy | Band]:
        """The parts of a tensor that this rank writes, in ascending order of their offset."""
        for part in job.parts():
            if self.first is None and self.end is None:
                yield part
            elif isinstance(part, Copy):
                yield from self._piece(part)
            elif self._has(position(job, part)):
                yield part

    def _has(self, at: Position) -> bool:
        return (self.first is None or self.first <= at) and (self.end is None or at < self.end)

    def _piece(self, copy: Copy) -> Iterator[Copy]:
        """What of a copy lies in the stretch: consecutive bytes, or nothing."""
        begin = 0 if self.first is None else _cut(copy, self.first)
        end = copy.nbytes if self.end is None else _cut(copy, self.end)
        if begin < end:
            yield part_of(copy, begin, end)


ALL = Share()
"""Everything there is."""


def part_of(copy: Copy, begin: int, end: int) -> Copy:
    """The bytes of a copy from one of its own to another."""
    start = copy.offset + begin
    return replace(copy, source_offset=copy.source_offset + begin, offset=start, nbytes=end - begin)


def _cut(copy: Copy, at: Position) -> int:
    """How many bytes of a copy lie before a position, in whole grains."""
    path = str(original_of(copy.source))
    if at[0] != path:
        return copy.nbytes if path < at[0] else 0
    return min(copy.nbytes, max(0, at[1] - copy.source_offset) // GRAIN * GRAIN)


def shares_of(jobs: Iterable[Job], count: int) -> list[Share]:
    """Cut a plan into shares of equal weight: every byte is in exactly one.

    A share is heavier than the others by a part that cannot be cut at most, where no two copies read the same bytes.
    """
    if count == 1:
        return [ALL]
    line = _Line(jobs)
    cuts = [line.at(line.nbytes * n // count) for n in range(1, count)]
    return [Share(first, end) for first, end in zip([None, *cuts], [*cuts, None], strict=True)]


class _Line:
    """All parts of a plan in a line; of each file, where parts begin and how many bytes they have.

    Attributes:
        nbytes: how many bytes it has.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._files: dict[str, tuple[array[int], array[int]]] = {}
        for job in jobs:
            for part in job.parts():
                path, offset = position(job, part)
                offsets, sizes = self._files.setdefault(path, (array("q"), array("q")))
                offsets.append(offset)
                sizes.append(part.nbytes)
        self._paths = sorted(self._files)
        self._ends = [0]
        for path in self._paths:
            self._ends.append(self._ends[-1] + sum(self._files[path][1]))
        self.nbytes = self._ends[-1]

    def at(self, target: int) -> Position:
        """The position that so many bytes lie before, or nearly so many."""
        number = min(bisect_right(self._ends, target) - 1, len(self._paths) - 1)
        if number < 0:
            return "", 0
        path, rest = self._paths[number], target - self._ends[number]
        return path, _offset_at(*self._files[path], rest)


def _offset_at(offsets: Sequence[int], sizes: Sequence[int], target: int) -> int:
    """The byte offset in a file that `target` bytes of what is read of it lie before."""
    for offset, nbytes in sorted(zip(offsets, sizes, strict=True)):
        if target < nbytes:
            return offset + target
        target -= nbytes
    return max(offset + nbytes for offset, nbytes in zip(offsets, sizes, strict=True))
