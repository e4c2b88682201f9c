"""Slices of a tensor by a numpy index: each is a tensor whose shards are parts of the original's shards.

No values are read here. A step only changes strides, so that later only the slice's own bytes are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from operator import index
from typing import Any, NamedTuple

from ckptools.errors import UsageError
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor


class Slicing(NamedTuple):
    """The elements that an index selects, by dimension.

    Attributes:
        starts: the lowest index.
        steps: from one index to the next, at least 1.
        flipped: dimensions of the result that descend, because their slice has a negative step.
        kept: sizes of the result; an int removes its dimension.
    """

    starts: Ints
    sizes: Ints
    steps: Ints
    flipped: Ints
    kept: Ints

    @property
    def box(self) -> Box:
        """The smallest box that contains the selection."""
        spans = ((n - 1) * step + 1 if n else 0 for n, step in zip(self.sizes, self.steps, strict=True))
        return Box(self.starts, tuple(spans))

    @property
    def stepping(self) -> bool:
        """Whether the selection skips elements."""
        return any(step > 1 for step in self.steps)


def slicing_of(shape: Ints, key: Any) -> Slicing:
    """Resolve an index of a tensor of `shape`.

    Raises:
        IndexError: an int is beyond the end.
        UsageError: another kind of index than ints, slices and `...`.
    """
    parts = parts_of_index(shape, key)
    runs = [_run_of(part, n) for part, n in zip(parts, shape, strict=True)]
    stays = [d for d, part in enumerate(parts) if isinstance(part, slice)]
    flipped = tuple(n for n, d in enumerate(stays) if runs[d][2] < 0)
    starts = tuple(start for start, _, _ in runs)
    kept = tuple(runs[d][1] for d in stays)
    return Slicing(starts, tuple(size for _, size, _ in runs), tuple(abs(step) for _, _, step in runs), flipped, kept)


def parts_of_index(shape: Ints, key: Any) -> list[Any]:
    """An int or a slice for each dimension; `...` is expanded."""
    parts = list(key) if isinstance(key, tuple) else [key]
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), None)
    if at is not None:
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    if len(parts) > len(shape):
        raise UsageError(None, f"{len(parts)} indices for a tensor of shape {list(shape)}")
    return parts + [slice(None)] * (len(shape) - len(parts))


def _run_of(part: Any, n: int) -> tuple[int, int, int]:
    """The lowest index, the number of indices, and the step, which is negative if they descend."""
    if isinstance(part, slice):
        named = range(*part.indices(n))
        return (min(named[0], named[-1]), len(named), named.step) if named else (0, 0, 1)
    try:
        at = None if isinstance(part, bool) else index(part)
    except TypeError:  # arrays of numpy and torch have `__index__`, but few of them are an index
        at = None
    if at is not None:
        if not -n <= at < n:
            raise IndexError(f"index {at} is out of range for size {n}")
        return at % n, 1, 1
    raise UsageError(None, "a lazy tensor is indexed with ints, slices and '...'; load it for others")


def sliced(tensor: Tensor, cut: Slicing) -> Tensor:
    """The part of a tensor that a slicing selects, before any dimension is dropped.

    Raises:
        ReadError: the head of an item, which locates its bytes, cannot be read.
    """
    shards = (_part_of(shard, cut) for shard in tensor.shards if shard.source or shard.item)
    return replace(tensor, shape=cut.sizes, shards=tuple(shard for shard in shards if shard is not None))


def _part_of(shard: Shard, cut: Slicing) -> Shard | None:
    """The part of a shard in the slice; None if it is empty."""
    runs = [_common(*run) for run in zip(*shard.box, cut.starts, cut.sizes, cut.steps, strict=True)]
    box = Box(tuple(first for first, _ in runs), tuple(size for _, size in runs))
    if not box.numel:
        return None
    if shard.item is not None and not shard.was_read:
        from ckptools.tensor_io.dcp_items import with_source

        shard = with_source(shard)
    source = shard.source
    if source is None:
        return None
    inner = _places(box, cut, shard.box.offsets)
    strides = tuple(stride * step for stride, step in zip(source.strides, cut.steps, strict=True))
    return Shard(box, shard.rank, source.part(Box(inner, box.sizes))._replace(strides=strides))


def _common(offset: int, length: int, start: int, size: int, step: int) -> tuple[int, int]:
    """The selected indices in `offset .. offset + length`: the number of the first one, and their count."""
    first = max(0, -(-(offset - start) // step))
    end = min(size, -(-(offset + length - start) // step))
    return first, max(0, end - first)


def _places(box: Box, cut: Slicing, offsets: Sequence[int]) -> Ints:
    """The index, in a shard at `offsets`, of the first element of a region of the slice."""
    named = zip(cut.starts, box.offsets, cut.steps, offsets, strict=True)
    return tuple(start + at * step - offset for start, at, step, offset in named)


# -- bands ------------------------------------------------------------------------------------------------------------


def bands_of(box: Box, most: int) -> Iterator[Box]:
    """Cut a region into boxes of at most `most` elements, in row-major order.

    Args:
        box: the region.
        most: elements of a box, at least one.
    """
    dim = next((d for d, n in enumerate(box.sizes) if n > 1), None)
    if box.numel <= most or dim is None:
        yield box
        return
    rows = max(1, most // (box.numel // box.sizes[dim]))
    for low in range(0, box.sizes[dim], rows):
        n = min(rows, box.sizes[dim] - low)
        offsets = tuple(o + low if d == dim else o for d, o in enumerate(box.offsets))
        sizes = tuple(n if d == dim else s for d, s in enumerate(box.sizes))
        yield from bands_of(Box(offsets, sizes), most)


def count_bands(sizes: Ints, most: int) -> int:
    """The number of boxes that `bands_of` makes of a region, computed: a small file may state any shape."""
    dim = next((d for d, n in enumerate(sizes) if n > 1), None)
    if prod(sizes) <= most or dim is None:
        return 1
    rows = max(1, most // (prod(sizes) // sizes[dim]))
    times, rest = divmod(sizes[dim], rows)
    counts = [count_bands((*sizes[:dim], n, *sizes[dim + 1 :]), most) if n else 0 for n in (rows, rest)]
    return times * counts[0] + counts[1]


# -- tensors made of the rows of others: cut, joined, stacked and transposed -------------------------------------------
# The shards of the result are parts of the original shards, with new boxes and strides, so that a plan copies their
# bytes like those of any other tensor.


class RowBlock(NamedTuple):
    """Rows of one tensor that become consecutive rows of another.

    Attributes:
        start: the first row.
        rows: number of rows.
        part: number of the tensor that receives them.
        place: the first row's index there.
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
    """Divide the rows (dim 0) of a tensor among several tensors, by `part`; each shard is cut once."""
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
    """The part of a shard in a block of rows, at its new place; None if it is empty."""
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
    """Join rows of several tensors to one tensor: the inverse of `split_rows`, for the same blocks.

    For each block, the rows from `place` of tensor `part` become the rows from `start`.
    """
    shards: list[Shard] = []
    for number, tensor in enumerate(tensors):
        mine = [b for b in blocks if b.part == number]
        back = [
            RowBlock(b.place + n, 1 if b.step > 1 else b.rows, 0, b.start + n * b.step)
            for b in mine
            for n in range(b.rows if b.step > 1 else 1)
        ]
        # A row's new place is its row in the whole, even if the tensor's other blocks are left out.
        shards += split_rows(tensor, back)[0].shards if back else ()
    rows = max(b.end for b in blocks)
    return _made(tensors[0], (rows, *tensors[0].shape[1:]), shards)


