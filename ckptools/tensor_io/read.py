"""Read tensor values from the files of the shards, and no other bytes.

numpy holds the bytes as unsigned integers of the element's width, so that every dtype is moved exactly, including
dtypes that numpy lacks. Only `load` and `load_slice` import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import NotWholeError, ReadError, UsageError
from ckptools.files.opening import File, OpenFiles
from ckptools.model.cover import cover
from ckptools.model.regions import Box, Ints, contiguous_strides
from ckptools.model.shards import Coding, Encoded, LowRank, Packing, Seen, Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.pickles.classes.tensors import note_on
from ckptools.tensor_io import dcp_items
from ckptools.tensor_io.numbers import Raw, decoded, raw_dtype
from ckptools.tensor_io.slicing import Slicing, bands_of, sliced

# -- decode shards that are stored as codes and scales, by the rule of their class (`Coding`) --------------------------
# The arithmetic is torch's: two dtypes are promoted to their common one; a computation in bfloat16 or float16 is done
# in float32 and rounded to nearest even. `pickles.classes.codings` has each class's rule, with its source. numpy alone,
# a few hundred thousand elements at a time.


BAND = 256 << 10
"""Elements decoded at a time."""

Numbers = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

Read = Callable[[Source], Raw]
"""Reads the raw elements of a source."""

UNSCALED = Coding("values", "", 1, "float32", "float32")
"""The coding of plain values of a smaller dtype, which float32 holds exactly."""


def dequantized(tensor: Tensor) -> Tensor:
    """The tensor of the decoded values; an unquantized tensor is returned unchanged.

    A rank may keep its shard unquantized if it is too small. If decoded values are float32, such a shard of a smaller
    dtype becomes float32 exactly.
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
    """Decode an unquantized bfloat16 or float16 shard to float32, which is exact; any other shard is unchanged."""
    source = shard.source
    if source is None or source.dtype not in ("bfloat16", "float16") or dtype != "float32":
        return shard
    whole = Box.whole(shard.box.sizes)
    return shard._replace(source=None, encoded=Encoded("", (("values", source),), UNSCALED, shard.box.sizes, whole))


def values(piece: Encoded, read: Read) -> Iterator[tuple[Box, Raw]]:
    """Yield the decoded values of an encoded shard band by band: `(box within the shard, raw elements)`.

    Args:
        piece: the encoded shard; its class must be known.
        read: reads the raw elements of its parts.
    """
    coding = piece.coding
    assert isinstance(coding, Coding)
    if coding.transposed:  # bands of the parts, not of the values: a band of values would lie in every row of codes
        for box, numbers in values(_transposed(piece, coding), read):
            yield box.transposed, numbers.swapaxes(-1, -2)
        return
    for box in bands_of(Box.whole(piece.box.sizes), BAND):
        if box.numel:
            yield box, _raw(_values(piece.part(box), coding, read), coding.dtype)


def _transposed(piece: Encoded, coding: Coding) -> Encoded:
    """The encoded shard as its parts describe it, with its last two dimensions exchanged."""
    shape = (*piece.shape[:-2], piece.shape[-1], piece.shape[-2])
    return piece._replace(coding=coding._replace(transposed=False), shape=shape, box=piece.box.transposed)


def _values(piece: Encoded, coding: Coding, read: Read) -> Numbers:
    """The values of an encoded shard as float32, which holds every value of their dtype."""
    parts, block = dict(piece.parts), _blocks(piece, coding, read)
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
        if coding.zero or coding.zero_offset:
            found = rounded(found - rounded(_zeros(piece, coding, block, read), dtype), dtype)
        if coding.scale:
            # torch computes with two floating-point dtypes of at most 32 bits in their common dtype, else in float32
            dtype = dtype if dtype == _scale_dtype(parts, coding) else "float32"
            found = rounded(found * _scales(parts, coding, block, read), dtype)
        if coding.factor != 1:
            found = rounded(found * np.float32(coding.factor), dtype)
        return rounded(found, coding.dtype)


