"""A shard: the part of a tensor that one rank holds, and where its values are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, overload

from ckptools.model.records import displayed
from ckptools.model.regions import Box
from ckptools.model.source import Encoded, Item, Source
from ckptools.text import clip_middle


@displayed
class Shard(NamedTuple):
    """One rank's piece of a tensor.

    Attributes:
        box: its place in the global tensor.
        rank: the global rank that holds it; None when the file does not say (HSDP names group-local ranks).
        source: where its values are; None when they are in a file that was not read, or are encoded.
        item: the part of a file with the source in it, where a format packs each piece (DCP); None otherwise.
        encoded: what its file has in the place of its values, where the class of the tensor stores other tensors.
    """

    box: Box
    rank: int | None
    source: Source | None
    item: Item | None = None
    encoded: Encoded | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """The extents of everything that its values are made of; empty when it is in a file that was not read."""
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

    def _summary(self) -> str:
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
    """Sort shards by rank, those of one rank by offsets; shards without a rank come first."""
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
