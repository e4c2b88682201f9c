"""What a run reader makes of one entry that it does not interpret opcode by opcode.

A `ShardRecord` and its `Placement` are of `shard_runs`, the others of `chunk_runs`.
"""

from __future__ import annotations

from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Shard


class ShardRecord:
    """One shard of a ShardedTensor's list.

    Attributes:
        shard: its box and its rank within the tensor's process group; without a source.
        placement: the placement of the record.
        nobodys: the same without its rank.
        shapes: shapes that the box was lately found to lie in.
    """

    __slots__ = ("nobodys", "placement", "shapes", "shard")

    def __init__(self, offsets: Ints, sizes: Ints, rank: int | None) -> None:
        self.shard = Shard(Box(offsets, sizes), rank, None)
        self.nobodys = Shard(self.shard.box, None, None)
        self.placement = Placement()
        self.shapes: tuple[Ints, ...] = ()


class Placement:
    """Stands for the `_remote_device` of a record, which a ChunkShardingSpec lists again."""

    __slots__ = ()


class ChunkRecord:
    """A `ChunkStorageMetadata`.

    Attributes:
        box: its offsets and sizes.
    """

    __slots__ = ("box",)

    def __init__(self, box: Box) -> None:
        self.box = box


class IndexRecord:
    """A `MetadataIndex`; its hint is left out, as it is of its equality.

    Attributes:
        fqn: of the tensor or object.
        offset: of the chunk; None for an object.
    """

    __slots__ = ("fqn", "offset")

    def __init__(self, fqn: str, offset: Ints | None) -> None:
        self.fqn = fqn
        self.offset = offset


class PlaceRecord:
    """A `_StorageInfo` without transforms.

    Attributes:
        file: relative path.
        offset: byte offset of the item.
        length: bytes of the item.
    """

    __slots__ = ("file", "length", "offset")

    def __init__(self, file: str, offset: int, length: int) -> None:
        self.file = file
        self.offset = offset
        self.length = length


RECORDS = (ChunkRecord, IndexRecord, PlaceRecord)