def _zeros(piece: Encoded, coding: Coding, block: Indices, read: Read) -> Numbers:
    """The zero point of each element, given the index of its block; one number if all have the same."""
    if not coding.zero:
        return np.array(coding.zero_offset, "<f4")
    source = dict(piece.parts)[coding.zero]
    if coding.zero_packing is None:
        plain: Numbers = _of_blocks(source, block, read) + np.float32(coding.zero_offset)
        return plain
    assert not isinstance(coding.blocks, int)
    row, column = np.divmod(block, -(-piece.shape[-1] // coding.blocks[-1]))
    first, past = (int(row.min()), int(column.min())), (int(row.max()) + 1, int(column.max()) + 1)
    box = Box(first, (past[0] - first[0], past[1] - first[1]))
    packed = unpacked(source, coding.zero_packing, box, read)[row - first[0], column - first[1]]
    zeros: Numbers = packed.astype("<f4") + np.float32(coding.zero_offset)
    return zeros


def _scale_dtype(parts: Mapping[str, Source], coding: Coding) -> str:
    """The dtype of the decoded scales."""
    if coding.scale_coding is not None:
        return coding.scale_coding.dtype
    return coding.scale_dtype or parts[coding.scale].dtype


def _scales(parts: Mapping[str, Source], coding: Coding, block: Indices, read: Read) -> Numbers:
    """The scale of each element, given the index of its block."""
    scales, nested = parts[coding.scale], coding.scale_coding
    if coding.exponents:
        first = int(block.min())
        powers = _run(scales, first, int(block.max()) + 1, read)[block - first].astype(np.int32) - coding.exponents
        scaled: Numbers = np.ldexp(np.float32(1), powers)
        return scaled
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
    """The numbers in a small inner tensor, such as a table of codes."""
    found: Numbers = decoded(read(source).reshape(-1), source.dtype).astype("<f4")
    return found


def _in_tiles(block: Indices, columns: int) -> Indices:
    """Map row-major indices of scales to their places in tiles of 128 rows and 4 columns.

    In a tile the rows r, r + 32, r + 64 and r + 96 lie beside each other, 4 scales of each. Source: NVIDIA's cuBLAS
    documentation, "1D Block Scaling Factors Layout"; torchao's `to_blocked`.
    """
    row, column = np.divmod(block, columns)
    tile = row // 128 * -(-columns // 4) + column // 4
    found: Indices = ((tile * 32 + row % 32) * 4 + row % 128 // 32) * 4 + column % 4
    return found


def unpacked(source: Source, packing: Packing, box: Box, read: Read) -> Raw:
    """Unpack a box of codes from integers that have several each.

    Args:
        source: the integers.
        packing: how codes lie in them.
        box: the box of the codes.
        read: reads the raw elements of the source.
    """
    axis, width = len(box.sizes) + packing.axis, ITEMSIZE[source.dtype] * 8
    place = np.arange(box.offsets[axis], box.offsets[axis] + box.sizes[axis])
    if packing.order:
        whole, inside = np.divmod(place, len(packing.order))
        place = whole * len(packing.order) + np.array(packing.order)[inside]
    at, shift = np.divmod(place * packing.bits, width)
    first, past = int(at.min()), int((place * packing.bits + packing.bits - 1).max()) // width + 1
    words = read(source.part(box.along(axis, first, past - first)))
    along = tuple(-1 if d == axis else 1 for d in range(len(box.sizes)))
    found = np.take(words, at - first, axis) >> shift.astype(words.dtype).reshape(along)
    crossing = shift + packing.bits > width
    if crossing.any():
        rest = np.take(words, np.where(crossing, at + 1, at) - first, axis)
        rest <<= np.where(crossing, width - shift, 0).astype(words.dtype).reshape(along)
        found |= np.where(crossing.reshape(along), rest, 0).astype(words.dtype)
    codes: Raw = found & words.dtype.type((1 << packing.bits) - 1)
    return codes


def _codes(piece: Encoded, coding: Coding, read: Read) -> Raw:
    """The codes of an encoded shard, in its shape."""
    source = dict(piece.parts)[coding.codes]
    if coding.packing is not None:
        return unpacked(source, coding.packing, piece.box, read)
    if coding.bits == 8:
        return read(source.part(piece.box))
    at = _index(piece.box, contiguous_strides(piece.shape))
    first = int(at.min()) // 2
    packed = _run(source, first, int(at.max()) // 2 + 1, read)[at // 2 - first]
    return np.where(at % 2 == coding.upper_first, packed & 15, packed >> 4)


def _blocks(piece: Encoded, coding: Coding, read: Read) -> Indices:
    """The block index of each element of a shard; without a dimension along which all elements share a block."""
    box, blocks = piece.box, coding.blocks
    if isinstance(blocks, int):
        return _index(box, contiguous_strides(piece.shape)) // blocks
    counts = tuple(-(-n // b) for n, b in zip(piece.shape, blocks, strict=True))
    along = [np.arange(o, o + n) // b for o, n, b in zip(box.offsets, box.sizes, blocks, strict=True)]
    if coding.groups and coding.packing is not None:
        axis, groups = coding.packing.axis, dict(piece.parts)[coding.groups]
        part = groups.part(Box((box.offsets[axis],), (box.sizes[axis],)))
        along[axis] = decoded(read(part), groups.dtype).astype(np.int64)
    return _joined(along, contiguous_strides(counts))


def _index(box: Box, strides: Ints) -> Indices:
    """The row-major index of each element of a box."""
    return _joined([np.arange(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)], strides)


def _joined(along: Sequence[Indices], strides: Ints) -> Indices:
    """The row-major index of elements, given their indices along each dimension."""
    found: Indices = np.zeros((1,) * len(strides), np.int64)
    for d, (places, stride) in enumerate(zip(along, strides, strict=True)):
        places = places[:1] if (places == places[0]).all() else places
        found = found + (places * stride).reshape(tuple(-1 if d == other else 1 for other in range(len(strides))))
    return found


def _of_blocks(source: Source, block: Indices, read: Read) -> Numbers:
    """The numbers of blocks, by the block index of each element."""
    first = int(block.min())
    run = _run(source, first, int(block.max()) + 1, read)
    return decoded(run, source.dtype).astype("<f4")[block - first]


def _run(source: Source, start: int, end: int, read: Read) -> Raw:
    """Elements `start` to `end` of a part in row-major order."""
    if not source.contiguous:
        return read(source).reshape(-1)[start:end]
    at = source.offset + start * ITEMSIZE[source.dtype]
    return read(source._replace(offset=at, shape=(end - start,), strides=(1,)))


def rounded(numbers: Numbers, dtype: str) -> Numbers:
    """Round float32 numbers to the values of a smaller dtype, to nearest even; the result is still float32."""
    if dtype == "float16":
        return numbers.astype("<f2").astype("<f4")
    if dtype != "bfloat16":
        return numbers
    bits = numbers.view("<u4")
    kept = (bits + (0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype("<u4").view("<f4")
    found: Numbers = np.where(np.isnan(numbers), np.float32(np.nan), kept)
    return found


def _raw(numbers: Numbers, dtype: str) -> Raw:
    """Convert numbers to raw elements of a dtype that holds each of them exactly."""
    if dtype == "float16":
        return numbers.astype("<f2").view("<u2")
    bits: Raw = np.ascontiguousarray(numbers).view("<u4")
    return (bits >> 16).astype("<u2") if dtype == "bfloat16" else bits


MAX_SPAN = 32 << 20
"""Bytes of a file that are in memory at once when a strided view is read."""

MAX_GAP = 8 << 10
"""A gap of at most this many bytes between elements, or runs of them, is read too: cheaper than another call."""

# -- values for users --------------------------------------------------------------------------------------------------


def load(tensor: Tensor, rank: int | None = None) -> Any:
    """Read a tensor as a `torch.Tensor`; with `rank`, that rank's local tensor.

    Raises:
        NotWholeError: some of its elements are in no file.
        UsageError: the rank holds nothing of it.
    """
    if rank is not None:
        return _as_torch(_local(tensor, rank), tensor.dtype)
    return _as_torch(read_box(tensor, Box.whole(tensor.shape)), tensor.dtype)


def load_slice(tensor: Tensor, cut: Slicing) -> Any:
    """Read a slice of a tensor as a `torch.Tensor`.

    Raises:
        NotWholeError: some of its elements are in no file.
    """
    loaded = _as_torch(read_slice(tensor, cut).reshape(cut.kept), tensor.dtype)
    return loaded.flip(cut.flipped) if cut.flipped else loaded


def to_numpy(tensor: Tensor) -> Raw:
    """Read a tensor as a numpy array. bfloat16 and fp8, which numpy lacks, become float32 exactly."""
    if tensor.dtype in ("complex32", "float4_e2m1fn_x2"):
        raise UsageError(None, f"numpy has no {tensor.dtype}; use .load() for a torch tensor")
    return decoded(read_box(tensor, Box.whole(tensor.shape)), tensor.dtype)


# -- bytes -------------------------------------------------------------------------------------------------------------


def read_box(tensor: Tensor, box: Box) -> Raw:
    """Read a region of a tensor as raw elements, row-major.

    Raises:
        NotWholeError: some of its elements are in no file.
        ReadError: a file cannot be read.
    """
    if tensor.note:
        raise ReadError(None, tensor.note)
    chosen: dict[Box, Shard] = {}  # one shard for each distinct box that meets the region
    for shard in tensor.shards:
        if shard.is_here and shard.box not in chosen and (not box.sizes or shard.box.intersect(box)):
            chosen[shard.box] = dcp_items.with_source(shard)
    parts = [b.intersect(box) or b for b in chosen] if box.sizes else list(chosen)
    covered = cover(
        box.sizes, (Box(tuple(o - p for o, p in zip(b.offsets, box.offsets, strict=True)), b.sizes) for b in parts)
    )
    if not covered.exact:
        gaps = [Box(tuple(a + b for a, b in zip(g.offsets, box.offsets, strict=True)), g.sizes) for g in covered.gaps]
        where = ", ".join(map(str, gaps[:3])) or "overlapping shards"
        raise NotWholeError("tensor", f"no file here holds {covered.missing} of its {box.numel} elements: {where}")
    out = np.empty(box.sizes, raw_dtype(tensor.dtype))
    fill(out, box, list(chosen.values()))
    return out


def read_slice(tensor: Tensor, cut: Slicing) -> Raw:
    """Read a slice of a tensor as raw elements; every dimension ascends, also with a negative step.

    Raises:
        NotWholeError: some of its elements are in no file.
        ReadError: a file cannot be read.
    """
    if not cut.stepping or tensor.note:
        return read_box(tensor, cut.box)
    if tensor.encoded_as:
        return read_box(tensor, cut.box)[tuple(slice(None, None, step) for step in cut.steps)]
    try:
        return read_box(sliced(tensor, cut), Box.whole(cut.sizes))
    except NotWholeError as error:
        raise NotWholeError("tensor", f"{error.reason} of the slice") from None


def fill(
    out: Raw,
    box: Box,
    shards: Sequence[Shard],
    files: OpenFiles | None = None,
    seen: Seen | None = None,
) -> None:
    """Copy the parts of `shards` in `box` into `out`, which has the box's shape.

    Args:
        out: the destination.
        box: the region.
        shards: shards that may intersect it.
        files: keeps sources open.
        seen: called with all bytes that are read on the way.
    """
    if files is None:
        with OpenFiles() as opened:
            fill(out, box, shards, opened, seen)
        return
    for shard in shards:
        common = shard.box.intersect(box) if box.sizes and shard.box != box else shard.box
        if common is None or not shard.was_read:
            continue
        inner, place = common.seen_from(shard.box), (*_slices(common.seen_from(box)), ...)
        target = out[place]
        if shard.encoded is not None:
            _decode(target, shard.encoded.part(inner), files, seen)
        elif shard.source is not None:
            _fill(target, shard.source.part(inner), files, seen)


def _slices(box: Box) -> tuple[Any, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def _fill(out: Raw, source: Source, files: OpenFiles, seen: Seen | None) -> None:
    """Copy the elements of a source into an array of its shape."""
    with files.open(source.path) as file:
        if source.contiguous and out.flags.c_contiguous:
            straight = out.reshape(-1).view("u1").data
            file.fill(source.offset, straight)
            if seen is not None:
                seen(source, straight)
            return
        for part, at in bounded(source, MAX_SPAN):
            out[_slices(Box(at, part.shape))] = strided(file, part, seen)


def strided(file: File, source: Source, seen: Seen | None = None) -> Raw:
    """Read the raw elements of a source, together with the bytes between them; `seen` is as in `fill`."""
    width = ITEMSIZE[source.dtype]
    data = file.read(source.offset, extent(source))
    if seen is not None:
        seen(source, data)
    found: Raw = np.ndarray(source.shape, raw_dtype(source.dtype), data, strides=[s * width for s in source.strides])
    return found


def _decode(out: Raw, piece: Encoded, files: OpenFiles, seen: Seen | None) -> None:
    """Compute the values of an encoded shard into an array of its shape."""
    if isinstance(piece.coding, LowRank):
        from ckptools.tensor_io.low_rank import add_adapter  # imports torch

        add_adapter(out, piece, piece.coding, partial(fill, files=files, seen=seen))
        return

    def read(source: Source) -> Raw:
        raw = np.empty(source.shape, raw_dtype(source.dtype))
        _fill(raw, source, files, seen)
        return raw

    for box, numbers in values(piece, read):
        out[_slices(box)] = numbers


def bounded(source: Source, limit: int) -> Iterator[tuple[Source, tuple[int, ...]]]:
    """Cut a source into parts that each span at most `limit` bytes of its file; yield each with its place.

    No part has a gap longer than `MAX_GAP`: reading a column of a matrix does not read the matrix.
    """
    stack = [(source, (0,) * len(source.shape))]
    while stack:
        part, at = stack.pop()
        spans = [(n - 1) * s for n, s in zip(part.shape, part.strides, strict=True)]
        dim = spans.index(max(spans)) if spans else 0
        if not prod(part.shape) or not any(spans) or (extent(part) <= limit and _gap(part, dim) <= MAX_GAP):
            yield part, at
            continue
        half = part.shape[dim] // 2
        for low, size in ((half, part.shape[dim] - half), (0, half)):
            offsets = tuple(low if d == dim else 0 for d in range(len(part.shape)))
            sizes = tuple(size if d == dim else n for d, n in enumerate(part.shape))
            stack.append((part.part(Box(offsets, sizes)), tuple(a + o for a, o in zip(at, offsets, strict=True))))


def extent(source: Source) -> int:
    """Bytes from the first to the last element of a source."""
    last = sum((n - 1) * s for n, s in zip(source.shape, source.strides, strict=True))
    return (last + 1) * ITEMSIZE[source.dtype] if prod(source.shape) else 0


def _gap(source: Source, dim: int) -> int:
    """Bytes between the spans of two consecutive indices of a dimension."""
    one = source._replace(shape=tuple(1 if d == dim else n for d, n in enumerate(source.shape)))
    return source.strides[dim] * ITEMSIZE[source.dtype] - extent(one)


def _local(tensor: Tensor, rank: int) -> Raw:
    """One rank's local tensor: its boxes, moved together along every dimension."""
    if tensor.note and tensor.encoded_as:
        raise ReadError(None, tensor.note)
    pieces = [dcp_items.with_source(s) for s in tensor.on_rank(rank) if s.is_here]
    if not pieces and tensor.kind in ("plain", "storage") and len(tensor.found) == 1 and tensor.found[0].rank is None:
        pieces = list(tensor.found)
    if not pieces:
        raise UsageError(None, f"rank {rank} holds nothing of this tensor, or its file is not here")
    axes = []
    for d in range(len(pieces[0].box.sizes)):
        runs = sorted({(p.box.offsets[d], p.box.sizes[d]) for p in pieces})
        starts, total = {}, 0
        for start, length in runs:
            starts[start] = total
            total += length
        axes.append((starts, total))
    if prod(total for _, total in axes) != sum(p.box.numel for p in pieces):
        # Not a grid: a run of a flattened parameter, which was one row on the rank.
        return np.concatenate([read_shard(p).reshape(-1) for p in sorted(pieces, key=lambda p: p.box.offsets)])
    out = np.empty(tuple(total for _, total in axes), raw_dtype(tensor.dtype))
    for piece in pieces:
        place = zip(axes, piece.box.offsets, piece.box.sizes, strict=True)
        out[tuple(slice(starts[o], starts[o] + n) for (starts, _), o, n in place)] = read_shard(piece)
    return out


def read_shard(shard: Shard, files: OpenFiles | None = None) -> Raw:
    """Read one shard as raw elements of its box, row-major; `files` keeps sources open."""
    coding = shard.encoded.coding if shard.encoded is not None else None
    dtype = coding.dtype if coding else shard.source.dtype if shard.source else "uint8"
    out = np.empty(shard.box.sizes, raw_dtype(dtype))
    fill(out, shard.box, [shard], files)
    return out


def _as_torch(raw: Raw, dtype: str) -> Any:
    import torch

    if not raw.size:
        return torch.empty(raw.shape, dtype=getattr(torch, dtype))
    as_bytes = np.ascontiguousarray(raw).reshape(-1).view("u1")
    return torch.from_numpy(as_bytes).view(getattr(torch, dtype)).reshape(raw.shape)
