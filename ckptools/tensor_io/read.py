"""Tensor values: only the bytes that are asked for, from the files where the shards lie.

numpy holds the bytes as unsigned integers of the element's width, so that every dtype is moved exactly, also those
that numpy does not have. torch is imported only by `load` and `load_slice`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import NotWholeError, ReadError, UsageError
from ckptools.files.opening import File, OpenFiles
from ckptools.model.cover import cover
from ckptools.model.regions import Box
from ckptools.model.shard import Shard
from ckptools.model.source import Encoded, Seen, Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io import dcp_items, dequantize
from ckptools.tensor_io.numbers import Raw, decoded, raw_dtype
from ckptools.tensor_io.slicing import Slicing, sliced

MAX_SPAN = 32 << 20
"""Bytes of a file that are in memory at once when a strided view is read."""

MAX_GAP = 8 << 10
"""Bytes between two elements, or runs of them, that are read with them: two pages cost less than another call."""

# -- what people call ------------------------------------------------------------------------------------------


def load(tensor: Tensor, rank: int | None = None) -> Any:
    """Read a tensor as a `torch.Tensor`; with `rank`, that rank's local tensor.

    Raises:
        NotWholeError: no file holds some of it.
        UsageError: the rank holds nothing of it.
    """
    if rank is not None:
        return _as_torch(_local(tensor, rank), tensor.dtype)
    return _as_torch(read_box(tensor, Box.whole(tensor.shape)), tensor.dtype)


def load_slice(tensor: Tensor, cut: Slicing) -> Any:
    """Read what an index names of a tensor as a `torch.Tensor`.

    Raises:
        NotWholeError: no file holds some of it.
    """
    loaded = _as_torch(read_slice(tensor, cut).reshape(cut.kept), tensor.dtype)
    return loaded.flip(cut.flipped) if cut.flipped else loaded


def to_numpy(tensor: Tensor) -> Raw:
    """Read a tensor as a numpy array. bfloat16 and fp8, which numpy lacks, become float32, which holds them exactly."""
    if tensor.dtype in ("complex32", "float4_e2m1fn_x2"):
        raise UsageError(None, f"numpy has no {tensor.dtype}; use .load() for a torch tensor")
    return decoded(read_box(tensor, Box.whole(tensor.shape)), tensor.dtype)


# -- bytes -----------------------------------------------------------------------------------------------------


def read_box(tensor: Tensor, box: Box) -> Raw:
    """Read a region of a tensor as raw elements, row-major.

    Raises:
        NotWholeError: some of it is in no file that is here.
        ReadError: a file cannot be read.
    """
    shards = _needed(tensor, box)
    out = np.empty(box.sizes, raw_dtype(tensor.dtype))
    fill(out, box, shards)
    return out


def read_slice(tensor: Tensor, cut: Slicing) -> Raw:
    """Read what an index names of a tensor as raw elements, each dimension upwards.

    Raises:
        NotWholeError: some of it is in no file that is here.
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
    """Copy what `shards` hold of `box` into `out`, which has the box's shape.

    Args:
        out: where to.
        box: the region.
        shards: what may hold some of it.
        files: keeps sources open.
        seen: called with all that is read on the way.
    """
    if files is None:
        with OpenFiles() as opened:
            fill(out, box, shards, opened, seen)
        return
    for shard in shards:
        common = shard.box.intersect(box) if box.sizes else shard.box
        if common is None or not shard.was_read:
            continue
        inner, target = common.seen_from(shard.box), _view(out, common.seen_from(box))
        if shard.encoded is not None:
            _decode(target, shard.encoded.part(inner), files, seen)
        elif shard.source is not None:
            _fill(target, shard.source.part(inner), files, seen)


def _view(array: Raw, box: Box) -> Raw:
    """A region of an array, which shares its elements."""
    place = (*_slices(box), ...)
    view: Raw = array[place]
    return view


def _slices(box: Box) -> tuple[Any, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def _fill(out: Raw, source: Source, files: OpenFiles, seen: Seen | None) -> None:
    """Copy the elements of a source into an array of its shape."""
    with files.open(source.path) as file:
        for part, at in bounded(source, MAX_SPAN):
            place = _slices(Box(at, part.shape))
            if seen is None and part.shape and part.contiguous and out[place].flags.c_contiguous:
                file.fill(part.offset, out[place].reshape(-1).view("u1").data)
            else:
                out[place] = _strided(file, part, seen)


def _decode(out: Raw, piece: Encoded, files: OpenFiles, seen: Seen | None) -> None:
    """Put the values of an encoded piece into an array of its shape."""

    def read(source: Source) -> Raw:
        raw = np.empty(source.shape, raw_dtype(source.dtype))
        _fill(raw, source, files, seen)
        return raw

    for box, values in dequantize.values(piece, read):
        out[_slices(box)] = values


def bounded(source: Source, limit: int) -> Iterator[tuple[Source, tuple[int, ...]]]:
    """Cut a source so that every part spans at most `limit` bytes of its file, without long gaps; each with its place.

    No gap of a part is longer than `MAX_GAP`: who wants a column of a matrix does not read the matrix.
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
    """Bytes between the end of what one index of a dimension spans and the begin of what the next does."""
    one = source._replace(shape=tuple(1 if d == dim else n for d, n in enumerate(source.shape)))
    return source.strides[dim] * ITEMSIZE[source.dtype] - extent(one)


def _strided(file: File, source: Source, seen: Seen | None) -> Raw:
    width = ITEMSIZE[source.dtype]
    data = file.read(source.offset, extent(source))
    if seen is not None:
        seen(source, data)
    strides = tuple(s * width for s in source.strides)
    view: Raw = np.ndarray(source.shape, raw_dtype(source.dtype), data, strides=strides)
    return view


def _needed(tensor: Tensor, box: Box) -> list[Shard]:
    """One shard per place that meets `box`, all with a source."""
    if tensor.note:
        raise ReadError(None, tensor.note)
    chosen: dict[Box, Shard] = {}
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
    return list(chosen.values())


def _local(tensor: Tensor, rank: int) -> Raw:
    """One rank's local tensor: its boxes put together in order."""
    if tensor.note and tensor.encoded_as:
        raise ReadError(None, tensor.note)
    pieces = [dcp_items.with_source(s) for s in tensor.on_rank(rank) if s.is_here]
    if not pieces and tensor.kind in ("plain", "storage") and len(tensor.found) == 1 and tensor.found[0].rank is None:
        pieces = list(tensor.found)
    if not pieces:
        raise UsageError(None, f"rank {rank} holds nothing of this tensor, or its file is not here")
    return _packed(pieces, tensor.dtype)


def _packed(pieces: Sequence[Shard], dtype: str) -> Raw:
    """Boxes of one rank, moved together: each dimension keeps only the indices that some box has."""
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
    out = np.empty(tuple(total for _, total in axes), raw_dtype(dtype))
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
