"""Tensors made of the rows of others: cut, joined, stacked and transposed, without reading a value.

The shards of the result are parts of the shards of the originals, in new places and with new strides, so that a plan
copies their bytes like those of any other tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckptools.model.regions import Box
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor


class RowBlock(NamedTuple):
    """Rows of one tensor that become consecutive rows of another.

    Attributes:
        start: the first row.
        rows: how many.
        part: number of the tensor that they become part of.
        place: the row there of the first one.
        step: from one row to the next.
    """

    start: int
    rows: int
    part: int
    place: int
    step: int = 1

    @property
    def end(self) -> int:
        """One past the last row."""
        return self.start + (self.rows - 1) * self.step + 1


def split_rows(tensor: Tensor, blocks: Sequence[RowBlock]) -> list[Tensor]:
    """Divide the rows (dim 0) of a tensor among others, in the order of their numbers; each shard is cut once."""
    ordered = sorted(blocks)
    starts, longest = [b.start for b in ordered], max(b.end - b.start for b in ordered)
    shards: dict[int, list[Shard]] = {}
    sizes: dict[int, int] = {}
    for block in blocks:
        sizes[block.part] = max(sizes.get(block.part, 0), block.place + block.rows)
    for shard in tensor.shards:
        low, end = shard.box.offsets[0], shard.box.ends[0]
        for block in ordered[bisect_left(starts, low - longest) : bisect_left(starts, end)]:
            if (piece := _rows_of(shard, block)) is not None:
                shards.setdefault(block.part, []).append(piece)
    return [_made(tensor, (sizes[n], *tensor.shape[1:]), shards.get(n, ())) for n in sorted(sizes)]


def _rows_of(shard: Shard, block: RowBlock) -> Shard | None:
    """The part of a shard that lies in a block of rows, in its new place; None if there is none."""
    low, end, step = shard.box.offsets[0], shard.box.ends[0], block.step
    first = max(0, -(-(low - block.start) // step))
    count = min(block.rows, -(-(end - block.start) // step)) - first
    if count <= 0 or not shard.box.numel:
        return None
    rest = shard.box.sizes[1:]
    inner = Box((block.start + first * step - low, *(0 for _ in rest)), ((count - 1) * step + 1, *rest))
    place = Box((block.place + first, *shard.box.offsets[1:]), (count, *rest))
    piece = shard.part(inner, place)._replace(item=None)
    if piece.source is not None and step > 1:
        strides = (piece.source.strides[0] * step, *piece.source.strides[1:])
        piece = piece._replace(source=piece.source._replace(shape=place.sizes, strides=strides))
    return piece


def joined_rows(tensors: Sequence[Tensor], blocks: Sequence[RowBlock]) -> Tensor:
    """Put rows of several tensors together: each block's rows, at `place` of its `part`, become those from `start` on.

    The inverse of `split_rows`, for the same blocks.
    """
    shards: list[Shard] = []
    for number, tensor in enumerate(tensors):
        mine = [b for b in blocks if b.part == number]
        back = [
            RowBlock(b.place + n, 1 if b.step > 1 else b.rows, 0, b.start + n * b.step)
            for b in mine
            for n in range(b.rows if b.step > 1 else 1)
        ]
        # The new places are rows of the whole, whatever else the blocks of this tensor leave out of it.
        shards += split_rows(tensor, back)[0].shards if back else ()
    rows = max(b.end for b in blocks)
    return _made(tensors[0], (rows, *tensors[0].shape[1:]), shards)


def unstacked(tensor: Tensor) -> list[Tensor]:
    """The tensors along dim 0, without that dimension."""
    blocks = [RowBlock(n, 1, n, 0) for n in range(tensor.shape[0])]
    return [_made(one, one.shape[1:], map(_without_rows, one.shards)) for one in split_rows(tensor, blocks)]


def _without_rows(shard: Shard) -> Shard:
    box, source = Box(shard.box.offsets[1:], shard.box.sizes[1:]), shard.source
    if source is not None:
        source = source._replace(shape=source.shape[1:], strides=source.strides[1:])
    return shard._replace(box=box, source=source)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape along a new dim 0."""
    shards = [_in_row(shard, number) for number, tensor in enumerate(tensors) for shard in tensor.shards]
    return _made(tensors[0], (len(tensors), *tensors[0].shape), shards)


def _in_row(shard: Shard, number: int) -> Shard:
    box, source = Box((number, *shard.box.offsets), (1, *shard.box.sizes)), shard.source
    if source is not None:
        source = source._replace(shape=(1, *source.shape), strides=(0, *source.strides))
    return shard._replace(box=box, source=source, item=None)


def transposed(tensor: Tensor) -> Tensor:
    """A matrix with its two dimensions exchanged; a vector as it is."""
    if len(tensor.shape) != 2:
        return tensor
    return _made(tensor, tensor.shape[::-1], map(_turned, tensor.shards))


def _turned(shard: Shard) -> Shard:
    source = shard.source
    if source is not None:
        source = source._replace(shape=source.shape[::-1], strides=source.strides[::-1])
    return shard._replace(box=Box(*(pair[::-1] for pair in shard.box)), source=source, item=None)


def _made(like: Tensor, shape: tuple[int, ...], shards: Iterator[Shard] | Sequence[Shard] | map[Shard]) -> Tensor:
    """A tensor of one shard per region, in the order of their offsets."""
    ordered = tuple(sorted(shards, key=lambda s: s.box.offsets))
    return replace(like, shape=tuple(shape), shards=ordered, kind="plain", placements=None, mesh=None)
