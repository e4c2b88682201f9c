"""The one in-memory model of all formats: a checkpoint is a tree of plain values with lazy tensors as leaves.

Readers make it, views and checks read it, consolidate plans from it. Everything here is data: it can be
printed, compared, pickled. Nothing here opens a file, and torch is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import prod
from typing import Any, Literal, NamedTuple

from ckptools.dtypes import ITEMSIZE, short
from ckptools.model.extents import Extents
from ckptools.model.problems import Code, Problem, displayed, to_dict
from ckptools.model.regions import Box, Ints, Run, in_slabs
from ckptools.model.shards import Encoded, Shard, ShardSequence, Source
from ckptools.text import and_others, first_few, plural, shape, size, spans

TensorKind = Literal[
    "plain", "sharded_tensor", "dtensor", "checkpointable", "chunks", "tensor_parallel", "flat_pieces", "meta",
    "sparse", "quantized", "unreadable", "storage",
]  # fmt: skip

SHARDED = ("sharded_tensor", "dtensor", "checkpointable", "chunks", "tensor_parallel", "flat_pieces")
"""Kinds of which ranks hold different pieces."""

UNLISTED = ("checkpointable",)
"""Sharded kinds of which a rank's file lists its own pieces only."""


CODES = "codes"


class Coded(NamedTuple):
    """What a tensor is of a weight that is quantized, and lies in several tensors beside each other.

    Attributes:
        part: `codes`, or what it is beside them: `scale_inv`, `zero_point`.
        scheme: how the weight is quantized, in words: `fp8, block scales 16 x 16`.
        weight: the key that the weight itself would have in the same state dict.
        numel: of codes, how many weights they stand for; None where that is not known; 0 of other parts.
    """

    part: str
    scheme: str
    weight: str
    numel: int | None

    @property
    def words(self) -> str:
        """What it is, for people: `codes of fp8, block scales 16 x 16`."""
        return f"{self.part if self.part == CODES else f'a part ({self.part})'} of {self.scheme}"


@displayed
@dataclass(frozen=True, slots=True, repr=False)
class Tensor:
    """A tensor known by shape, dtype and where its pieces lie. Its values stay on disk.

    A whole tensor is the case "one shard covering everything"; a replica is a shard with an equal box.

    Attributes:
        shape: global sizes.
        dtype: torch's name, such as `bfloat16`.
        shards: its pieces, in rank order; empty when no bytes exist (meta) or they cannot be placed.
        kind: how the file describes it.
        placements: DTensor's placements in its own words, such as `Shard(0)`; None for other kinds.
        mesh: sizes of the device mesh, for DTensor.
        requires_grad: as saved.
        parameter: whether it was saved as an `nn.Parameter`.
        world_size: number of ranks that share it; None when the file does not say.
        fill: in an output, what stands where no shard is: `nan` or `zero`; empty where nothing may be missing.
        note: why it cannot be loaded, when it cannot: what is in the way and what to do.
        coded: of which quantized weight it is a part; None where its elements are what they look like.
        contradictions: why pieces of it do not fit, each with its rank; these are not among the shards that are here.
        detail: for kinds whose bytes are not a dense array, the parts as the file has them.
        attributes: attributes that were saved with it, and its class where that only wraps the values.
    """

    shape: Ints
    dtype: str
    shards: Sequence[Shard]
    kind: TensorKind = "plain"
    placements: tuple[str, ...] | None = None
    mesh: Ints | None = None
    requires_grad: bool = False
    parameter: bool = False
    world_size: int | None = None
    fill: str = ""
    note: str = ""
    coded: Coded | None = None
    contradictions: tuple[tuple[int | None, str], ...] = ()
    detail: Any = field(default=None, compare=False, repr=False)
    attributes: Any = field(default=None, compare=False, repr=False)
    _extents: Extents | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def extents(self) -> Extents:
        """Where its pieces lie, by column; of a rank's list of the pieces of all ranks, those of that rank."""
        if self._extents is None:
            object.__setattr__(self, "_extents", Extents.of(self.shards, self.dtype))
        assert self._extents is not None
        return self._extents

    @property
    def every_shard(self) -> ShardSequence:
        """All its pieces, also those that no file here holds, to ask for their regions and ranks."""
        return self.shards if isinstance(self.shards, ShardSequence) else self.extents

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor, packed; storages on disk may be larger or shared."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def are_codes(self) -> bool:
        """Whether its elements are the codes of a quantized weight, and so no values."""
        return self.coded is not None and self.coded.part == CODES

    @property
    def found(self) -> tuple[Shard, ...]:
        """The pieces whose bytes are in files that were read."""
        return tuple([shard for shard in self._seen if shard.was_read])

    @property
    def first_source(self) -> Source | None:
        """Where the first of those pieces, or of what is stored in its place, begins; None where none was read."""
        return next((source for shard in self._seen for source in shard.sources), None)

    @property
    def _seen(self) -> Iterable[Shard]:
        return self.shards.seen if isinstance(self.shards, ShardSequence) else self.shards

    @property
    def lies_in_a_row(self) -> bool:
        """Whether those pieces, or slabs of them, follow each other through the tensor, and cover it once."""
        if len(self.shards) == 1:  # most tensors of most checkpoints, which need no columns for it
            (only,) = self.shards
            return only.was_read and only.box.sizes == self.shape and not any(only.box.offsets)
        return self.extents.all_read and self.extents.lie_in_a_row(self.shape)

    @property
    def has_copies(self) -> bool:
        """Whether a region is in several of those pieces."""
        return len(self.shards) > 1 and not self.lies_in_a_row and self.extents.has_copies

    @property
    def unread(self) -> bool:
        """Whether files that were not read yet may hold pieces whose bytes are not known here."""
        return False

    @property
    def lost(self) -> Mapping[int, str]:
        """Ranks whose file of it is known to be `missing`, `cut` or `bad`, while others were not read yet."""
        return {}

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different pieces of it."""
        return self.kind in SHARDED

    @property
    def encoded_as(self) -> tuple[Encoded, ...]:
        """The encoded forms that are stored instead of values, one of each class."""
        shards = self.shards.perhaps_encoded if isinstance(self.shards, ShardSequence) else self.shards
        found = {s.encoded.name: s.encoded for s in shards if s.encoded is not None}
        return tuple(found.values())

    def on_rank(self, rank: int) -> tuple[Shard, ...]:
        """The pieces that `rank` holds; empty for a rank that owns nothing."""
        return tuple(s for s in self.shards if s.rank == rank)

    def to_dict(self) -> dict[str, Any]:
        """Its dtype, shape, elements, bytes, how it is cut, and why it cannot be loaded."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        names = ("dtype", "shape", "numel", "nbytes", "kind", "placements", "mesh", "world_size", "parameter", "note")
        return {**{name: getattr(self, name) for name in names}, "shards": len(self.shards)}

    def _summary(self) -> str:
        known = f"{short(self.dtype)} {shape(self.shape)}, {size(self.nbytes)}, {plural(len(self.shards), 'shard')}"
        gone = 0 if self.unread or self.every_shard.is_here else len(self.shards) - len(self.found)
        missing = f", {gone} NOT HERE" if gone and self.kind != "meta" else ""
        return f"{known}{missing}, {'CANNOT BE LOADED' if self.note else 'not loaded'}"


