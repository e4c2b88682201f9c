"""One pass over tensors side by side, region by region, in threads: what all of them have in files that are here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import NamedTuple, Protocol

import numpy as np

from ckptools.checks.statistics.passes import PIECE, Found, Result, Result_co, read_parts
from ckptools.checks.statistics.sums import Values, numbers
from ckptools.dtypes import ITEMSIZE
from ckptools.files.opening import OpenFiles
from ckptools.model.cover import cover
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Tensor
from ckptools.tensor_io.bands import bands_of
from ckptools.tensor_io.elements import BAND
from ckptools.tensor_io.fetch_ahead import Part, parts_of_all
from ckptools.tensor_io.numbers import raw_dtype
from ckptools.tensor_io.progress import Progress
from ckptools.tensor_io.read import fill


class Region(NamedTuple):
    """A region that is read of several tensors.

    Attributes:
        box: where.
        shards: of each tensor those that together hold it; their boxes do not overlap.
    """

    box: Box
    shards: tuple[tuple[Shard, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it in all tensors."""
        return self.box.numel * sum(ITEMSIZE[s[0].source.dtype] for s in self.shards if s[0].source is not None)


class BoxCollector(Protocol[Result_co]):
    """Takes in a region of some tensors, band by band, and tells what it found."""

    def add(self, box: Box, values: Sequence[Values]) -> None:
        """Take in a band: its place, and the numbers that each tensor has there, in its shape."""

    def result(self) -> Result_co:
        """What was found."""


def shared_regions(tensors: Sequence[Tensor]) -> list[Region]:
    """The regions of the first tensor's shards that the others have too, each once.

    Args:
        tensors: of one shape; none has shards that overlap without being the same region.
    """
    first, *others = [{s.box: s for s in tensor.found if s.box.numel} for tensor in tensors]
    found = ((box, [_meeting(box, other) for other in others]) for box in first)
    return [Region(box, ((first[box],), *rest)) for box, rest in found if all(_covers(box, shards) for shards in rest)]


def _meeting(box: Box, shards: dict[Box, Shard]) -> tuple[Shard, ...]:
    """The shards that hold some of a region; one of the same region alone."""
    if box in shards:
        return (shards[box],)
    return tuple(shard for at, shard in shards.items() if _meet(at, box))


def _meet(a: Box, b: Box) -> bool:
    return not b.sizes or a.intersect(b) is not None


def _covers(box: Box, shards: Sequence[Shard]) -> bool:
    if len(shards) == 1 and shards[0].box == box:
        return True
    inner = [shard.box.intersect(box) for shard in shards]
    return cover(box.sizes, {part.seen_from(box) for part in inner if part is not None}).exact


def over_regions(
    regions: Sequence[Sequence[Region]],
    names: Sequence[str],
    collector: Callable[[int, Region], BoxCollector[Result]],
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Found[Result]]:
    """Read every region once, and collect what is in it.

    Args:
        regions: of each row, what to read.
        names: of each row, for `progress`.
        collector: makes what takes in a region, or a part of one, of the row of a number.
        jobs: threads.
        progress: called with the row's name as bytes are read.
    """
    found: list[Found[Result]] = [Found() for _ in regions]
    parts = [(n, region._replace(box=box)) for n, own in enumerate(regions) for region in own for box in _parts(region)]

    def read(number: int, region: Region, files: OpenFiles, given_up: Event) -> Result:
        collecting = collector(number, region)
        for box in bands_of(region.box, BAND):
            if given_up.is_set():
                break
            collecting.add(box, [_numbers(box, shards, files) for shards in region.shards])
        return collecting.result()

    def reads(region: Region) -> list[Part]:
        return parts_of_all(shard for shards in region.shards for shard in shards if _meet(shard.box, region.box))

    read_parts(parts, read, reads, found, names, jobs, progress)
    return found


def _parts(region: Region) -> Iterator[Box]:
    return bands_of(region.box, max(PIECE * region.box.numel // max(region.nbytes, 1), 1))


def _numbers(box: Box, shards: Sequence[Shard], files: OpenFiles) -> Values:
    source = shards[0].source
    assert source is not None
    raw = np.empty(box.sizes, raw_dtype(source.dtype))
    fill(raw, box, shards, files)
    return numbers(raw, source.dtype)
