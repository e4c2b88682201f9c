"""The plan: every tensor's bytes, and the file and offset where they go. Pure arithmetic, no I/O.

It can be printed, shared between threads, and run in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptools.dtypes import ITEMSIZE
from ckptools.model.consolidation import PlannedCopy, PlannedReading
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Tensor
from ckptools.tensor_io.byte_plan import Band, Copy, parts_of


@dataclass(frozen=True)
class Job:
    """One tensor of the output.

    Attributes:
        fqn: for messages.
        tensor: what is written; one shard per region.
        dtype: dtype in the output.
        file: index of the output file.
        offset: byte offset of the tensor's first byte in that file.
    """

    fqn: str
    tensor: Tensor
    dtype: str
    file: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return self.tensor.numel * ITEMSIZE[self.dtype]

    def parts(self) -> Iterable[Copy | Band]:
        """Copies or bands in ascending order of their offset, without gaps; made when they are asked for."""
        return parts_of(self.tensor, self.dtype)


@dataclass(frozen=True)
class PlannedCopies:
    """Every copy of a plan, made when they are gone through.

    Attributes:
        jobs: the tensors of the output.
        targets: files of the output, as the jobs number them.
    """

    jobs: Sequence[Job]
    targets: Sequence[Path]

    def __iter__(self) -> Iterator[PlannedCopy]:
        for job in self.jobs:
            for part in job.parts():
                source = (part.source, part.source_offset) if isinstance(part, Copy) else part.box
                yield PlannedCopy(job.fqn, source, self.targets[job.file], job.offset + part.offset, part.nbytes)


def planned_reading(jobs: Sequence[Job], targets: Sequence[Path]) -> PlannedReading:
    """What writing some tensors into some files would read."""
    sources = {source.path for job in jobs for shard in job.tensor.shards for source in shard.sources}
    return PlannedReading(sum(job.tensor.nbytes for job in jobs), len(sources), PlannedCopies(jobs, targets))


def converted(jobs: Iterable[Job]) -> dict[tuple[str, str], int]:
    """How many tensors change their dtype, by the dtype that they have and the one that they get."""
    names: dict[tuple[str, str], set[str]] = {}
    for job in jobs:
        if job.dtype != job.tensor.dtype:
            names.setdefault((job.tensor.dtype, job.dtype), set()).add(job.fqn)
    return {dtypes: len(fqns) for dtypes, fqns in names.items()}


def row_pieces(tensor: Tensor, count: int) -> Iterator[tuple[Box, Tensor]]:
    """Cut a tensor along its first dimension into pieces of `count` rows; yield each one's box, and it as a tensor."""
    total, rest = tensor.shape[0], tensor.shape[1:]
    shards: list[list[Shard]] = [[] for _ in range(0, total, count)]
    boxes = [Box((n, *[0] * len(rest)), (min(count, total - n), *rest)) for n in range(0, total, count)]
    for shard in tensor.shards:
        # A shard is looked at by the pieces that it is in, not by all: both may be hundreds.
        for number in range(shard.box.offsets[0] // count, -(-shard.box.ends[0] // count)):
            shards[number] += _part(shard, boxes[number])
    for box, found in zip(boxes, shards, strict=True):
        yield box, replace(tensor, shape=box.sizes, shards=tuple(found))


def _part(shard: Shard, window: Box) -> list[Shard]:
    """What of a shard lies in a box, with its place there; nothing when nothing does."""
    common = shard.box.intersect(window)
    if common is None or not shard.was_read:
        return []
    return [shard.part(common.seen_from(shard.box), common.seen_from(window))]