ROUNDED_TO = ("bfloat16", "float16", "float32")
"""dtypes of weights that show whether an fp32 copy is theirs: it rounds to them, or equals them."""


class Rounded(NamedTuple):
    """A weight and its fp32 copy, which lie in different files or whose place was found and not stated.

    Attributes:
        fqn: the weight's name.
        copy: what must round to it, if the place is right.
        weight: the weight.
    """

    fqn: str
    copy: Tensor
    weight: Tensor

    @classmethod
    def pairs(cls, copies: Mapping[str, Any], weights: Mapping[str, Any], prefix: str = "") -> Iterator[Rounded]:
        """The fp32 copies that must round to the weights of their names, where both can be read and are as large.

        `prefix` comes before the names.
        """
        for name, copy in copies.items():
            weight = weights.get(name)
            if not isinstance(copy, Tensor) or not isinstance(weight, Tensor) or copy.note or weight.note:
                continue
            if copy.dtype == "float32" and weight.dtype in ROUNDED_TO and copy.shape == weight.shape:
                yield cls(f"{prefix}{name}", copy, weight)


# -- check that boxes cover every element of a tensor exactly once; else find gaps and overlaps ------------------------


class Cover(NamedTuple):
    """The elements of a tensor that a set of boxes leaves out, and the boxes that overlap.

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
        """Whether every element is in exactly one box."""
        return not (self.missing or self.overlaps or self.outside)


MAX_NAMED = 8
MAX_COMPARISONS = 2_000_000
"""A real layout needs a few comparisons per box; a layout built to waste time is refused."""


class TangledLayoutError(ValueError):
    """A layout so tangled that finding overlaps would take too long; no framework writes one."""


def cover(shape: Sequence[int], boxes: Iterable[Box]) -> Cover:
    """Check that `boxes` cover every element of a tensor of `shape` once, or say what is wrong.

    Boxes without elements are left out of it. Equal boxes are an overlap: replicas are for the caller to fold.

    Raises:
        TangledLayoutError: this would take too long.
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
            raise TangledLayoutError(f"{len(boxes)} boxes, too tangled to find overlaps")
        yield from ((a, box) for a in active if _meet(a, box))
        active.append(box)


def _meet(a: Box, b: Box) -> bool:
    pairs = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(ao < bo + bs and bo < ao + asz for ao, asz, bo, bs in pairs)


def _named_gaps(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[Box, ...]:
    """The rest of the tensor without the boxes, as disjoint boxes in order."""
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
            raise TangledLayoutError(f"{len(boxes)} boxes, too tangled to find gaps")
        if inner != last[2]:
            holes += (((last[0], last[1]), *hole) for hole in last[2])
            last = (low, low, inner)
        last = (last[0], high, inner)
    return holes + [((last[0], last[1]), *hole) for hole in last[2]]


# -- of a tensor's shards: the problem that says what is missing or overlaps -------------------------------------------


def cover_problem(tensor: Tensor, fqn: str) -> Problem | None:
    """Why a tensor cannot be put together whole, or None."""
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
    return Problem(Code.TENSOR_GAP, text, ranks[0] if ranks else None, fqn)


def can_be_read(shape: Ints, boxes: Iterable[Box]) -> bool:
    """Whether boxes cover a tensor; False also where finding out would take too long."""
    try:
        return cover(shape, set(boxes)).exact
    except TangledLayoutError:
        return False


def _whose(tensor: Tensor, box: Box) -> str:
    ranks = sorted({s.rank for s in tensor.shards if s.box == box and s.rank is not None})
    return f" (rank {', '.join(map(str, ranks[:8]))})" if ranks else ""
