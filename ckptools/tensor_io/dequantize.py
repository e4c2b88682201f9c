"""Values of pieces that are stored as codes and scales, by the rule of the class that stores them (`Coding`).

The arithmetic is torch's: two dtypes are brought to the one that they promote to; what is computed in bfloat16 or
float16 is computed in float32 and rounded to the nearest, even where two are near. Which class has which rule is in
`pickles.classes.tensor_classes`, with the sources. numpy alone; a few hundred thousand elements at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ckptools.dtypes import ITEMSIZE
from ckptools.model.regions import Box, Ints, contiguous_strides
from ckptools.model.shard import Shard
from ckptools.model.source import Coding, Encoded, Source
from ckptools.model.tensor import Tensor
from ckptools.pickles.classes.tensor_classes import note_on
from ckptools.tensor_io.numbers import Raw, decoded
from ckptools.tensor_io.slicing import bands_of

BAND = 256 << 10
"""Elements that are worked out at a time."""

Numbers = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

Read = Callable[[Source], Raw]
"""Reads the raw elements of a source."""

UNSCALED = Coding("values", "", 1, "float32", "float32")
"""The coding of plain values of a smaller dtype, which float32 has exactly."""


def dequantized(tensor: Tensor) -> Tensor:
    """The tensor of the values that its codes stand for; the tensor itself where it is not stored as codes.

    A rank may hold its piece as it is, where that is too small to be worth quantizing; where values are float32, a
    smaller dtype becomes float32 exactly.
    """
    encoded = [shard.encoded for shard in tensor.found if shard.encoded is not None]
    if not encoded or tensor.note not in map(note_on, encoded):
        return tensor
    odd = next((piece for piece in encoded if piece.coding is None), None)
    if odd is not None:
        return replace(tensor, note=note_on(odd))
    dtype = next(piece.coding.dtype for piece in encoded if piece.coding is not None)
    shards = tuple(_in_dtype(shard, dtype) for shard in tensor.shards)
    dtypes = sorted({_dtype(shard) for shard in shards if shard.was_read})
    if len(dtypes) > 1:
        return replace(tensor, note=f"ranks hold it as values of several dtypes: {', '.join(dtypes)}")
    return replace(
        tensor, dtype=dtype, shards=shards, kind="plain" if tensor.kind == "quantized" else tensor.kind, note=""
    )


def _dtype(shard: Shard) -> str:
    """The dtype of a shard's values."""
    coding = shard.encoded.coding if shard.encoded is not None else None
    return coding.dtype if coding is not None else shard.source.dtype if shard.source is not None else ""


def _in_dtype(shard: Shard, dtype: str) -> Shard:
    """A shard that is stored as it is, as a piece of this dtype, where that has every value of its own."""
    source = shard.source
    if source is None or source.dtype not in ("bfloat16", "float16") or dtype != "float32":
        return shard
    whole = Box.whole(shard.box.sizes)
    return shard._replace(source=None, encoded=Encoded("", (("values", source),), UNSCALED, shard.box.sizes, whole))


def values(piece: Encoded, read: Read) -> Iterator[tuple[Box, Raw]]:
    """Yield the values of a piece, some at a time: their region of the piece, and their raw elements.

    Args:
        piece: what is stored; its class must be known.
        read: reads what it is stored as.
    """
    assert piece.coding is not None
    for box in bands_of(Box.whole(piece.box.sizes), BAND):
        if box.numel:
            yield box, _raw(_values(piece.part(box), piece.coding, read), piece.coding.dtype)


