"""Check that boxes cover every element of a tensor exactly once; report gaps and overlaps as a problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from math import prod
from typing import NamedTuple

from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints, Run, in_slabs
from ckptools.model.tensor import Tensor
from ckptools.text import and_others, first_few, spans


class Cover(NamedTuple):
    """The elements of a tensor that no box of a set covers, and the boxes that overlap.

    Attributes:
        missing: number of elements that no box covers.
        gaps: boxes of the missing elements; the first `MAX_NAMED` when there are overlaps too.
        overlaps: pairs of different boxes that share elements; at most `MAX_NAMED`.
        outside: boxes that reach beyond the tensor.
    """

    missing: int
    gaps: tuple[Box, ...]
    overlaps: tuple[tuple[Box, Box], ...]
    outside: tuple[Box, ...]

    @property
    def exact(self) -> bool:
        """Whether every element is in exactly one box."""
        return not (self.missing or self.overlaps or self.outside)


MAX_NAMED = 8
MAX_COMPARISONS = 2_000_000
"""A real layout needs a few comparisons per box; a layout built to waste time is refused."""


class TangledLayoutError(ValueError):
    """A layout so tangled that finding overlaps would take too long; no framework writes one."""


def cover(shape: Sequence[int], boxes: Iterable[Box]) -> Cover:
    """Check that `boxes` cover every element of a tensor of `shape` once, or describe gaps and overlaps.

    Empty boxes are ignored. Equal boxes count as an overlap: the caller folds replicas.

    Raises:
        TangledLayoutError: finding the overlaps would take too long.
    """
    boxes = list(boxes)
    if in_slabs(tuple(shape), [b.offsets for b in boxes], [b.sizes for b in boxes]):
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


def _overlapping(boxes: list[Box], ndim: int) -> Iterator[tuple[Box, Box]]:
    """Yield pairs of boxes that intersect: a sweep along the dimension with the most distinct starts."""
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
            raise TangledLayoutError(f"{len(boxes)} boxes, too tangled to find overlaps")
        yield from ((a, box) for a in active if _meet(a, box))
        active.append(box)


def _meet(a: Box, b: Box) -> bool:
    pairs = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(ao < bo + bs and bo < ao + asz for ao, asz, bo, bs in pairs)


def _named_gaps(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[Box, ...]:
    """The region of the tensor that no box covers, as disjoint boxes in order."""
    dims = sorted(range(len(shape)), key=lambda d: -len({b.offsets[d] for b in boxes}))
    holes = _holes(shape, list(boxes), dims, [MAX_COMPARISONS])
    at = [dims.index(d) for d in range(len(shape))]
    spans = ([hole[i] for i in at] for hole in holes)
    gaps = [Box(tuple(a for a, _ in hole), tuple(b - a for a, b in hole)) for hole in spans]
    return tuple(sorted((g for g in gaps if g.numel), key=lambda g: g.offsets))


Hole = tuple[Run, ...]
"""`(first, one past the last)` index along each of some dimensions."""


def _holes(shape: Sequence[int], boxes: list[Box], dims: Sequence[int], budget: list[int]) -> list[Hole]:
    """Gaps that `boxes` leave along `dims`: a sweep along the first dimension, recursing within each slab.

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
            raise TangledLayoutError(f"{len(boxes)} boxes, too tangled to find gaps")
        if inner != last[2]:
            holes += (((last[0], last[1]), *hole) for hole in last[2])
            last = (low, low, inner)
        last = (last[0], high, inner)
    return holes + [((last[0], last[1]), *hole) for hole in last[2]]


# -- the problem of a tensor whose shards leave gaps or overlap --------------------------------------------------------


def cover_problem(tensor: Tensor, fqn: str) -> Problem | None:
    """The problem that keeps a tensor from being put together, or None."""
    if tensor.contradictions:
        rank, why = tensor.contradictions[0]
        alike = tuple([r for r, other in tensor.contradictions if other == why and r is not None])
        more = and_others(len(tensor.contradictions) - max(len(alike), 1))
        one = rank if len(alike) < 2 else None
        return Problem(Code.LAYOUT_DISAGREES, f"{why}{more}", one, fqn, ranks=alike)
    if tensor.note:
        return Problem(Code.TENSOR_NOT_JOINED, tensor.note, None, fqn)
    if tensor.lies_in_a_row:
        return None
    try:
        covered = cover(tensor.shape, tensor.extents.boxes_read)
    except TangledLayoutError as error:
        return Problem(Code.TENSOR_NOT_JOINED, str(error), None, fqn, "error")
    if covered.exact:
        return None
    if covered.outside:
        box = covered.outside[0]
        text = f"a shard at {box}{_whose(tensor, box)} outside of {list(tensor.shape)}"
        return Problem(Code.TENSOR_OVERLAP, text, None, fqn)
    if covered.overlaps:
        a, b = covered.overlaps[0]
        text = f"shards {a}{_whose(tensor, a)} and {b}{_whose(tensor, b)} overlap"
        return Problem(Code.TENSOR_OVERLAP, text, None, fqn)
    ranks = sorted({s.rank for s in tensor.shards if not s.was_read and s.rank is not None})
    whose = f", held by rank {spans(ranks)}" if ranks else ""
    where = first_few(covered.gaps, 3)
    text = f"gap {where}: {covered.missing} of {tensor.numel} elements are in no file here{whose}"
    if not tensor.shape:
        text = f"its value is in no file here{whose}"
    return Problem(Code.TENSOR_GAP, text, ranks[0] if ranks else None, fqn)


MAX_REPEATED = 1 << 24
"""Largest expanded tensor (elements sharing bytes by stride 0), in elements, that is read element by element."""


def repeat_problem(tensor: Tensor) -> str:
    """Why a tensor is not read element by element, as a small file may claim any number of elements; "" if it is."""
    repeated = any(numel > max(nbytes, MAX_REPEATED) for numel, nbytes in tensor.extents.record_sizes)
    return "its strides show the bytes of a record more than once" if repeated else ""


def can_be_read(shape: Ints, boxes: Iterable[Box]) -> bool:
    """Whether boxes cover a tensor; False also if the check would take too long."""
    try:
        return cover(shape, set(boxes)).exact
    except TangledLayoutError:
        return False


def _whose(tensor: Tensor, box: Box) -> str:
    ranks = sorted({s.rank for s in tensor.shards if s.box == box and s.rank is not None})
    return f" (rank {', '.join(map(str, ranks[:8]))})" if ranks else ""
