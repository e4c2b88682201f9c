"""The one in-memory model of all formats: a checkpoint is a tree of plain values with lazy tensors as leaves.

Readers make it, views and checks read it, consolidate plans from it. Everything here is data: it can be
printed, compared, pickled. Nothing here opens a file, and torch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from ckptools.dtypes import ITEMSIZE, short
from ckptools.model.records import displayed, to_dict
from ckptools.model.regions import Box, Ints, contiguous_strides
from ckptools.text import clip_middle, plural, shape, size

TensorKind = Literal[
    "plain", "sharded_tensor", "dtensor", "chunks", "tensor_parallel", "flat_pieces", "meta", "sparse", "quantized",
    "unreadable",
]  # fmt: skip


class Source(NamedTuple):
    """Where the elements of one strided array lie.

    Attributes:
        path: the file.
        offset: byte offset of element [0, …, 0] in the file.
        dtype: torch's name, which gives the bytes per element. Always little-endian.
        shape: sizes per dimension.
        strides: in elements; 0 where a dimension is expanded.
        record: name of the container's record, which is also the identity of the storage.
        record_span: `(offset, length)` in bytes of that record in the file.
        crc: CRC-32 of the whole record as the container states it; 0 when it states none.
    """

    path: Path
    offset: int
    dtype: str
    shape: Ints
    strides: Ints
    record: str
    record_span: tuple[int, int]
    crc: int = 0

    def part(self, box: Box) -> Source:
        """The source of a box of this array."""
        first = sum(o * s for o, s in zip(box.offsets, self.strides, strict=True))
        return self._replace(offset=self.offset + first * ITEMSIZE[self.dtype], shape=box.sizes)

    def reshaped(self, shape: Ints) -> Source:
        """The same consecutive bytes as an array of another `shape`; only for a contiguous source."""
        return self._replace(shape=shape, strides=contiguous_strides(shape))

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other in row-major order."""
        pairs = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return not prod(self.shape) or all(n == 1 or s == c for n, s, c in pairs)


Seen = Callable[[Source, bytes], None]
"""Called with bytes that were read, and a source that begins with the first of them."""


class Item(NamedTuple):
    """A part of a file that is a torch.save archive of one tensor: where its bytes lie is told by its own directory.

    Attributes:
        path: the file.
        offset: byte offset of the archive in the file.
        length: bytes of the archive.
        dtype: torch's name for what it must hold.
        shape: sizes that it must have.
        zstd: whether the archive was compressed by zstd before it was written there.
    """

    path: Path
    offset: int
    length: int
    dtype: str
    shape: Ints
    zstd: bool = False


@displayed
class Shard(NamedTuple):
    """One rank's piece of a tensor.

    Attributes:
        box: its place in the global tensor.
        rank: the global rank that holds it; None when the file does not tell (HSDP names group-local ranks).
        source: where its bytes are; None when they are in a file that was not read.
        item: what to read to learn the source, where a format packs each piece (DCP); None otherwise.
    """

    box: Box
    rank: int | None
    source: Source | None
    item: Item | None = None

    def _told(self) -> str:
        rank = "of no rank" if self.rank is None else f"rank {self.rank}"
        file = self.source or self.item
        return f"{rank}: {self.box}, {clip_middle(file.path.name, 60) if file else 'in no file that was read'}"

    def _record(self) -> dict[str, Any]:
        file, source = self.source or self.item, self.source
        return {
            "rank": self.rank,
            "offsets": self.box.offsets,
            "sizes": self.box.sizes,
            "file": str(file.path) if file else "",
            "record": source.record if source else "",
            "offset": file.offset if file else None,
            "crc": f"{source.crc:08x}" if source and source.crc else "",
        }


def in_rank_order(shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """Shards sorted by rank, those of one rank by their place; nobody's come first."""
    found = list(shards)
    keys = [(-1 if s.rank is None else s.rank, s.box.offsets) for s in found]
    return tuple([found[i] for i in sorted(range(len(keys)), key=keys.__getitem__)])


class ShardList(Sequence[Shard]):
    """A tensor's shards as one rank's file lists them: those of all ranks, with its own in place of what it holds.

    The list of all ranks is one object for the tensors of every rank, for 1,024 ranks of 5,000 tensors each would
    list 5 billion shards.

    Args:
        listed: the shards of all ranks, none of which says where its bytes are.
        start: where in that list those that are replaced begin.
        stop: where the next one is.
        own: what stands in their place.
    """

    __slots__ = ("listed", "own", "start", "stop")

    def __init__(self, listed: tuple[Shard, ...], start: int, stop: int, own: tuple[Shard, ...]) -> None:
        self.listed, self.start, self.stop, self.own = listed, start, stop, own

    def __len__(self) -> int:
        return len(self.listed) - (self.stop - self.start) + len(self.own)

    def __iter__(self) -> Iterator[Shard]:
        return chain(self.listed[: self.start], self.own, self.listed[self.stop :])

    @overload
    def __getitem__(self, place: int) -> Shard: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Shard, ...]: ...
    def __getitem__(self, place: int | slice) -> Shard | tuple[Shard, ...]:
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (tuple, ShardList)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


Shards = tuple[Shard, ...] | ShardList


def with_bytes(shards: Shards) -> tuple[Shard, ...]:
    """Those of some shards whose bytes are in files that were read."""
    return tuple([s for s in (shards.own if isinstance(shards, ShardList) else shards) if s.source is not None])


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
        world_size: number of ranks that share it; None when the file does not tell.
        fill: in an output, what stands where no shard is: `nan` or `zero`; empty where nothing may be missing.
        note: why it cannot be loaded, when it cannot: what is in the way and what to do.
        detail: for kinds whose bytes are not a dense array, the parts as the file has them.
    """

    shape: Ints
    dtype: str
    shards: Shards
    kind: TensorKind = "plain"
    placements: tuple[str, ...] | None = None
    mesh: Ints | None = None
    requires_grad: bool = False
    parameter: bool = False
    world_size: int | None = None
    fill: str = ""
    note: str = ""
    detail: Any = field(default=None, compare=False, repr=False)

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor, packed; storages on disk may be larger or shared."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def found(self) -> tuple[Shard, ...]:
        """The pieces whose bytes are in files that were read."""
        return with_bytes(self.shards)

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
        return self.kind in ("sharded_tensor", "dtensor", "chunks", "tensor_parallel", "flat_pieces")

    def on_rank(self, rank: int) -> tuple[Shard, ...]:
        """The pieces that `rank` holds; empty for a rank that owns nothing."""
        return tuple(s for s in self.shards if s.rank == rank)

    def to_dict(self) -> dict[str, Any]:
        """What is known of it: dtype, shape, elements, bytes, how it is cut, and why it cannot be loaded."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        names = ("dtype", "shape", "numel", "nbytes", "kind", "placements", "mesh", "world_size", "parameter", "note")
        return {**{name: getattr(self, name) for name in names}, "shards": len(self.shards)}

    def _told(self) -> str:
        known = f"{short(self.dtype)} {shape(self.shape)}, {size(self.nbytes)}, {plural(len(self.shards), 'shard')}"
        return f"{known}, {'CANNOT BE LOADED' if self.note else 'not loaded'}"


class Rounded(NamedTuple):
    """A half-precision weight and its fp32 copy, whose place was found and not stated.

    Attributes:
        fqn: the weight's name.
        copy: what must round to it, if the place is right.
        weight: the weight.
    """

    fqn: str
    copy: Tensor
    weight: Tensor
