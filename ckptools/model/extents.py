"""Extents: the location of each shard of a tensor, stored by column, for fast answers about many shards.

A row is one shard: its box in the tensor, its file and rank, its byte offset in the file, the layout of its values, and
the CRC-32 of its zip entry. A `Shard` is a view of one row, made on access.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from operator import itemgetter, le, lt
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload
from weakref import WeakValueDictionary

from ckptools.model.regions import Box, Ints, in_slabs
from ckptools.model.shards import Item, Shard, ShardList, ShardSequence, Source

# -- columns: equally long lists, where element `i` of each belongs to thing `i` ---------------------------------------


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def by_value(column: Iterable[K]) -> dict[K, list[int]]:
    """The indices of each value of a column."""
    found: dict[K, list[int]] = defaultdict(list)
    for place, value in enumerate(column):
        found[value].append(place)
    return dict(found)


def take(column: Sequence[V], places: Sequence[int]) -> Sequence[V]:
    """The elements of a column at some indices, in their order."""
    if places == range(len(column)):
        return column
    if len(places) < 2:
        return [column[place] for place in places]
    found: tuple[V, ...] = itemgetter(*places)(column)
    return found


# -- values that many rows share ---------------------------------------------------------------------------------------


LOCAL = type(Path())


@dataclass(frozen=True, eq=False)
class ExtentFile:
    """A file with the shards of one rank. `extent_file` makes one object per distinct value, equal only to itself.

    Attributes:
        path: None for shards that cannot be read: the file is missing, cut before them, refused, or was not read.
        rank: the rank of the shards; None where no file states it.
        zstd: whether the items are compressed.
        has_items: whether each shard is an archive of its own in the file (DCP), not an entry of the file's archive.
    """

    path: Path | None
    rank: int | None
    zstd: bool = False
    has_items: bool = True


_files: WeakValueDictionary[tuple[Path | int | None, int | None, bool, bool], ExtentFile] = WeakValueDictionary()


def extent_file(path: Path | None, rank: int | None, zstd: bool = False, has_items: bool = True) -> ExtentFile:
    """Return the one `ExtentFile` of these values: millions of rows share the few files of a checkpoint."""
    # A remote path caches fetched bytes: an equal path of an earlier `open` must not stand in for it.
    key = path if path is None or type(path) is LOCAL else id(path), rank, zstd, has_items
    found = _files.get(key)
    return found if found is not None else _files.setdefault(key, ExtentFile(path, rank, zstd, has_items))


class ExtentLayout(NamedTuple):
    """Where the values lie behind the first byte of an extent; extents that differ only in values share it.

    Attributes:
        dtype: torch's name.
        shape: sizes per dimension.
        strides: in elements.
        offset: byte offset of element [0, …, 0], from the start of the extent.
        record: name of the zip entry.
        record_span: `(offset, length)` of that entry in bytes, from the start of the extent.
    """

    dtype: str
    shape: Ints
    strides: Ints
    offset: int
    record: str
    record_span: tuple[int, int]

    @classmethod
    def of(cls, source: Source, start: int) -> ExtentLayout:
        """The layout of a source whose extent begins at byte `start` of its file."""
        at, nbytes = source.record_span
        span = at - start, nbytes
        return cls(source.dtype, source.shape, source.strides, source.offset - start, source.record, span)

    def source(self, path: Path, start: int, crc: int) -> Source:
        """The source of an extent with this layout at byte `start` of a file; `crc` is the CRC-32 of its zip entry."""
        at, nbytes = self.record_span
        span = start + at, nbytes
        return Source(path, start + self.offset, self.dtype, self.shape, self.strides, self.record, span, crc)


# -- extents -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Extents(ShardSequence):
    """The location of each shard of a tensor: row `i` of every column belongs to shard `i`.

    Attributes:
        dtype: torch's name.
        offsets: of the shards, in elements of the tensor.
        sizes: of the shards.
        files: the file of each shard.
        starts: byte offsets of the shards' items, or of their entries in the files' archives.
        lengths: of the items in bytes; 0 for shards that are not items.
        layouts: where the values of each read shard lie; None for unread shards. Empty while no shard is read.
        crcs: the CRC-32 of each read shard's zip entry; 0 where none is stated.
        located: shards that the columns cannot describe: encoded, compressed, or of another dtype.
    """

    dtype: str
    offsets: list[Ints] = field(default_factory=list)
    sizes: list[Ints] = field(default_factory=list)
    files: list[ExtentFile] = field(default_factory=list)
    starts: MutableSequence[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    layouts: list[ExtentLayout | None] = field(default_factory=list)
    crcs: array[int] = field(default_factory=lambda: array("I"))
    located: dict[int, Shard] = field(default_factory=dict)
    _in_a_row: tuple[int, Ints, bool] | None = field(default=None, init=False, repr=False)
    _counted: tuple[list[ExtentLayout | None], int, int, bool] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, shards: Sequence[Shard], dtype: str) -> Extents:
        """Build the extents of some shards, in their order; extents are returned unchanged.

        Args:
            shards: of one tensor. From a rank file's list of all ranks' shards, only that rank's own are taken.
            dtype: torch's name for that of the tensor.
        """
        if isinstance(shards, Extents):
            return shards
        if isinstance(shards, ShardList):
            shards = shards.own
        made = cls(dtype)
        layout: ExtentLayout | None = None
        for i, shard in enumerate(shards):
            (offsets, sizes), rank, source, item, encoded = shard
            made.offsets.append(offsets)
            made.sizes.append(sizes)
            if source is None or item is not None or encoded is not None or source.dtype != dtype:
                # A shard that does not fit into the columns is kept whole; another rank's shard is never kept.
                if shard.is_here:
                    made.located[i] = shard
                file = shard.file
                made.files.append(extent_file(None if file is None else file.path, rank, False, item is not None))
                made.starts.append(0)
                made.layouts.append(None)
                made.crcs.append(0)
                continue
            start = source.record_span[0]
            own = ExtentLayout.of(source, start)
            layout = layout if layout == own else own  # one object for equal layouts in a row
            made.files.append(extent_file(source.path, rank, has_items=False))
            made.starts.append(start)
            made.layouts.append(layout)
            made.crcs.append(source.crc)
        made.lengths = [0] * len(made.offsets)
        return made

    # a sequence of shards

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
        """The item of a shard; None for a shard that cannot be read or is not an item."""
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

    # shards that were read

    def _layouts_counted(self) -> tuple[int, bool]:
        """The number of shards with a layout, and whether all layouts are equal; cached per list of layouts."""
        known = self._counted
        if known is None or known[0] is not self.layouts or known[1] != len(self.layouts):
            count = len(self.layouts) - self.layouts.count(None)
            alike = bool(self.layouts) and self.layouts.count(self.layouts[0]) == len(self)
            known = self._counted = self.layouts, len(self.layouts), count, alike
        return known[2], known[3]

    @property
    def all_read(self) -> bool:
        """Whether every shard was read."""
        others = sum(shard.was_read for shard in self.located.values()) if self.located else 0
        return len(self) == others + self._layouts_counted()[0]

    @property
    def seen(self) -> Iterator[Shard]:
        """The shards that were read, and the shards that the columns cannot describe."""
        if not self.layouts:
            return map(self._shard, sorted(self.located))
        return (self._shard(i) for i, layout in enumerate(self.layouts) if layout is not None or i in self.located)

    @property
    def perhaps_encoded(self) -> Iterable[Shard]:
        """The shards that the columns cannot describe."""
        return self.located.values()

    @property
    def read(self) -> Extents:
        """The extents of the shards that were read."""
        return self if self.all_read else Extents.of([shard for shard in self.seen if shard.was_read], self.dtype)

    @property
    def are_items(self) -> bool:
        """Whether each shard is an archive of its own, as in a DCP, whose metadata lists every rank's shards."""
        return len(self) > 0 and all(file.has_items for file in self.distinct_files)

    @property
    def distinct_files(self) -> set[ExtentFile]:
        """The distinct files of the shards."""
        return set(self.files)

    # regions, ranks, sizes

    @property
    def boxes(self) -> set[Box]:
        """The distinct boxes of the shards."""
        return set(map(Box._make, set(zip(self.offsets, self.sizes, strict=True))))

    @property
    def box_sizes(self) -> set[Ints]:
        """The distinct sizes of the shards."""
        return set(self.sizes)

    @property
    def boxes_read(self) -> set[Box]:
        """The distinct boxes of the shards that were read."""
        return self.boxes if self.all_read else {shard.box for shard in self.seen if shard.was_read}

    @property
    def has_copies(self) -> bool:
        """Whether two shards that were read have one box."""
        if self.all_read:
            return len(set(zip(self.offsets, self.sizes, strict=True))) < len(self)
        boxes = [shard.box for shard in self.seen if shard.was_read]
        return len(set(boxes)) < len(boxes)

    def lie_in_a_row(self, shape: Ints) -> bool:
        """Whether the shards, or slabs of them, follow each other through a tensor of `shape`; cached.

        If so, they cover each element once, even where some shards were not read.
        """
        if self._in_a_row is None or self._in_a_row[:2] != (len(self), shape):
            self._in_a_row = len(self), shape, in_slabs(shape, self.offsets, self.sizes)
        return self._in_a_row[2]

    @property
    def one_box(self) -> bool:
        """Whether all shards have one box."""
        return all(column.count(column[0]) == len(self) > 0 for column in (self.offsets, self.sizes))

    @property
    def ranks(self) -> set[int | None]:
        """The ranks of the shards; None stands for shards without a rank."""
        return {file.rank for file in self.distinct_files}

    @property
    def is_here(self) -> bool:
        """Whether every shard is in a file that is present, as far as is known."""
        others = self.located
        if not others:
            return all(file.path is not None for file in self.distinct_files)
        return all(others[i].is_here if i in others else f.path is not None for i, f in enumerate(self.files))

    # layouts and checksums

    @property
    def one_layout(self) -> ExtentLayout | None:
        """The layout that all shards share; None if one was not read or has another layout."""
        return self.layouts[0] if not self.located and self._layouts_counted()[1] else None

    @property
    def distinct_layouts(self) -> Iterable[ExtentLayout]:
        """The distinct layouts in the columns."""
        return [layout for layout in {id(layout): layout for layout in self.layouts}.values() if layout is not None]

    def kinds(self) -> dict[tuple[Ints, ExtentLayout], int] | None:
        """The number of shards by sizes and layout; None if the columns cannot describe every shard."""
        if self.located or not self.all_read:
            return None
        one = self.one_layout
        if one is not None:
            return {(sizes, one): count for sizes, count in Counter(self.sizes).items()}
        # By number first: to hash a layout for each of a million rows takes long.
        layouts = {id(layout): layout for layout in self.layouts if layout is not None}
        found: Counter[tuple[Ints, ExtentLayout]] = Counter()
        for (sizes, number), count in Counter(zip(self.sizes, map(id, self.layouts), strict=False)).items():
            found[sizes, layouts[number]] += count
        return found

    @property
    def record_sizes(self) -> set[tuple[int, int]]:
        """`(elements of the shard, bytes of its zip entry)` of each read shard that is not encoded."""
        kinds = set(zip(self.sizes, self.layouts, strict=False))
        found = {(prod(sizes), layout.record_span[1]) for sizes, layout in kinds if layout is not None}
        others = (s for s in self.located.values() if s.source is not None)
        return found | {(s.box.numel, s.source.record_span[1]) for s in others if s.source is not None}

    @property
    def states_any_crc(self) -> bool:
        """Whether a shard may state a CRC-32."""
        return bool(self.located) or any(self.crcs)

    @property
    def states_one_crc(self) -> bool:
        """Whether all shards state the same CRC-32, or none states one; False where that is unknown."""
        if self.located:
            return False
        return not self.crcs or self.crcs.count(self.crcs[0]) == len(self.crcs)

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that is equal for shards at the same locations; only for shards that the columns describe."""
        layouts = (self.one_layout,) if self.one_layout is not None else tuple(self.layouts)
        return tuple(self.offsets), tuple(self.files), tuple(self.starts), layouts

    # the same rows in another order

    def in_rank_order(self) -> Extents:
        """The same shards by rank, then by offsets; shards without a rank come first."""
        rank_of = {file: -1 if file.rank is None else file.rank for file in self.distinct_files}
        ranks = list(map(rank_of.__getitem__, self.files))
        if all(map(lt, ranks, islice(ranks, 1, None))):
            return self
        return self.in_order_of(list(zip(ranks, self.offsets, strict=True)))

    def in_order_of(self, keys: Sequence[Any]) -> Extents:
        """The same shards, sorted by a key per shard."""
        if all(map(le, keys, islice(keys, 1, None))):
            return self
        return self.taking(sorted(range(len(keys)), key=keys.__getitem__))

    def taking(self, order: Sequence[int]) -> Extents:
        """Some of the shards, by index, in that order."""
        return Extents(
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

    def extend(self, other: Extents) -> None:
        """Append the rows of other extents; both must have columns of layouts."""
        self.located |= {len(self) + i: shard for i, shard in other.located.items()}
        for name in ("offsets", "sizes", "files", "starts", "lengths", "layouts", "crcs"):
            getattr(self, name).extend(getattr(other, name))


def read_paths(several: Iterable[Extents]) -> set[Path]:
    """The files that were read and have the bytes of some tensors' shards."""
    files, paths = set[ExtentFile](), set[Path]()
    for extents in several:
        if extents.all_read and not extents.located:
            files.update(extents.files)
        else:
            paths |= {source.path for shard in extents.seen for source in shard.sources}
    return paths | {file.path for file in files if file.path is not None}
