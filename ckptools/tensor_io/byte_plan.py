"""Where the bytes of one tensor come from: a plan of files and offsets. Pure arithmetic, no I/O.

A tensor whose shards are runs of consecutive bytes in both places becomes `Copy`s; one that is strided, cut into
short rows or changes its dtype is assembled in bands of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ckptools.dtypes import ITEMSIZE
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.tensor import Shard, Source, Tensor
from ckptools.tensor_io.bands import bands_of
from ckptools.tensor_io.records import Record

MIN_RUN = 64 << 10
"""Bytes: shorter runs cost more as system calls than as copies in memory."""

FEW_RUNS = 32
"""So many short runs are copied one by one all the same."""

BAND = 16 << 20
"""Bytes of a tensor that are assembled in memory at once."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Consecutive bytes that move unchanged.

    Attributes:
        source: file to read.
        source_offset: byte offset there.
        offset: byte offset in the tensor's own bytes in the output.
        nbytes: how many.
        record: what they are part of in the source; None when nothing tells.
    """

    source: Path
    source_offset: int
    offset: int
    nbytes: int
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Band:
    """A region of a tensor, consecutive in the output, that is put together in memory.

    Attributes:
        box: the region.
        offset: byte offset in the tensor's own bytes in the output.
        nbytes: bytes in the output.
    """

    box: Box
    offset: int
    nbytes: int


def parts_of(tensor: Tensor, dtype: str) -> Iterable[Copy | Band]:
    """Plan the bytes of one tensor whose shards cover it exactly once."""
    if not tensor.numel:
        return ()
    if dtype == tensor.dtype and not tensor.fill:
        copies = _copies(tensor)
        if copies is not None:
            return sorted(copies, key=lambda c: c.offset)
    return _bands(Box.whole(tensor.shape), tensor, ITEMSIZE[dtype])


def _copies(tensor: Tensor) -> list[Copy] | None:
    """Runs of consecutive bytes; None when they are so short that assembling is better."""
    copies: list[Copy] = []
    if any(shard.encoded is not None for shard in tensor.shards):
        return None
    for shard in tensor.shards:
        if shard.source is None or not shard.box.numel:
            continue
        run, count = _run_length(shard, tensor)
        if run * ITEMSIZE[tensor.dtype] < MIN_RUN and count > FEW_RUNS:
            return None
        copies += _copies_of(shard, shard.source, tensor, run)
    return copies


def _run_length(shard: Shard, tensor: Tensor) -> tuple[int, int]:
    """Elements that are consecutive in the shard's file and in the tensor, and how many such runs it has."""
    source, run = shard.source, 1
    assert source is not None
    packed = contiguous_strides(tensor.shape)
    for dim in reversed(range(len(tensor.shape))):
        n = shard.box.sizes[dim]
        if n > 1 and (source.strides[dim] != run or packed[dim] != run):
            break
        run *= n
    return run, shard.box.numel // run


def _copies_of(shard: Shard, source: Source, tensor: Tensor, run: int) -> Iterator[Copy]:
    width, packed = ITEMSIZE[tensor.dtype], contiguous_strides(tensor.shape)
    start = sum(o * s for o, s in zip(shard.box.offsets, packed, strict=True))
    record = Record.of(source)
    for read, write in _starts(shard.box.sizes, source.strides, packed, run):
        at, nbytes = source.offset + read * width, run * width
        yield Copy(source.path, at, (start + write) * width, nbytes, record)


def _starts(sizes: Sequence[int], strides: Sequence[int], packed: Sequence[int], run: int) -> Iterator[tuple[int, int]]:
    """First element of every run, in the source and in the tensor, for the outer dimensions that a run leaves."""
    outer: list[int] = []
    inner = 1
    for dim in reversed(range(len(sizes))):
        if inner < run:
            inner *= sizes[dim]
        elif sizes[dim] > 1:
            outer.insert(0, dim)
    counts = [sizes[d] for d in outer]
    for flat in range(prod(counts)):
        read = write = 0
        for dim, count in zip(reversed(outer), reversed(counts), strict=True):
            flat, index = divmod(flat, count)
            read += index * strides[dim]
            write += index * packed[dim]
        yield read, write


def _bands(box: Box, tensor: Tensor, width: int) -> Iterator[Band]:
    """Cut a region into pieces of at most `BAND` bytes that are consecutive in the output, in order."""
    packed = contiguous_strides(tensor.shape)
    for part in bands_of(box, BAND // width):
        start = sum(o * s for o, s in zip(part.offsets, packed, strict=True))
        yield Band(part, start * width, part.numel * width)
