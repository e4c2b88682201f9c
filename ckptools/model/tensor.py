"""The one in-memory model of all formats: a checkpoint is a tree of plain values with lazy tensors as leaves.

Readers make it, views and checks read it, consolidate plans from it. Everything here is data: it can be
printed, compared, pickled. Nothing here opens a file, and torch is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, Literal, NamedTuple, overload

from ckptools.dtypes import ITEMSIZE, short
from ckptools.model.records import displayed, to_dict
from ckptools.model.regions import Box, Ints
from ckptools.model.source import Coding as Coding
from ckptools.model.source import Encoded as Encoded
from ckptools.model.source import Item as Item
from ckptools.model.source import Seen as Seen
from ckptools.model.source import Source as Source
from ckptools.text import clip_middle, plural, shape, size

TensorKind = Literal[
    "plain", "sharded_tensor", "dtensor", "checkpointable", "chunks", "tensor_parallel", "flat_pieces", "meta",
    "sparse", "quantized", "unreadable",
]  # fmt: skip

SHARDED = ("sharded_tensor", "dtensor", "checkpointable", "chunks", "tensor_parallel", "flat_pieces")
"""Kinds of which ranks hold different pieces."""

UNLISTED = ("checkpointable",)
"""Of these, those of which a rank's file lists its own pieces only."""


@displayed
class Shard(NamedTuple):
    """One rank's piece of a tensor.

    Attributes:
        box: its place in the global tensor.
        rank: the global rank that holds it; None when the file does not tell (HSDP names group-local ranks).
        source: where its values are; None when they are in a file that was not read, or are encoded.
        item: the part of a file that tells the source, where a format packs each piece (DCP); None otherwise.
        encoded: what its file has in the place of its values, where the class of the tensor stores other tensors.
    """

    box: Box
    rank: int | None
    source: Source | None
    item: Item | None = None
    encoded: Encoded | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where everything lies that its values are made of; nothing when it is in a file that was not read."""
        if self.source is not None:
            return (self.source,)
        return self.encoded.sources if self.encoded is not None else ()

    @property
    def was_read(self) -> bool:
        """Whether its bytes are in a file that was read."""
        return self.source is not None or self.encoded is not None

    @property
    def is_here(self) -> bool:
        """Whether a file that is here holds it, as far as is known."""
        return self.was_read or self.item is not None

    @property
    def file(self) -> Source | Item | None:
        """A file that holds it, with an offset in that; None where none is known."""
        return next(iter(self.sources), self.item)

    def part(self, box: Box, place: Box) -> Shard:
        """A region of this shard.

        Args:
            box: the region, as seen from the first element of the shard.
            place: where that is in the tensor.
        """
        source = self.source.part(box) if self.source is not None else None
        encoded = self.encoded.part(box) if self.encoded is not None else None
        return Shard(place, self.rank, source, self.item, encoded)

    def _told(self) -> str:
        rank = "of no rank" if self.rank is None else f"rank {self.rank}"
        file = self.file
        return f"{rank}: {self.box}, {clip_middle(file.path.name, 60) if file else 'in no file that was read'}"

    def _record(self) -> dict[str, Any]:
        file, source = self.file, next(iter(self.sources), None)
        return {
            "rank": self.rank,
            "offsets": self.box.offsets,
            "sizes": self.box.sizes,
            "file": str(file.path) if file else "",
            "record": source.record if source else "",
            "offset": file.offset if file else None,
            "crc": f"{source.crc:08x}" if source and source.crc else "",
            "class": self.encoded.name if self.encoded else "",
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
    own = shards.own if isinstance(shards, ShardList) else shards
    return tuple([s for s in own if s.source is not None or s.encoded is not None])


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
        return self.kind in SHARDED

    @property
    def encoded_as(self) -> tuple[Encoded, ...]:
        """What is stored in the place of values, a piece of each class once."""
        found = {s.encoded.name: s.encoded for s in self.found if s.encoded is not None}
        return tuple(found.values())

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
