"""The one in-memory model of all formats: a checkpoint is a tree of plain values with lazy tensors as leaves.

Readers make it, views and checks read it, consolidate plans from it. Everything here is data: it can be
printed, compared, pickled. Nothing here opens a file, and torch is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

from ckptools.dtypes import ITEMSIZE, short
from ckptools.model.item_shards import ItemShards
from ckptools.model.records import displayed, to_dict
from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard
from ckptools.model.shards import (
    Shards,
    all_here,
    boxes_with_bytes,
    lie_in_a_row,
    with_bytes,
)
from ckptools.model.source import Encoded
from ckptools.text import plural, shape, size

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
    shards: Shards
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
        return with_bytes(self.shards)

    @property
    def found_boxes(self) -> set[Box]:
        """The regions of those pieces, equal ones once."""
        return boxes_with_bytes(self.shards)[0]

    @property
    def has_copies(self) -> bool:
        """Whether a region is in several of those pieces."""
        if lie_in_a_row(self.shards, self.shape):
            return False
        if isinstance(self.shards, ItemShards) and self.shards.all_read:
            return self.shards.has_copies
        boxes, count = boxes_with_bytes(self.shards)
        return len(boxes) < count

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
        shards = self.shards.located.values() if isinstance(self.shards, ItemShards) else self.found
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
        gone = 0 if self.unread or all_here(self.shards) else len(self.shards) - len(self.found)
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
