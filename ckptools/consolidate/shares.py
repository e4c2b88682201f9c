"""Share the copying of a plan among several ranks, in equal parts, and check that all ranks have the same plan.

All copies stand in a line, sorted by the file that they read and the byte offset in it, and this line is cut. So a rank
reads few files, each in one stretch, and many ranks write a tensor whose shards are in many files. The position of a
copy follows from the copy alone, so no list of millions is needed.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from ckptools._version import __version__
from ckptools.cluster.team import current
from ckptools.consolidate.writers.layout import Job, OutputLayout
from ckptools.errors import RefusedError, original_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.shards import Shard
from ckptools.tensor_io.stream import Band, Copy

GRAIN = 4096
"""A copy is cut at a multiple of this many bytes, which every element's width divides."""

Position = tuple[str, int]
"""Path of a source file, and a byte offset in it; `("", n)` for byte n of the data that is in no file."""


def position(job: Job, part: Copy | Band) -> Position:
    """The position of a part of a tensor in the line; for a part of several shards, the first shard's position."""
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
    """One rank's share of a plan: the stretch of the line from `first` to `end`; None for the line's start or end."""

    first: Position | None = None
    end: Position | None = None

    def parts(self, job: Job) -> Iterator[Copy | Band]:
        """The parts of a tensor that this rank writes, in ascending order of their offset."""
        for part in job.parts():
            if self.first is None and self.end is None:
                yield part
            elif isinstance(part, Copy):
                begin = 0 if self.first is None else _cut(part, self.first)
                end = part.nbytes if self.end is None else _cut(part, self.end)
                if begin < end:
                    yield part_of(part, begin, end)
            elif self._has(position(job, part)):
                yield part

    def _has(self, at: Position) -> bool:
        return (self.first is None or self.first <= at) and (self.end is None or at < self.end)


ALL = Share()
"""The whole plan."""


def part_of(copy: Copy, begin: int, end: int) -> Copy:
    """The bytes `begin` to `end` of a copy."""
    start = copy.offset + begin
    return replace(copy, source_offset=copy.source_offset + begin, offset=start, nbytes=end - begin)


def _cut(copy: Copy, at: Position) -> int:
    """Number of bytes of a copy before a position, in whole grains."""
    path = str(original_of(copy.source))
    if at[0] != path:
        return copy.nbytes if path < at[0] else 0
    return min(copy.nbytes, max(0, at[1] - copy.source_offset) // GRAIN * GRAIN)


def shares_of(jobs: Iterable[Job], count: int) -> list[Share]:
    """Cut a plan into shares of equal weight: every byte is in exactly one.

    If no two copies read the same bytes, shares differ by at most one part that cannot be cut.
    """
    if count == 1:
        return [ALL]
    line = _Line(jobs)
    cuts = [line.at(line.nbytes * n // count) for n in range(1, count)]
    return [Share(first, end) for first, end in zip([None, *cuts], [*cuts, None], strict=True)]


class _Line:
    """All parts of a plan in a line of `nbytes`; for each file, the offsets and sizes of its parts."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._files: dict[str, tuple[array[int], array[int]]] = {}
        for job in jobs:
            for part in job.parts():
                path, offset = position(job, part)
                offsets, sizes = self._files.setdefault(path, (array("q"), array("q")))
                offsets.append(offset)
                sizes.append(part.nbytes)
        self._paths = sorted(self._files)
        self._ends = [0, *accumulate(sum(self._files[path][1]) for path in self._paths)]
        self.nbytes = self._ends[-1]

    def at(self, target: int) -> Position:
        """The position after about `target` bytes."""
        number = min(bisect_right(self._ends, target) - 1, len(self._paths) - 1)
        if number < 0:
            return "", 0
        path, rest = self._paths[number], target - self._ends[number]
        return path, _offset_at(*self._files[path], rest)


def _offset_at(offsets: Sequence[int], sizes: Sequence[int], target: int) -> int:
    """The byte offset in a file before which `target` of its bytes are read."""
    for offset, nbytes in sorted(zip(offsets, sizes, strict=True)):
        if target < nbytes:
            return offset + target
        target -= nbytes
    return max(offset + nbytes for offset, nbytes in zip(offsets, sizes, strict=True))


# -- the same plan -----------------------------------------------------------------------------------------------------


def plan_digests(checkpoint: Checkpoint, layout: OutputLayout, texts: Mapping[Path, str | bytes]) -> dict[str, str]:
    """Version of ckptools, and SHA-256 of the state of the source's files and of the plan, by name."""
    files = ((str(f.path), f.status, f.nbytes, f.modified) for f in checkpoint.files)
    written = (*((str(path), size) for path, size in layout.files), *sorted((str(p), t) for p, t in texts.items()))
    return {
        "ckptools": __version__,
        "state of the source's files": _digest(files),
        "plan": _digest((*written, *map(_job, layout.jobs))),
    }


def _job(job: Job) -> tuple[object, ...]:
    tensor = job.tensor
    place = (job.fqn, job.dtype, job.file, job.offset)
    return (*place, tensor.dtype, tensor.shape, tensor.fill, tuple(map(_shard, tensor.shards)))


def _shard(shard: Shard) -> tuple[object, ...]:
    known = [(str(original_of(source.path)), *source[1:]) for source in shard.sources]
    coding = None if shard.encoded is None else (shard.encoded.coding, shard.encoded.box)
    return shard.box.offsets, shard.box.sizes, known, coding


def _digest(things: Iterable[object]) -> str:
    found = hashlib.sha256()
    for thing in things:
        found.update(f"{thing!r}\n".encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def check_same_plan(own: Mapping[str, str]) -> None:
    """Refuse to continue if ranks have different plans."""
    team = current()
    every = team.gather(dict(own))
    for rank, other in enumerate(every):
        for thing, digest in every[0].items():
            if other[thing] != digest:
                text = f"{team.name(rank)} has another {thing} than rank 0; do all nodes see the same, unchanged files?"
                raise RefusedError(None, f"{text} Nothing was written")
