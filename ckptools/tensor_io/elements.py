"""The elements of strided arrays in any order, a few at a time: for sums over them, which need no order.

What lies in a file without a gap is read as one run of bytes, however its dimensions are permuted; of what is
expanded (a stride of 0) each element is read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.opening import File
from ckptools.model.tensor import Source
from ckptools.tensor_io.buffers import buffer
from ckptools.tensor_io.numbers import Raw, raw_dtype
from ckptools.tensor_io.read import bounded, extent

READ = 1024 << 10
"""Bytes that are read at a time."""

BAND = 128 << 10
"""Elements that are handed out at a time: with their float64 they stay about in a core's own cache, and each call of
numpy has enough to do that Python's share is small."""


MOST_TIMES = 1 << 60
"""How often an expanded element may count; more are no tensor's."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements that lie in one place of a file.

    Attributes:
        source: where; no dimension of it is expanded.
        times: how often each of them counts.
    """

    source: Source
    times: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.source.shape) * ITEMSIZE[self.source.dtype]


def pieces_of(source: Source, limit: int) -> Iterator[Piece]:
    """Cut an array into pieces of about `limit` bytes; none where it is empty.

    Raises:
        ReadError: its strides let it have more elements than its record has, or than anything has.
    """
    each, times = _without_repeats(source)
    if not prod(each.shape):
        return
    if times > MOST_TIMES:
        raise ReadError(each.path, f"its strides of 0 repeat every element more than {MOST_TIMES} times")
    if prod(each.shape) * ITEMSIZE[each.dtype] > max(each.record_span[1], 1):
        raise ReadError(each.path, f"its strides show the {each.record_span[1]} bytes of a record more than once")
    if not each.contiguous:
        yield from (Piece(part, times) for part, _ in bounded(each, READ))
        return
    count, width = prod(each.shape), ITEMSIZE[each.dtype]
    step = max(limit // width, 1)
    for first in range(0, count, step):
        run = each._replace(offset=each.offset + first * width, shape=(min(step, count - first),), strides=(1,))
        yield Piece(run, times)


def _without_repeats(source: Source) -> tuple[Source, int]:
    """The array with every element once, its widest strides first, and how often each element is in the source."""
    dims = [(stride, n) for n, stride in zip(source.shape, source.strides, strict=True) if n != 1]
    times = prod(n for stride, n in dims if stride == 0)
    kept = sorted(((stride, n) for stride, n in dims if stride), reverse=True)
    if not times:
        kept = [(1, 0)]
    return source._replace(shape=tuple(n for _, n in kept), strides=tuple(s for s, _ in kept)), max(times, 1)


def bands_of(piece: Piece, file: File) -> Iterator[Raw]:
    """Read the elements of a piece as flat raw arrays; each is gone when the next one is read.

    Raises:
        ReadError: the file ends before that, or the disk fails.
    """
    source = piece.source
    if not source.contiguous:
        width = ITEMSIZE[source.dtype]
        data = file.read(source.offset, extent(source))
        strides = tuple(s * width for s in source.strides)
        view: Raw = np.ndarray(source.shape, raw_dtype(source.dtype), data, strides=strides)
        flat = view.reshape(-1)
        yield from (flat[low : low + BAND] for low in range(0, len(flat), BAND))
        return
    room = buffer("read", min(READ, piece.nbytes), "u1")
    for start in range(0, piece.nbytes, READ):
        part = room[: min(READ, piece.nbytes - start)]
        file.fill(source.offset + start, part.data)
        raw = part.view(raw_dtype(source.dtype))
        yield from (raw[low : low + BAND] for low in range(0, len(raw), BAND))
