"""The proof that boxes hold every element of a tensor exactly once, or what they leave out and where they meet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from math import prod
from typing import NamedTuple

from ckptools.model.regions import Box, Run


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
