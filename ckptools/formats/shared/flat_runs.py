"""Runs of consecutive elements of a flattened tensor, as FSDP1, DeepSpeed and Megatron's optimizer hold them, as boxes.

A run that begins or ends inside a row is several boxes, at most 2 * ndim - 1 of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.model.regions import Box, Ints, contiguous_strides, span_boxes
from ckptools.model.tensor import Shard, Source, Tensor, in_rank_order


class FlatRun(NamedTuple):
    """Consecutive elements of a flattened tensor that one rank holds.

    Attributes:
        start: index of the first element in the flattened tensor.
        length: elements.
        source: a flat tensor that holds them, 1-D and contiguous; None when it is in a file that was not read.
        rank: who holds it.
        at: index of the first element in `source`.
    """

    start: int
    length: int
    source: Source | None
    rank: int | None
    at: int = 0

    def within(self, low: int, high: int) -> FlatRun:
        """The elements from index `low` to `high` of the flattened tensor; both lie in this run."""
        return self._replace(start=low, length=high - low, at=self.at + low - self.start)


class RunBox(NamedTuple):
    """A box of a tensor whose elements follow each other in a flat tensor.

    Attributes:
        unread: the box as a shard of the tensor, without a source.
        at: index of its first element in the flat tensor.
        strides: of the box, packed, in elements.
    """

    unread: Shard
    at: int
    strides: Ints

    def shard_in(self, flat: Source | None) -> Shard:
        """The shard whose bytes are in a flat tensor; without a source where that was not read."""
        if flat is None:
            return self.unread
        # Made at once and not changed twice: ZeRO-3 has a hundred thousand of them.
        offset, box = flat.offset + self.at * ITEMSIZE[flat.dtype], self.unread.box
        source = Source(flat.path, offset, flat.dtype, box.sizes, self.strides, flat.record, flat.record_span, flat.crc)
        return Shard(box, self.unread.rank, source)


def boxes_of(shape: Ints, start: int, length: int, rank: int | None, at: int = 0) -> Iterator[RunBox]:
    """The boxes of a run of a flattened tensor.

    Args:
        shape: of the whole tensor.
        start: index of the run's first element in the flattened tensor.
        length: elements; `start + length` is at most the tensor's numel.
        rank: who holds it.
        at: index of the run's first element in the flat tensor that holds it.
    """
    for box, offset in span_boxes(shape, start, length):
        yield RunBox(Shard(box, rank, None), at + offset, contiguous_strides(box.sizes))


def shards_of(shape: Ints, run: FlatRun) -> list[Shard]:
    """The shards of a run of a flattened tensor of `shape`."""
    return [box.shard_in(run.source) for box in boxes_of(shape, run.start, run.length, run.rank, run.at)]


def shards_in(piece: Box, run: FlatRun) -> list[Shard]:
    """The shards of a run of a flattened piece, in the tensor that `piece` is a box of."""
    return [shard._replace(box=_shifted(shard.box, piece.offsets)) for shard in shards_of(piece.sizes, run)]


def joined(shape: Ints, runs: Iterable[FlatRun]) -> tuple[Shard, ...]:
    """The shards of a tensor of `shape` whose flattened runs the ranks hold, in rank order."""
    return in_rank_order(shard for run in runs for shard in shards_of(shape, run))


def flat_source(value: Any) -> Source | None:
    """Where a flat tensor's elements are; None for anything that is not one row of consecutive elements."""
    if not isinstance(value, Tensor) or value.kind != "plain" or len(value.shape) != 1 or len(value.shards) != 1:
        return None
    source = value.shards[0].source
    return source if source is not None and source.contiguous else None


def is_ragged(tensor: Tensor) -> bool:
    """Whether ranks hold different lengths under one key, so that it cannot be one replicated value."""
    return len({s.box for s in tensor.shards}) > 1


def _shifted(box: Box, by: Ints) -> Box:
    return Box(tuple(a + b for a, b in zip(by, box.offsets, strict=True)), box.sizes)
