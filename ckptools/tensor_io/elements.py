"""Read the elements of strided arrays in small pieces: in any order for sums, or aligned with other tensors' elements.

An array without gaps in its file is read as one run of bytes, however its dimensions are permuted; of an expanded
array (a stride of 0) each element is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.opening import File, OpenFiles
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, Source
from ckptools.tensor_io.numbers import Raw, raw_dtype
from ckptools.tensor_io.read import bounded, fill, strided
from ckptools.tensor_io.slicing import bands_of

READ = 1024 << 10
"""Bytes read at a time."""

BAND = 128 << 10
"""Elements yielded at a time: few enough that they and their float64 form fit into a core's cache, and enough that
Python's overhead per numpy call is small.
"""


MOST_TIMES = 1 << 60
"""More repeats of an expanded element than this are refused; no real tensor has so many."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Distinct elements of an array in a file.

    Attributes:
        source: their place; no dimension of it is expanded.
        times: how often each element occurs in the tensor.
    """

    source: Source
    times: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the piece's elements."""
        return prod(self.source.shape) * ITEMSIZE[self.source.dtype]


def pieces_of(source: Source, limit: int) -> Iterator[Piece]:
    """Cut an array into pieces of about `limit` bytes; none for an empty array.

    Raises:
        ReadError: its strides give it more elements than its zip entry has, or too many repeats.
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
    """The array with every element once, its widest strides first, and the number of repeats of each element."""
    dims = [(stride, n) for n, stride in zip(source.shape, source.strides, strict=True) if n != 1]
    times = prod(n for stride, n in dims if stride == 0)
    kept = sorted(((stride, n) for stride, n in dims if stride), reverse=True)
    if not times:
        kept = [(1, 0)]
    return source._replace(shape=tuple(n for _, n in kept), strides=tuple(s for s, _ in kept)), max(times, 1)


def raw_bands(piece: Piece, file: File) -> Iterator[Raw]:
    """Read the elements of a piece as flat raw arrays; each array is overwritten by the next.

    Raises:
        ReadError: the file ends too early, or the disk fails.
    """
    source = piece.source
    if not source.contiguous:
        flat = strided(file, source).reshape(-1)
        yield from (flat[low : low + BAND] for low in range(0, len(flat), BAND))
        return
    room = buffer("read", min(READ, piece.nbytes), "u1")
    for start in range(0, piece.nbytes, READ):
        part = room[: min(READ, piece.nbytes - start)]
        file.fill(source.offset + start, part.data)
        raw = part.view(raw_dtype(source.dtype))
        yield from (raw[low : low + BAND] for low in range(0, len(raw), BAND))


# -- several tensors side by side --------------------------------------------------------------------------------------


def side_by_side(
    box: Box, tensors: Sequence[tuple[str, Sequence[Shard]]], files: OpenFiles
) -> Iterator[tuple[int, list[Raw]]]:
    """Yield the elements of several tensors in a region, a band at a time: `(first index, a flat array per tensor)`.

    The elements are raw and in row-major order. The arrays are the thread's own buffers: the next band overwrites them.

    Args:
        box: the region.
        tensors: the dtype of each tensor, and shards with sources that together cover the region.
        files: keeps sources open.

    Raises:
        ReadError: a file cannot be read.
    """
    runs = [run for run in (_run(box, shards) for _, shards in tensors) if run is not None]
    if len(runs) == len(tensors):
        yield from _of_runs(box.numel, runs, files)
        return
    start = 0
    for part in bands_of(box, BAND):
        arrays = _buffers(part.numel, [dtype for dtype, _ in tensors])
        for array, (_, shards) in zip(arrays, tensors, strict=True):
            fill(array.reshape(part.sizes), part, shards, files)
        yield start, arrays
        start += part.numel


def _run(box: Box, shards: Sequence[Shard]) -> Source | None:
    """The region as consecutive bytes of one file; None if it is not contiguous."""
    if len(shards) != 1 or shards[0].source is None:
        return None
    part = shards[0].source.part(box.seen_from(shards[0].box))
    return part if part.contiguous else None


def _of_runs(numel: int, runs: Sequence[Source], files: OpenFiles) -> Iterator[tuple[int, list[Raw]]]:
    with ExitStack() as stack:
        opened = [stack.enter_context(files.open(run.path)) for run in runs]
        for start in range(0, numel, BAND):
            arrays = _buffers(min(BAND, numel - start), [run.dtype for run in runs])
            for file, run, array in zip(opened, runs, arrays, strict=True):
                file.fill(run.offset + start * ITEMSIZE[run.dtype], array.view("u1").data)
            yield start, arrays


def _buffers(count: int, dtypes: Sequence[str]) -> list[Raw]:
    return [buffer(f"side {n}", count, raw_dtype(dtype)) for n, dtype in enumerate(dtypes)]


# -- buffers, one set per thread: allocating memory anew takes as long as reading a region -----------------------------


class _OfThread(local):
    """The buffers that one thread reuses, by their use."""

    def __init__(self) -> None:
        self.rooms: dict[str, npt.NDArray[np.uint8]] = {}


_OF_THREAD = _OfThread()


def buffer(use: str, count: int, dtype: str) -> npt.NDArray[Any]:
    """An uninitialised array from the calling thread's buffers, valid until the thread's next call with the same use.

    Args:
        use: name of the buffer; a thread has one per use, as large as its largest request.
        count: elements.
        dtype: numpy's name.
    """
    nbytes = count * np.dtype(dtype).itemsize
    room = _OF_THREAD.rooms.get(use)
    if room is None or len(room) < nbytes:
        room = _OF_THREAD.rooms[use] = np.empty(nbytes, "u1")
    return room[:nbytes].view(dtype)