def unstacked(tensor: Tensor) -> list[Tensor]:
    """Split a tensor along dim 0 into tensors without that dimension."""
    blocks = [RowBlock(n, 1, n, 0) for n in range(tensor.shape[0])]
    return [_made(one, one.shape[1:], map(_without_rows, one.shards)) for one in split_rows(tensor, blocks)]


def _without_rows(shard: Shard) -> Shard:
    box, source = Box(shard.box.offsets[1:], shard.box.sizes[1:]), shard.source
    if source is not None:
        source = source._replace(shape=source.shape[1:], strides=source.strides[1:])
    return shard._replace(box=box, source=source)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape along a new dim 0."""
    shards = [_in_row(shard, number) for number, tensor in enumerate(tensors) for shard in tensor.shards]
    return _made(tensors[0], (len(tensors), *tensors[0].shape), shards)


def _in_row(shard: Shard, number: int) -> Shard:
    box, source = Box((number, *shard.box.offsets), (1, *shard.box.sizes)), shard.source
    if source is not None:
        source = source._replace(shape=(1, *source.shape), strides=(0, *source.strides))
    return shard._replace(box=box, source=source, item=None)


def transposed(tensor: Tensor) -> Tensor:
    """A matrix with its dimensions exchanged; a vector is returned unchanged."""
    if len(tensor.shape) != 2:
        return tensor
    return _made(tensor, tensor.shape[::-1], map(_turned, tensor.shards))


def _turned(shard: Shard) -> Shard:
    source = shard.source
    if source is not None:
        source = source._replace(shape=source.shape[::-1], strides=source.strides[::-1])
    return shard._replace(box=Box(*(pair[::-1] for pair in shard.box)), source=source, item=None)


def cut_out(tensor: Tensor, box: Box, ndim: int) -> Tensor:
    """The elements of a tensor in a box, without its leading dimensions of size 1, so that `ndim` are left."""
    index = tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))
    found = sliced(tensor, slicing_of(tensor.shape, index))
    gone, shards = len(tensor.shape) - ndim, found.shards
    for _ in range(gone):
        shards = tuple(map(_without_rows, shards))
    return _made(tensor, found.shape[gone:], shards)


def put_in(parts: Sequence[tuple[Tensor, Box]], shape: Ints) -> Tensor:
    """A tensor of `shape` made of parts, each with its box: the inverse of `cut_out`."""
    shards: list[Shard] = []
    for tensor, box in parts:
        found = sliced(tensor, slicing_of(tensor.shape, ...)).shards
        for _ in range(len(shape) - len(tensor.shape)):
            found = tuple(_in_row(shard, 0) for shard in found)
        for shard in found:
            moved = tuple(start + at for start, at in zip(box.offsets, shard.box.offsets, strict=True))
            shards.append(shard._replace(box=Box(moved, shard.box.sizes)))
    return _made(parts[0][0], shape, shards)


def _made(like: Tensor, shape: tuple[int, ...], shards: Iterator[Shard] | Sequence[Shard] | map[Shard]) -> Tensor:
    """A tensor with one shard per distinct box, in the order of their offsets."""
    ordered = tuple(sorted(shards, key=lambda s: s.box.offsets))
    return replace(like, shape=tuple(shape), shards=ordered, kind="plain", placements=None, mesh=None)
