"""Boxes, the regions of tensors, and how torch cuts tensors into them.

Every region is a `Box`. A run of a flattened tensor (FSDP1's flat parameters, ZeRO's partitions) is not a box,
but it is at most 2·ndim - 1 of them, so `span_boxes` brings it into the same model.

Everything here is arithmetic in Python integers, which do not wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from operator import add, itemgetter, sub
from typing import NamedTuple

Ints = tuple[int, ...]
Run = tuple[int, int]
"""`(start, length)` along one dimension."""


class Box(NamedTuple):
    """An axis-aligned region of a tensor.

    Attributes:
        offsets: first index per dimension, in elements of the global tensor.
        sizes: extent per dimension; `()` for the only element of a 0-d tensor.
    """

    offsets: Ints
    sizes: Ints

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The region that covers all of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def ends(self) -> Ints:
        """One past the last index, per dimension."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether the box lies within a tensor of `shape`."""
        return (
            len(self.offsets) == len(self.sizes) == len(shape)
            and min(self.offsets, default=0) >= 0
            and min(self.sizes, default=0) >= 0
            and all(end <= n for end, n in zip(self.ends, shape, strict=True))
        )

    def intersect(self, other: Box) -> Box | None:
        """The common region of two boxes, or None when it is empty."""
        # Without generators: a rank of a thousand does this for each of a million shards.
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, map(add, *self), map(add, *other)))
        sizes = tuple(map(sub, ends, offsets))
        return Box(offsets, sizes) if min(sizes, default=1) > 0 else None

    def seen_from(self, other: Box) -> Box:
        """The same region with offsets relative to `other`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def index_of(self, flat: int) -> Ints:
        """The index in the tensor of element `flat` of this region, counted in row-major order."""
        index: list[int] = []
        for n, offset in zip(reversed(self.sizes), reversed(self.offsets), strict=True):
            flat, place = divmod(flat, n)
            index.insert(0, offset + place)
        return tuple(index)

    def along(self, dim: int, start: int, length: int) -> Box:
        """The box with another run along a dimension."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = start, length
        return Box(tuple(offsets), tuple(sizes))

    @property
    def transposed(self) -> Box:
        """The box with its last two dimensions exchanged."""
        return Box(*((*of[:-2], of[-1], of[-2]) for of in self))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{e}" for o, e in zip(self.offsets, self.ends, strict=True)) + "]"

    @property
    def label(self) -> str:
        """The box in front of a sentence about it: `[0:4, 2:5]: `; "" for the one element of a 0-d tensor."""
        return f"{self}: " if self.sizes else ""


def in_a_row(shape: Sequence[int], offsets: Sequence[Ints], sizes: Sequence[Ints]) -> bool:
    """Whether boxes follow each other along one dimension and span the others, as most tensors are cut.

    If so, they cover each element of a tensor of `shape` once.
    """
    whole, kinds = tuple(shape), {*sizes}
    if not offsets or {*map(len, offsets), *map(len, kinds)} != {len(whole)}:
        return False
    dim = next((d for d, n in enumerate(whole) if sizes[0][d] != n), None)
    if dim is None:
        return len(offsets) == 1 and not any(offsets[0])
    for d, n in enumerate(whole):
        if d != dim and ({size[d] for size in kinds} != {n} or any(map(itemgetter(d), offsets))):
            return False
    if min(size[dim] for size in kinds) <= 0:
        return False
    starts, lengths = list(map(itemgetter(dim), offsets)), list(map(itemgetter(dim), sizes))
    if starts != sorted(starts):
        starts, lengths = map(list, zip(*sorted(zip(starts, lengths, strict=True)), strict=True))
    return [*starts, whole[dim]] == [0, *map(add, starts, lengths)]


