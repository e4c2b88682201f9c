"""Where a piece lies in a tensor: boxes, how torch cuts tensors into them, and the proof that they cover it.

Every region is a `Box`. A run of a flattened tensor (FSDP1's flat parameters, ZeRO's partitions) is not a box,
but it is at most 2·ndim - 1 of them, so `span_boxes` brings it into the same model.

Everything here is arithmetic in Python integers, which do not wrap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise, product
from math import prod
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
        """The region of a tensor of `shape` that is all of it."""
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
        """Whether this lies in a tensor of `shape`."""
        return (
            len(self.offsets) == len(self.sizes) == len(shape)
            and min(self.offsets, default=0) >= 0
            and min(self.sizes, default=0) >= 0
            and all(end <= n for end, n in zip(self.ends, shape, strict=True))
        )

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None when it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        if any(a >= b for a, b in zip(offsets, ends, strict=True)):
            return None
        return Box(offsets, tuple(b - a for a, b in zip(offsets, ends, strict=True)))

    def seen_from(self, other: Box) -> Box:
        """The same region with its place in `other`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{e}" for o, e in zip(self.offsets, self.ends, strict=True)) + "]"


def contiguous_strides(shape: Sequence[int]) -> Ints:
    """Strides in elements of a row-major array of `shape`."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def chunk(length: int, parts: int, index: int) -> Run:
    """Piece `index` of `length` elements cut by `torch.chunk`'s rule into `parts`.

    Every piece has ceil(length / parts) elements but the last ones, which may be short or empty.
    Source: torch.chunk; ChunkShardingSpec's `get_chunked_dim_size`; DTensor's `Shard`.
    """
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def chunk_runs(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """Piece `index` of the index list that `runs` spells, cut by the chunk rule."""
    total = sum(length for _, length in runs)
    return _slice_runs(runs, *chunk(total, parts, index))


def strided_chunk_runs(runs: Sequence[Run], parts: int, index: int, split_factor: int) -> list[Run]:
    """Piece `index` of `runs` under DTensor's `_StridedShard(dim, split_factor)`.

    The index list is cut into `split_factor` pieces and each of them into `parts` chunks; the piece is chunk
    `index` of every one, in order. Source: torch/distributed/tensor/placement_types.py, `_StridedShard`.
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
    """Merge runs that continue each other."""
    joined: list[Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def grid_boxes(runs_per_dim: Sequence[Sequence[Run]]) -> Iterator[tuple[Box, Box]]:
    """Boxes of the product of index lists: `(box in the global tensor, box in the packed local tensor)`."""
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
    """Boxes of a span of the flattened tensor of `shape`, each with its start within the span.

    A span of rows is one box; one that begins or ends inside a row adds a box per dimension and side.
    """
    done = 0
    while done < length:
        box = _largest_box(shape, start + done, length - done)
        yield box, done
        done += box.numel


def _largest_box(shape: Sequence[int], start: int, length: int) -> Box:
    """The biggest box that begins at flat index `start` and takes consecutive elements, at most `length`."""
    strides = contiguous_strides(shape)
    index = tuple(start // s % n for s, n in zip(strides, shape, strict=True))
    for dim, stride in enumerate(strides):
        count = min(shape[dim] - index[dim], length // stride)
        if count and not any(index[dim + 1 :]):
            sizes = (1,) * dim + (count,) + tuple(shape[dim + 1 :])
            return Box(index, sizes)
    return Box(index, (1,) * len(shape))


class Cover(NamedTuple):
    """What a set of boxes leaves out of a tensor, and where two of them meet.

    Attributes:
        missing: number of elements that no box holds.
        gaps: boxes that hold the missing elements; the first `MAX_NAMED` when there are overlaps too.
        overlaps: pairs of different boxes that share elements; at most `MAX_NAMED`.
        outside: boxes that do not lie in the tensor.
    """

    missing: int
    gaps: tuple[Box, ...]
    overlaps: tuple[tuple[Box, Box], ...]
    outside: tuple[Box, ...]

    @property
    def exact(self) -> bool:
        """Whether every element is held exactly once."""
        return not (self.missing or self.overlaps or self.outside)


MAX_NAMED = 8
MAX_COMPARISONS = 2_000_000
"""A real layout needs a few comparisons per box; a layout built to waste time is refused."""


class TangledLayoutError(ValueError):
    """The boxes lie so that telling whether they meet would take too long; no framework writes such a layout."""


def cover(shape: Sequence[int], boxes: Iterable[Box]) -> Cover:
    """Prove that `boxes` hold every element of a tensor of `shape` once, or say what is wrong.

    Boxes without elements are left out of it. Equal boxes are an overlap: replicas are for the caller to fold.

    Raises:
        TangledLayoutError: when that cannot be told in reasonable time.
    """
    boxes = list(boxes)
    if _in_a_row(shape, boxes):
        return Cover(0, (), (), ())
    filled = [b for b in boxes if b.numel or not b.inside(shape)]
    outside = tuple(b for b in filled if not b.inside(shape))[:MAX_NAMED]
    inside = [b for b in filled if b.inside(shape)]
    overlaps = tuple(islice(_overlapping(inside, len(shape)), MAX_NAMED))
    if not overlaps:
        missing = prod(shape) - sum(b.numel for b in inside)
        gaps = _named_gaps(shape, inside) if missing else ()
        return Cover(missing, gaps, (), outside)
    gaps = _named_gaps(shape, inside)
    return Cover(sum(g.numel for g in gaps), gaps[:MAX_NAMED], overlaps, outside)


def _in_a_row(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes follow each other along one dimension and span the others, which is how most tensors are cut."""
    whole = tuple(shape)
    if not boxes or any(len(b.sizes) != len(whole) or len(b.offsets) != len(whole) for b in boxes):
        return False
    dim = next((d for d, n in enumerate(whole) if boxes[0].sizes[d] != n), None)
    if dim is None:
        return len(boxes) == 1 and not any(boxes[0].offsets)
    at, before, behind = 0, whole[:dim], whole[dim + 1 :]
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        o, n = box.offsets, box.sizes
        if o[dim] != at or n[dim] <= 0 or n[:dim] != before or n[dim + 1 :] != behind or any(o[:dim] + o[dim + 1 :]):
            return False
        at += n[dim]
    return at == whole[dim]


def _overlapping(boxes: list[Box], ndim: int) -> Iterator[tuple[Box, Box]]:
    """Pairs that meet; a sweep along the dimension in which the boxes begin at the most places."""
    if not ndim:
        yield from pairwise(boxes)
        return
    dim = max(range(ndim), key=lambda d: len({b.offsets[d] for b in boxes}))
    active: list[Box] = []
    compared = 0
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        active = [a for a in active if a.offsets[dim] + a.sizes[dim] > box.offsets[dim]]
        compared += len(active)
        if compared > MAX_COMPARISONS:
            raise TangledLayoutError(f"{len(boxes)} boxes, too tangled to tell whether they overlap")
        yield from ((a, box) for a in active if _meet(a, box))
        active.append(box)


def _meet(a: Box, b: Box) -> bool:
    pairs = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(ao < bo + bs and bo < ao + asz for ao, asz, bo, bs in pairs)


def _named_gaps(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[Box, ...]:
    """What is left of the tensor when every box is taken out, as disjoint boxes in order."""
    dims = sorted(range(len(shape)), key=lambda d: -len({b.offsets[d] for b in boxes}))
    holes = _holes(shape, list(boxes), dims, [MAX_COMPARISONS])
    at = [dims.index(d) for d in range(len(shape))]
    spans = ([hole[i] for i in at] for hole in holes)
    gaps = [Box(tuple(a for a, _ in hole), tuple(b - a for a, b in hole)) for hole in spans]
    return tuple(sorted((g for g in gaps if g.numel), key=lambda g: g.offsets))


Hole = tuple[Run, ...]
"""`(first, one past the last)` index along each of some dimensions."""


def _holes(shape: Sequence[int], boxes: list[Box], dims: Sequence[int], budget: list[int]) -> list[Hole]:
    """Holes that `boxes` leave along `dims`: a sweep along the first, the others within each of its slabs.

    Raises:
        TangledLayoutError: the budget of comparisons is spent.
    """
    if not boxes:
        return [tuple((0, shape[d]) for d in dims)]
    if not dims:
        return []
    d, rest = dims[0], dims[1:]
    cuts = sorted({0, shape[d], *(b.offsets[d] for b in boxes), *(b.offsets[d] + b.sizes[d] for b in boxes)})
    waiting = sorted(boxes, key=lambda b: -b.offsets[d])
    active: list[Box] = []
    holes: list[Hole] = []
    last: tuple[int, int, list[Hole]] = (0, 0, [])
    for low, high in pairwise(cuts):
        active = [b for b in active if b.offsets[d] + b.sizes[d] > low]
        while waiting and waiting[-1].offsets[d] == low:
            active.append(waiting.pop())
        inner = _holes(shape, active, rest, budget)
        budget[0] -= 1 + len(active) + len(inner)
        if budget[0] < 0:
            raise TangledLayoutError(f"{len(boxes)} boxes, too tangled to tell what they leave out")
        if inner != last[2]:
            holes += (((last[0], last[1]), *hole) for hole in last[2])
            last = (low, low, inner)
        last = (last[0], high, inner)
    return holes + [((last[0], last[1]), *hole) for hole in last[2]]
