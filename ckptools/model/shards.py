"""`Shard`: the part of a tensor that one rank holds, and the location of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, overload

from ckptools.dtypes import ITEMSIZE
from ckptools.model.records import RowMethods, displayed
from ckptools.model.regions import Box, Ints, contiguous_strides, is_contiguous
from ckptools.text import clip_middle
from ckptools.text import shape as shape_text

# -- where the values of a shard lie: in a strided array, in an archive of their own, or encoded as codes and scales ---


class Source(NamedTuple):
    """A strided array in a file.

    Attributes:
        path: the file.
        offset: byte offset of element [0, …, 0] in the file.
        dtype: torch's name, which gives the bytes per element. Always little-endian.
        shape: sizes per dimension.
        strides: in elements; 0 where a dimension is expanded.
        record: name of the zip entry, which also identifies the storage.
        record_span: `(offset, length)` in bytes of that entry in the file.
        crc: CRC-32 of the whole entry as the container states it; 0 when it states none.
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


Seen = Callable[[Source, bytes | memoryview], None]
"""Called with bytes that were read, and the source that begins with them."""


class Item(NamedTuple):
    """A part of a file that is a torch.save archive of one tensor; the archive's directory gives its byte offsets.

    Attributes:
        path: the file.
        offset: byte offset of the archive in the file.
        length: bytes of the archive.
        dtype: torch's name of the dtype that it must have.
        shape: sizes that it must have.
        zstd: whether zstd compressed the archive.
    """

    path: Path
    offset: int
    length: int
    dtype: str
    shape: Ints
    zstd: bool = False


class ScaleCoding(NamedTuple):
    """How scales that are themselves quantized are decoded: code to number, times a scale, plus an offset.

    Attributes:
        lookup: the part with a number for each code; "" if a code is a number itself.
        scale: the part with a scale for each block of codes.
        blocks: number of consecutive codes that share a scale.
        offset: number that is added in the end, or the name of its part.
        dtype: torch dtype of the computation.
        divides: whether numbers are divided by the scale, not multiplied with it.
    """

    lookup: str
    scale: str
    blocks: int
    offset: float | str = 0.0
    dtype: str = "float32"
    divides: bool = False


class Packing(NamedTuple):
    """How codes lie in integers: one after the other from the lowest bit, some across the end of an integer.

    Attributes:
        bits: bits of a code.
        axis: the dimension along which an integer has several codes, from the last: -1 or -2.
        order: for codes of each integer in another order, the place in it of the first, the second, … code.
    """

    bits: int
    axis: int
    order: Ints = ()


class Coding(NamedTuple):
    """How quantized values are decoded: code to number, minus a zero point, times the scale of its block.

    Attributes:
        codes: the part with a code for each element.
        scale: the part with a scale for each block, in row-major order; "" if values are not scaled.
        blocks: elements that share a scale: a number of consecutive ones in row-major order, or the extent of a
            block in each dimension; the last block of a dimension may be shorter.
        first: torch dtype to which codes are converted first.
        dtype: torch dtype of the values.
        lookup: the part with a number for each code; "" if a code is a number itself.
        zero: the part with the zero point of each block; "" without zero points.
        bits: bits per code; two codes of 4 bits share a byte.
        scale_coding: how the scales are decoded; None if they are numbers.
        factor: factor that every value is multiplied with in the end.
        numbers: the number of each code, if the class defines them and not the file.
        upper_first: whether the first of two codes is in the upper half of a byte.
        scale_dtype: torch dtype to which scales are converted first; "" for their own.
        tiled: whether scales are stored in the 128 x 4 tiles of NVIDIA's cuBLAS.
        packing: how codes lie in integers; None if each has an element, or `bits` describes them.
        zero_packing: the same for the zero points of a matrix.
        zero_offset: number that is added to each zero point; without zero points it is the zero point.
        groups: the part with the number of the group of each index along `packing.axis`; "" for groups in a row.
        exponents: for scales that are exponents of two, the exponent that stands for 1; 0 for other scales.
        transposed: whether the parts describe the tensor with its last two dimensions exchanged.
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
    packing: Packing | None = None
    zero_packing: Packing | None = None
    zero_offset: int = 0
    groups: str = ""
    exponents: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class LowRank:
    """How the values of a weight with a LoRA adapter are computed: W + scaling · B A, in float32.

    With DoRA each row of the sum gets the length that `magnitude` has for it.

    Attributes:
        base: shards of W, each region once.
        a: shards of A, [r, in].
        b: shards of B, [out, r].
        magnitude: shards of the lengths of rows, [out]; empty without DoRA.
        rank: r.
        scaling: the factor of B A.
        transposed: whether W is [in, out], as in an embedding and in GPT-2's Conv1D; else [out, in].
        dtype: torch dtype of W, and of the result.
        lengths: the lengths of the rows of W + scaling · B A, once they are computed.
    """

    base: tuple[Shard, ...]
    a: tuple[Shard, ...]
    b: tuple[Shard, ...]
    magnitude: tuple[Shard, ...]
    rank: int
    scaling: float
    transposed: bool
    dtype: str
    lengths: list[Any] = field(default_factory=list, compare=False, repr=False)


class Encoded(NamedTuple):
    """A part of a tensor whose values are computed from other tensors: codes and scales, or a weight and its adapter.

    Attributes:
        name: dotted name of the class.
        parts: name and source of each inner tensor.
        coding: how the parts are decoded; None if ckptools does not know.
        shape: sizes of the encoded tensor.
        box: this part's region of it.
        stated: the extent of a block, as stated by an object whose coding is unknown; empty if it states none.
    """

    name: str
    parts: tuple[tuple[str, Source], ...]
    coding: Coding | LowRank | None
    shape: Ints
    box: Box
    stated: Ints = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of the inner tensors."""
        return tuple(source for _, source in self.parts)

    def part(self, box: Box) -> Encoded:
        """A region of this part."""
        offsets = tuple(a + b for a, b in zip(self.box.offsets, box.offsets, strict=True))
        return self._replace(box=Box(offsets, box.sizes))

    def per(self, name: str) -> str:
        """Describe how many elements, or scales, share an entry of a part; "" if each has its own."""
        if not isinstance(self.coding, Coding):
            return ""
        if self.coding.scale_coding is not None and name == self.coding.scale_coding.scale:
            return f"{self.coding.scale_coding.blocks} scales"
        if name not in (self.coding.scale, self.coding.zero):
            return ""
        blocks = self.coding.blocks
        if isinstance(blocks, int):
            return f"{blocks} elements"
        if self.coding.transposed:
            blocks = (*blocks[:-2], blocks[-1], blocks[-2])
        return "the whole" if blocks == self.shape else shape_text(blocks)


