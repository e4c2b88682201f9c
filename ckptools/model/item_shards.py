"""The shards of a tensor by column, where a file lists a million of them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import le, lt
from pathlib import Path
from typing import Any, overload

from ckptools.model.records import RowMethods
from ckptools.model.regions import Box, Ints, in_slabs
from ckptools.model.shard import Shard
from ckptools.model.source import Item, ItemLayout, Source


@dataclass(frozen=True, slots=True, eq=False)
class HoldingFile:
    """A file with items, equal to itself only.

    Attributes:
        path: None for items that cannot be read: the file is missing, cut before them, or refused.
        rank: the rank that wrote it, if its name says so.
        zstd: whether the items were compressed.
        has_items: whether each shard is an archive of its own there (DCP), and not a record of the file's archive.
    """

    path: Path | None
    rank: int | None
    zstd: bool = False
    has_items: bool = True


@dataclass(slots=True, eq=False)
class ItemShards(RowMethods[Shard], Sequence[Shard]):
    """The shards of a tensor; shard `i` has element `i` of each column, and is made when somebody looks at it.

    Attributes:
        dtype: torch's name.
        offsets: of the shards, in elements of the tensor.
        sizes: of the shards.
        files: where their items lie.
        starts: byte offsets of the items.
        lengths: of the items in bytes.
        layouts: where the values lie in the items that were read and are like others; empty while there are none.
        crcs: the CRC-32 of the records of those.
        located: other shards of which more is known than where their items lie.
    """

    dtype: str
    offsets: list[Ints] = field(default_factory=list)
    sizes: list[Ints] = field(default_factory=list)
    files: list[HoldingFile] = field(default_factory=list)
    starts: MutableSequence[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    layouts: list[ItemLayout | None] = field(default_factory=list)
    crcs: array[int] = field(default_factory=lambda: array("I"))
    located: dict[int, Shard] = field(default_factory=dict)
    _in_a_row: tuple[int, Ints, bool] | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, place: int) -> Shard: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Shard, ...]: ...
    def __getitem__(self, place: int | slice) -> Shard | tuple[Shard, ...]:
        at = range(len(self))[place]
        return self._shard(at) if isinstance(at, int) else tuple([self._shard(i) for i in at])

    def __iter__(self) -> Iterator[Shard]:
        return map(self._shard, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def item(self, place: int) -> Item | None:
        """The item of a shard; None where it cannot be read, or is none."""
        file = self.files[place]
        if file.path is None or not file.has_items:
            return None
        return Item(file.path, self.starts[place], self.lengths[place], self.dtype, self.sizes[place], file.zstd)

    def _shard(self, place: int) -> Shard:
        known = self.located.get(place)
        if known is not None:
            return known
        box = Box(self.offsets[place], self.sizes[place])
        return Shard(box, self.files[place].rank, self._source(place), self.item(place))

    def _source(self, place: int) -> Source | None:
        layout, path = self.layouts[place] if self.layouts else None, self.files[place].path
        return layout.source(path, self.starts[place], self.crcs[place]) if layout and path else None

    def expect_layouts(self) -> None:
        """Make room for where the values of shards lie in their items, and for the CRC-32 of their records."""
        if not self.layouts:
            self.layouts, self.crcs = [None] * len(self), array("I", [0]) * len(self)

    @property
    def all_read(self) -> bool:
        """Whether the items of all of them were read."""
        others = sum(shard.was_read for shard in self.located.values())
        return len(self) == others + (len(self.layouts) - self.layouts.count(None))

    @property
    def one_layout(self) -> ItemLayout | None:
        """The layout that all of them have; None where one was not read, or has another."""
        first = self.layouts[0] if self.layouts and not self.located else None
        return first if self.layouts.count(first) == len(self) else None

    @property
    def one_box(self) -> bool:
        """Whether all of them have one region."""
        return all(column.count(column[0]) == len(self) > 0 for column in (self.offsets, self.sizes))

    def kinds(self) -> dict[tuple[Ints, ItemLayout], int] | None:
        """How many shards have which sizes and layout; None where those of one cannot be found in columns."""
        if self.located or not self.all_read:
            return None
        layouts = {id(layout): layout for layout in self.layouts if layout is not None}
        counts = Counter(zip(self.sizes, map(id, self.layouts), strict=False))
        return {(sizes, layouts[number]): count for (sizes, number), count in counts.items()}

    @property
    def read_places(self) -> Sequence[int]:
        """The numbers of the shards whose items were read."""
        if not self.layouts:
            return sorted(self.located)
        return [i for i, layout in enumerate(self.layouts) if layout is not None or i in self.located]

    @property
    def identity(self) -> tuple[object, ...]:
        """The places of their items, equal for shards that are the same; of those that are all in columns."""
        return tuple(self.files), tuple(self.starts)

    def lie_in_a_row(self, shape: Ints) -> bool:
        """Whether they, or slabs of them, follow each other through a tensor of `shape`; worked out once."""
        if self._in_a_row is None or self._in_a_row[:2] != (len(self), shape):
            self._in_a_row = len(self), shape, in_slabs(shape, self.offsets, self.sizes)
        return self._in_a_row[2]

    def boxes(self) -> set[Box]:
        """The regions of the shards, equal ones once."""
        return set(map(Box._make, set(zip(self.offsets, self.sizes, strict=True))))

    @property
    def has_copies(self) -> bool:
        """Whether two of them have one region."""
        return len(set(zip(self.offsets, self.sizes, strict=True))) < len(self)

    def ranks(self) -> set[int | None]:
        """The ranks that hold them; None for those of no rank."""
        return {file.rank for file in set(self.files)}

    @property
    def is_here(self) -> bool:
        """Whether files that are here hold all of them, as far as is known."""
        return all(file.path is not None for file in set(self.files))

    def in_rank_order(self) -> ItemShards:
        """The same shards by rank, those of one rank by offsets; shards without a rank come first."""
        rank_of = {file: -1 if file.rank is None else file.rank for file in set(self.files)}
        ranks = list(map(rank_of.__getitem__, self.files))
        if all(map(lt, ranks, islice(ranks, 1, None))):
            return self
        return self.in_order_of(list(zip(ranks, self.offsets, strict=True)))

    def in_order_of(self, keys: Sequence[Any]) -> ItemShards:
        """The same shards, sorted by a key for each of them."""
        if all(map(le, keys, islice(keys, 1, None))):
            return self
        return self.taking(sorted(range(len(keys)), key=keys.__getitem__))

    def taking(self, order: Sequence[int]) -> ItemShards:
        """Some of the shards, by their numbers, in that order."""
        return ItemShards(
            dtype=self.dtype,
            offsets=[self.offsets[i] for i in order],
            sizes=[self.sizes[i] for i in order],
            files=[self.files[i] for i in order],
            starts=[self.starts[i] for i in order],
            lengths=[self.lengths[i] for i in order],
            layouts=[self.layouts[i] for i in order] if self.layouts else [],
            crcs=array("I", [self.crcs[i] for i in order] if self.layouts else []),
            located={i: self.located[was] for i, was in enumerate(order) if was in self.located},
        )

    def extend(self, other: ItemShards) -> None:
        """Add shards that have columns of layouts, as these do."""
        self.located |= {len(self) + i: shard for i, shard in other.located.items()}
        for name in ("offsets", "sizes", "files", "starts", "lengths", "layouts", "crcs"):
            getattr(self, name).extend(getattr(other, name))


Holding = dict[tuple[Path | None, int | None], HoldingFile]
"""Files by path and rank."""


def in_columns(shards: Sequence[Shard], dtype: str, files: Holding) -> ItemShards:
    """Shards of rank files, by column.

    Args:
        shards: in the order that they have.
        dtype: torch's name.
        files: those of other tensors, to which these are added.
    """
    columns = ItemShards(dtype, layouts=[], crcs=array("I"))
    known: dict[ItemLayout, ItemLayout] = {}
    for i, shard in enumerate(shards):
        source = shard.source
        path = source.path if source is not None else None
        key = path, shard.rank
        columns.files.append(files.get(key) or files.setdefault(key, HoldingFile(path, shard.rank, has_items=False)))
        columns.offsets.append(shard.box.offsets)
        columns.sizes.append(shard.box.sizes)
        layout = ItemLayout.of(source, source.record_span[0]) if source is not None else None
        columns.layouts.append(known.setdefault(layout, layout) if layout is not None else None)
        columns.starts.append(source.record_span[0] if source is not None else 0)
        columns.lengths.append(0)
        columns.crcs.append(source.crc if source is not None else 0)
        if shard.item is not None or shard.encoded is not None or (source is not None and source.dtype != dtype):
            columns.located[i] = shard
    return columns