def in_slabs(shape: Ints, offsets: Sequence[Ints], sizes: Sequence[Ints]) -> bool:
    """Whether boxes follow each other as in `in_a_row`, or form slabs that are each covered that way.

    Layers of a stacked weight are such slabs, and so are the tiles of a grid. False proves nothing.
    """
    if in_a_row(shape, offsets, sizes):
        return True
    for dim, length in enumerate(shape):
        slabs: dict[Run, list[int]] = {}
        for place, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            if not len(offset) == len(size) == len(shape):
                return False
            slabs.setdefault((offset[dim], size[dim]), []).append(place)
        runs = sorted(slabs)
        starts, lengths = [run[0] for run in runs], [run[1] for run in runs]
        if len(runs) < 2 or min(lengths) <= 0 or [*starts, length] != [0, *map(add, starts, lengths)]:
            continue
        # Each box is in exactly one slab, so it suffices that every slab is covered.
        rest = [[*map(_without(dim), column)] for column in (offsets, sizes)]
        inner = _without(dim)(shape)
        return all(in_slabs(inner, *([column[i] for i in of] for column in rest)) for of in slabs.values())
    return False


def _without(dim: int) -> Callable[[Ints], Ints]:
    return lambda of: (*of[:dim], *of[dim + 1 :])


def contiguous_strides(shape: Sequence[int]) -> Ints:
    """Strides in elements of a row-major array of `shape`."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of a strided array follow each other in row-major order."""
    pairs = zip(shape, strides, contiguous_strides(shape), strict=True)
    return not prod(shape) or all(n == 1 or s == c for n, s, c in pairs)


def chunk(length: int, parts: int, index: int) -> Run:
    """Part `index` of `length` elements cut into `parts` by `torch.chunk`'s rule.

    Every part has ceil(length / parts) elements but the last ones, which may be short or empty.
    Source: torch.chunk; ChunkShardingSpec's `get_chunked_dim_size`; DTensor's `Shard`.
    """
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def chunk_runs(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """Part `index` of the concatenation of `runs`, cut by the chunk rule."""
    total = sum(length for _, length in runs)
    return _slice_runs(runs, *chunk(total, parts, index))


def strided_chunk_runs(runs: Sequence[Run], parts: int, index: int, split_factor: int) -> list[Run]:
    """Part `index` of `runs` under DTensor's `_StridedShard(dim, split_factor)`.

    The runs are cut into `split_factor` pieces, and each piece into `parts` chunks; the result is chunk `index` of
    every piece, in order. Source: torch/distributed/tensor/placement_types.py, `_StridedShard`.
    """
    total = sum(length for _, length in runs)
    kept: list[Run] = []
    for i in range(min(split_factor, total)):
        kept += chunk_runs(_slice_runs(runs, *chunk(total, split_factor, i)), parts, index)
    return _joined(kept)


def _slice_runs(runs: Sequence[Run], start: int, length: int) -> list[Run]:
    kept: list[Run] = []
    position = 0
    for first, n in runs:
        low, high = max(start, position), min(start + length, position + n)
        if low < high:
            kept.append((first + low - position, high - low))
        position += n
    return _joined(kept)


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Merge runs that follow each other directly."""
    joined: list[Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def grid_boxes(runs_per_dim: Sequence[Sequence[Run]]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of a product of index runs: `(box in the global tensor, box in the packed local tensor)`."""
    placed = [list(_packed(runs)) for runs in runs_per_dim]
    for cell in product(*placed):
        yield (
            Box(tuple(g for g, _, _ in cell), tuple(n for _, _, n in cell)),
            Box(tuple(p for _, p, _ in cell), tuple(n for _, _, n in cell)),
        )


def _packed(runs: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    position = 0
    for start, length in runs:
        yield start, position, length
        position += length


def span_boxes(shape: Sequence[int], start: int, length: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of a span of the flattened tensor of `shape`, each with its start within the span.

    A span of rows is one box; a span that begins or ends inside a row adds a box per dimension and side.
    """
    done = 0
    while done < length:
        box = _largest_box(shape, start + done, length - done)
        yield box, done
        done += box.numel


def _largest_box(shape: Sequence[int], start: int, length: int) -> Box:
    """The largest box of consecutive elements that begins at flat index `start`, with at most `length` elements."""
    strides = contiguous_strides(shape)
    index = tuple(start // s % n for s, n in zip(strides, shape, strict=True))
    for dim, stride in enumerate(strides):
        count = min(shape[dim] - index[dim], length // stride)
        if count and not any(index[dim + 1 :]):
            sizes = (1,) * dim + (count,) + tuple(shape[dim + 1 :])
            return Box(index, sizes)
    return Box(index, (1,) * len(shape))