# -- a shard -----------------------------------------------------------------------------------------------------------


@displayed
class Shard(NamedTuple):
    """One rank's box of a tensor.

    Attributes:
        box: its place in the global tensor.
        rank: the global rank that holds it; None when the file does not say (HSDP names group-local ranks).
        source: where its values are; None if its file was not read, or the values are encoded.
        item: the part of a file that contains the source, if the format packs each shard (DCP); None otherwise.
        encoded: the inner tensors that its file has instead of values.
    """

    box: Box
    rank: int | None
    source: Source | None
    item: Item | None = None
    encoded: Encoded | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """All sources from which the shard's values are computed; empty if its file was not read."""
        if self.source is not None:
            return (self.source,)
        return self.encoded.sources if self.encoded is not None else ()

    @property
    def was_read(self) -> bool:
        """Whether the shard's file was read."""
        return self.source is not None or self.encoded is not None

    @property
    def is_here(self) -> bool:
        """Whether the shard's file is present, as far as is known."""
        return self.was_read or self.item is not None

    @property
    def file(self) -> Source | Item | None:
        """The shard's source or item; None where its file is unknown."""
        return next(iter(self.sources), self.item)

    def part(self, box: Box, place: Box) -> Shard:
        """A region of this shard.

        Args:
            box: the region, relative to the first element of the shard.
            place: the same region, relative to the tensor.
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
    """Sort shards by rank, then by offsets; shards without a rank come first."""
    found = list(shards)
    keys = [(-1 if s.rank is None else s.rank, s.box.offsets) for s in found]
    return tuple([found[i] for i in sorted(range(len(keys)), key=keys.__getitem__)])


class ShardSequence(RowMethods[Shard], Sequence[Shard]):
    """The shards of a tensor; there may be too many for an object each."""

    __slots__ = ()

    @property
    def seen(self) -> Iterable[Shard]:
        """The shards whose sources may be known, not only their boxes."""
        return self

    @property
    def perhaps_encoded(self) -> Iterable[Shard]:
        """The shards among which encoded shards may be."""
        return self.seen

    @property
    def boxes(self) -> set[Box]:
        """The distinct boxes of the shards."""
        return {shard.box for shard in self}

    @property
    def box_sizes(self) -> set[Ints]:
        """The distinct sizes of the shards."""
        return {shard.box.sizes for shard in self}

    @property
    def ranks(self) -> set[int | None]:
        """The ranks of the shards; None stands for shards without a rank."""
        return {shard.rank for shard in self}

    @property
    def is_here(self) -> bool:
        """Whether every shard is in a file that is present, as far as is known."""
        return all(shard.is_here for shard in self)


class ShardList(ShardSequence):
    """A tensor's shards as one rank's file lists them: the shards of all ranks, with sources for its own.

    The list of all ranks is one object for the tensors of every rank: 1,024 ranks of 5,000 tensors each would
    otherwise list 5 billion shards.

    Args:
        listed: the shards of all ranks, without sources.
        start: index in that list of the first shard to replace.
        stop: one past the last.
        own: the rank's own shards, with sources.
    """

    __slots__ = ("listed", "own", "start", "stop")

    def __init__(self, listed: tuple[Shard, ...], start: int, stop: int, own: tuple[Shard, ...]) -> None:
        self.listed, self.start, self.stop, self.own = listed, start, stop, own

    @property
    def seen(self) -> tuple[Shard, ...]:
        """The rank's own shards."""
        return self.own

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