def _values(piece: Encoded, coding: Coding, read: Read) -> Numbers:
    """The values of a piece as float32, which has every value of their dtype."""
    parts, block = dict(piece.parts), _blocks(piece.box, piece.shape, coding.blocks)
    codes = _codes(piece, coding, read)
    dtype = coding.first
    if coding.tiled:
        assert not isinstance(coding.blocks, int)
        block = _in_tiles(block, piece.shape[-1] // coding.blocks[-1])
    with np.errstate(all="ignore"):
        if coding.numbers:
            found = rounded(np.array(coding.numbers, "<f4")[codes], dtype)
        elif coding.lookup:
            found = _numbers(parts[coding.lookup], read)[codes]
        else:
            found = rounded(decoded(codes, parts[coding.codes].dtype).astype("<f4"), dtype)
        if coding.zero:
            found = rounded(found - rounded(_of_blocks(parts[coding.zero], block, read), dtype), dtype)
        if coding.scale:
            dtype = _promoted(dtype, _scale_dtype(parts, coding))
            found = rounded(found * _scales(parts, coding, block, read), dtype)
        if coding.factor != 1:
            found = rounded(found * np.float32(coding.factor), dtype)
        return rounded(found, coding.dtype)


def _scale_dtype(parts: Mapping[str, Source], coding: Coding) -> str:
    """The dtype of scales once they are decoded."""
    if coding.scale_coding is not None:
        return coding.scale_coding.dtype
    return coding.scale_dtype or parts[coding.scale].dtype


def _scales(parts: Mapping[str, Source], coding: Coding, block: Indices, read: Read) -> Numbers:
    """The scale of each element, by the number of its block."""
    scales, nested = parts[coding.scale], coding.scale_coding
    if nested is None:
        return rounded(_of_blocks(scales, block, read), coding.scale_dtype)
    if nested.lookup:
        first = int(block.min())
        codes = _run(scales, first, int(block.max()) + 1, read)[block - first]
        numbers = _numbers(parts[nested.lookup], read)[codes]
    else:
        numbers = _of_blocks(scales, block, read)
    own = _of_blocks(parts[nested.scale], block // nested.blocks, read)
    found: Numbers = rounded(numbers / own if nested.divides else numbers * own, nested.dtype)
    if isinstance(nested.offset, str):
        return rounded(found + _numbers(parts[nested.offset], read), nested.dtype)
    return rounded(found + np.float32(nested.offset), nested.dtype) if nested.offset else found


def _numbers(source: Source, read: Read) -> Numbers:
    """The numbers of a small part."""
    found: Numbers = decoded(read(source).reshape(-1), source.dtype).astype("<f4")
    return found


def _in_tiles(block: Indices, columns: int) -> Indices:
    """The places of scales that lie in tiles of 128 rows and 4 columns, by their numbers in row-major order.

    In a tile the rows r, r + 32, r + 64 and r + 96 lie beside each other, 4 scales of each. Source: NVIDIA's cuBLAS
    documentation, "1D Block Scaling Factors Layout"; torchao's `to_blocked`.
    """
    row, column = np.divmod(block, columns)
    tile = row // 128 * -(-columns // 4) + column // 4
    found: Indices = ((tile * 32 + row % 32) * 4 + row % 128 // 32) * 4 + column % 4
    return found


def _codes(piece: Encoded, coding: Coding, read: Read) -> Raw:
    """The codes of a piece, in its shape."""
    source = dict(piece.parts)[coding.codes]
    if coding.bits == 8:
        return read(source.part(piece.box))
    at = _index(piece.box, contiguous_strides(piece.shape))
    first = int(at.min()) // 2
    packed = _run(source, first, int(at.max()) // 2 + 1, read)[at // 2 - first]
    return np.where(at % 2 == coding.upper_first, packed & 15, packed >> 4)


def _blocks(box: Box, shape: Ints, blocks: int | Ints) -> Indices:
    """The number of the block that each element of a region is in; of one dimension fewer where all are in one."""
    if isinstance(blocks, int):
        return _index(box, contiguous_strides(shape)) // blocks
    counts = tuple(n // b for n, b in zip(shape, blocks, strict=True))
    return _index(box, contiguous_strides(counts), blocks)


def _index(box: Box, strides: Ints, blocks: Ints | None = None) -> Indices:
    """The place of each element of a region, or of its block, in row-major order."""
    found: Indices = np.zeros((1,) * len(strides), np.int64)
    for d, (offset, size, stride) in enumerate(zip(box.offsets, box.sizes, strides, strict=True)):
        along = np.arange(offset, offset + size) // (blocks[d] if blocks else 1) * stride
        if along[0] == along[-1]:
            along = along[:1]
        found = found + along.reshape(tuple(-1 if d == other else 1 for other in range(len(strides))))
    return found


def _of_blocks(source: Source, block: Indices, read: Read) -> Numbers:
    """The numbers of blocks, each where an element is in the block."""
    first = int(block.min())
    run = _run(source, first, int(block.max()) + 1, read)
    return decoded(run, source.dtype).astype("<f4")[block - first]


def _run(source: Source, start: int, end: int, read: Read) -> Raw:
    """Some elements of a part in row-major order."""
    if not source.contiguous:
        return read(source).reshape(-1)[start:end]
    at = source.offset + start * ITEMSIZE[source.dtype]
    return read(source._replace(offset=at, shape=(end - start,), strides=(1,)))


def _promoted(one: str, other: str) -> str:
    """The dtype that torch computes two floating-point dtypes of at most 32 bits in."""
    return one if one == other else "float32"


def rounded(numbers: Numbers, dtype: str) -> Numbers:
    """float32 numbers, rounded to what a smaller dtype has, to nearest even; still float32."""
    if dtype == "float16":
        return numbers.astype("<f2").astype("<f4")
    if dtype != "bfloat16":
        return numbers
    bits = numbers.view("<u4")
    kept = (bits + (0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype("<u4").view("<f4")
    found: Numbers = np.where(np.isnan(numbers), np.float32(np.nan), kept)
    return found


def _raw(numbers: Numbers, dtype: str) -> Raw:
    """Raw elements of a dtype that has each of some numbers."""
    if dtype == "float16":
        return numbers.astype("<f2").view("<u2")
    bits: Raw = np.ascontiguousarray(numbers).view("<u4")
    return (bits >> 16).astype("<u2") if dtype == "bfloat16" else bits
