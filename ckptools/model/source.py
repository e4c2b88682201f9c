"""Where the bytes of one piece of a tensor lie: as a strided array, as an archive of their own, or in the form of a
class that keeps codes and scales in the place of values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.model.regions import Box, Ints, contiguous_strides, is_contiguous
from ckptools.text import shape as shape_text


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
