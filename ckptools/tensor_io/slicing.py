"""Slices of a tensor by an index, as numpy means it: a tensor whose shards are parts of the original's shards.

Nothing is read here. A slice with a step is a matter of strides, so that of a file only what the slice has is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from operator import index
from typing import Any, NamedTuple

from ckptools.errors import UsageError
from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor


class Slicing(NamedTuple):
    """The elements that an index names, dimension by dimension.

    Attributes:
        starts: the lowest index.
        sizes: how many indices.
        steps: from one to the next, at least 1.
        flipped: dimensions of the result that go down, as those of slices with a negative step do.
        kept: sizes of the result; an int takes a dimension away.
    """

    starts: Ints
    sizes: Ints
    steps: Ints
    flipped: Ints
    kept: Ints

    @property
    def box(self) -> Box:
        """The smallest region that has all of it."""
        spans = ((n - 1) * step + 1 if n else 0 for n, step in zip(self.sizes, self.steps, strict=True))
        return Box(self.starts, tuple(spans))

    @property
    def stepping(self) -> bool:
        """Whether elements between those that it names are left out."""
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
    """An int or a slice for each dimension, `...` written out."""
    parts = list(key) if isinstance(key, tuple) else [key]
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), None)
    if at is not None:
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    if len(parts) > len(shape):
        raise UsageError(None, f"{len(parts)} indices for a tensor of shape {list(shape)}")
    return parts + [slice(None)] * (len(shape) - len(parts))


def _run_of(part: Any, n: int) -> tuple[int, int, int]:
    """The lowest index, how many there are, and the step, which is negative where they go down."""
    if isinstance(part, slice):
        named = range(*part.indices(n))
        return (min(named[0], named[-1]), len(named), named.step) if named else (0, 0, 1)
    try:
        at = None if isinstance(part, bool) else index(part)
    except TypeError:  # an array of numpy or torch has `__index__`, and mostly is none
        at = None
    if at is not None:
        if not -n <= at < n:
            raise IndexError(f"index {at} is out of range for size {n}")
        return at % n, 1, 1
    raise UsageError(None, "a lazy tensor is indexed with ints, slices and '...'; load it for others")


def sliced(tensor: Tensor, cut: Slicing) -> Tensor:
    """The part of a tensor that a slicing names, before any dimension is dropped.

    Raises:
        ReadError: the head of an item, which says where its bytes are, cannot be read.
    """
    shards = (_part_of(shard, cut) for shard in tensor.shards if shard.source or shard.item)
    return replace(tensor, shape=cut.sizes, shards=tuple(shard for shard in shards if shard is not None))


def _part_of(shard: Shard, cut: Slicing) -> Shard | None:
    """The part of a shard that is in the slice; None if there is none."""
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
    """Which of the named indices lie in `offset .. offset + length`: the first of them by its number, and how many."""
    first = max(0, -(-(offset - start) // step))
    end = min(size, -(-(offset + length - start) // step))
    return first, max(0, end - first)


def _places(box: Box, cut: Slicing, offsets: Sequence[int]) -> Ints:
    """The place in a shard at `offsets` of the first element of a region of the slice."""
    named = zip(cut.starts, box.offsets, cut.steps, offsets, strict=True)
    return tuple(start + at * step - offset for start, at, step, offset in named)


# -- bands ------------------------------------------------------------------------------------------------------------


def bands_of(box: Box, most: int) -> Iterator[Box]:
    """Cut a region into pieces of at most `most` elements, in row-major order.

    Args:
        box: the region.
        most: elements of a piece, at least one.
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
    """The number of pieces that `bands_of` cuts a region of these sizes into: a small file may state any shape."""
    dim = next((d for d, n in enumerate(sizes) if n > 1), None)
    if prod(sizes) <= most or dim is None:
        return 1
    rows = max(1, most // (prod(sizes) // sizes[dim]))
    times, rest = divmod(sizes[dim], rows)
    counts = [count_bands((*sizes[:dim], n, *sizes[dim + 1 :]), most) if n else 0 for n in (rows, rest)]
    return times * counts[0] + counts[1]
