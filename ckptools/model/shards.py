"""The shards of a tensor, kept one by one or by column: their regions, their files, and which of them were read."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path

from ckptools.model.item_shards import HoldingFile, ItemShards
from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard, ShardList

Shards = tuple[Shard, ...] | ShardList | ItemShards


def with_bytes(shards: Shards) -> tuple[Shard, ...]:
    """The shards whose bytes are in files that were read."""
    own: Iterable[Shard] = shards.own if isinstance(shards, ShardList) else shards
    if isinstance(shards, ItemShards):
        own = map(shards.__getitem__, shards.read_places)
    return tuple([s for s in own if s.source is not None or s.encoded is not None])


def lie_in_a_row(shards: Shards, shape: Ints) -> bool:
    """Whether shards in columns, all of them read, cover each element of a tensor once; False where that is unknown."""
    return isinstance(shards, ItemShards) and shards.all_read and shards.lie_in_a_row(shape)


def boxes_with_bytes(shards: Shards) -> tuple[set[Box], int]:
    """The regions of the shards whose bytes are in files that were read, equal ones once; and how many shards."""
    if isinstance(shards, ItemShards) and shards.all_read:
        return shards.boxes(), len(shards)
    found = with_bytes(shards)
    return {s.box for s in found}, len(found)


def record_sizes(shards: Shards) -> set[tuple[int, int]]:
    """Elements of a shard and bytes of the record that it lies in, of those whose bytes are in files that were read."""
    found: set[tuple[int, int]] = set()
    if isinstance(shards, ItemShards):
        kinds = set(zip(shards.sizes, shards.layouts, strict=False))
        found = {(prod(sizes), layout.record_span[1]) for sizes, layout in kinds if layout is not None}
        shards = tuple(shards.located.values())
    return found | {(s.box.numel, s.source.record_span[1]) for s in with_bytes(shards) if s.source is not None}


def shard_boxes(shards: Shards) -> set[Box]:
    """The regions of shards, equal ones once."""
    return shards.boxes() if isinstance(shards, ItemShards) else {s.box for s in shards}


def shard_sizes(shards: Shards) -> set[Ints]:
    """The sizes of shards, equal ones once."""
    return set(shards.sizes) if isinstance(shards, ItemShards) else {s.box.sizes for s in shards}


def shard_ranks(shards: Shards) -> set[int | None]:
    """The ranks that hold shards; None among them for those of no rank."""
    return shards.ranks() if isinstance(shards, ItemShards) else {s.rank for s in shards}


def read_files(several: Iterable[Shards]) -> set[Path]:
    """The files that hold bytes of the shards of some tensors and were read."""
    files, paths = set[HoldingFile](), set[Path]()
    for shards in several:
        if isinstance(shards, ItemShards) and not shards.located and shards.all_read:
            files.update(shards.files)
        else:
            paths |= {source.path for shard in shards for source in shard.sources}
    return paths | {file.path for file in files if file.path is not None}


def states_any_crc(shards: Shards) -> bool:
    """Whether shards may state a CRC-32: False where they lie in columns, and none does."""
    return not isinstance(shards, ItemShards) or bool(shards.located) or any(shards.crcs)


def states_one_crc(shards: Shards) -> bool:
    """Whether shards in columns state the same CRC-32, or none; False where that is unknown."""
    if not isinstance(shards, ItemShards) or shards.located:
        return False
    return not shards.crcs or shards.crcs.count(shards.crcs[0]) == len(shards.crcs)


def all_here(shards: Shards) -> bool:
    """Whether files that are here hold all shards, as far as is known."""
    return shards.is_here if isinstance(shards, ItemShards) else all(s.is_here for s in shards)
