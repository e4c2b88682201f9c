"""The shards of a tensor, kept one by one or by column: their regions, their files, and which of them were read."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import prod
from operator import itemgetter, le, lt
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

from ckptools.dtypes import ITEMSIZE
from ckptools.model.problems import RowMethods, displayed
from ckptools.model.regions import Box, Ints, contiguous_strides, in_slabs, is_contiguous
from ckptools.text import clip_middle
from ckptools.text import shape as shape_text

# -- columns: equally long lists, where element `i` of each belongs to thing `i` ---------------------------------------


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def by_value(column: Iterable[K]) -> dict[K, list[int]]:
    """The places of each value of a column."""
    found: dict[K, list[int]] = defaultdict(list)
    for place, value in enumerate(column):
        found[value].append(place)
    return dict(found)


def take(column: Sequence[V], places: Sequence[int]) -> Sequence[V]:
    """The elements of a column at some places, in their order."""
    if places == range(len(column)):
        return column
    if len(places) < 2:
        return [column[place] for place in places]
    found: tuple[V, ...] = itemgetter(*places)(column)
    return found


# -- where the bytes of one piece of a tensor lie: as a strided array, as an archive of their own, or in the form of a
# class that keeps codes and scales in the place of values.


class Source(NamedTuple):
    """The place of the elements of one strided array in a file.

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
        return is_contiguous(self.shape, self.strides)


Seen = Callable[[Source, bytes], None]
"""Called with bytes that were read, and a source that begins with the first of them."""


class Item(NamedTuple):
    """A part of a file that is a torch.save archive of one tensor; the archive's directory says where its bytes lie.

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


class ItemLayout(NamedTuple):
    """The place of the values in an item, the same in all items that differ in their values only.

    Attributes:
        dtype: torch's name.
        shape: sizes per dimension.
        strides: in elements.
        offset: byte offset of element [0, …, 0] in the item.
        record: name of the record in the item.
        record_span: `(offset, length)` in bytes of that record in the item.
    """

    dtype: str
    shape: Ints
    strides: Ints
    offset: int
    record: str
    record_span: tuple[int, int]

    @classmethod
    def of(cls, source: Source, start: int) -> ItemLayout:
        """The layout of an item at byte `start` of a file, by its source."""
        at, nbytes = source.record_span
        span = at - start, nbytes
        return cls(source.dtype, source.shape, source.strides, source.offset - start, source.record, span)

    def source(self, path: Path, start: int, crc: int) -> Source:
        """The source of an item of this layout at byte `start` of a file, with the CRC-32 of its record."""
        at, nbytes = self.record_span
        span = start + at, nbytes
        return Source(path, start + self.offset, self.dtype, self.shape, self.strides, self.record, span, crc)


class ScaleCoding(NamedTuple):
    """The decoding of scales that are codes themselves: each becomes a number, times a scale, plus an offset.

    Attributes:
        lookup: the part that has the number of each code; "" where a code is a number itself.
        scale: the part that has a scale for each block of codes.
        blocks: codes that follow each other and share a scale.
        offset: what is added in the end, or the part that has it.
        dtype: torch dtype that numbers are computed in.
        divides: whether numbers are divided by the scale, not multiplied with it.
    """

    lookup: str
    scale: str
    blocks: int
    offset: float | str = 0.0
    dtype: str = "float32"
    divides: bool = False


class Coding(NamedTuple):
    """The decoding of stored codes: each code becomes a number, less a zero point, times the scale of its block.

    Attributes:
        codes: the part that has a code for each element.
        scale: the part that has a scale for each block, in row-major order; "" where values are not scaled.
        blocks: elements that share a scale: how many that follow each other in row-major order, or the extent of a
            block in each dimension.
        first: torch dtype that codes become before anything is done with them.
        dtype: torch dtype of the values.
        lookup: the part that has the number of each code; "" where a code is a number itself.
        zero: the part that has the zero point of each block; "" where there is none.
        bits: of a code; two of 4 bits share a byte.
        scale_coding: the decoding of the scales; None where they are numbers.
        factor: what every value is multiplied with in the end.
        numbers: the number of each code, where the class has them and not the file.
        upper_first: whether the first of two codes is in the upper half of a byte.
        scale_dtype: torch dtype that scales become before anything is done with them; "" where it is their own.
        tiled: whether scales lie in the tiles of 128 x 4 that NVIDIA's cuBLAS takes.
    """

    codes: str
    scale: str
    blocks: int | Ints
    first: str
    dtype: str
    lookup: str = ""
    zero: str = ""
    bits: int = 8
    scale_coding: ScaleCoding | None = None
    factor: float = 1.0
    numbers: tuple[float, ...] = ()
    upper_first: bool = True
    scale_dtype: str = ""
    tiled: bool = False


class Encoded(NamedTuple):
    """A piece of a tensor whose class stores other tensors in the place of its values.

    Attributes:
        name: dotted name of the class.
        parts: what it stores: the name of each inner tensor, and where it lies.
        coding: how the parts make values; None where ckptools does not know.
        shape: sizes of what is encoded together.
        box: the piece, as a region of that.
        stated: the extent of a block, as an object says whose coding is not known; empty where it says none.
    """

    name: str
    parts: tuple[tuple[str, Source], ...]
    coding: Coding | None
    shape: Ints
    box: Box
    stated: Ints = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of its parts."""
        return tuple(source for _, source in self.parts)

    def part(self, box: Box) -> Encoded:
        """A region of this piece."""
        offsets = tuple(a + b for a, b in zip(self.box.offsets, box.offsets, strict=True))
        return self._replace(box=Box(offsets, box.sizes))

    def per(self, name: str) -> str:
        """The number of elements, or of scales, that share a number of a part, in words; "" where each has its own."""
        if self.coding is None:
            return ""
        if self.coding.scale_coding is not None and name == self.coding.scale_coding.scale:
            return f"{self.coding.scale_coding.blocks} scales"
        if name not in (self.coding.scale, self.coding.zero):
            return ""
        blocks = self.coding.blocks
        if isinstance(blocks, int):
            return f"{blocks} elements"
        return "the whole" if blocks == self.shape else shape_text(blocks)


# -- A shard: the part of a tensor that one rank holds, and where its values are ---------------------------------------


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


# -- the shards of a tensor by column, where a file lists a million of them --------------------------------------------


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


# -- the shards of a tensor, one by one or by column -------------------------------------------------------------------


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
