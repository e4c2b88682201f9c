"""The elements of one region in several tensors, read side by side, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from ckptools.dtypes import ITEMSIZE
from ckptools.files.opening import OpenFiles
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Source
from ckptools.tensor_io.bands import bands_of
from ckptools.tensor_io.buffers import buffer
from ckptools.tensor_io.elements import BAND
from ckptools.tensor_io.numbers import Raw, raw_dtype
from ckptools.tensor_io.read import fill


def side_by_side(
    box: Box, tensors: Sequence[tuple[str, Sequence[Shard]]], files: OpenFiles
) -> Iterator[tuple[int, list[Raw]]]:
    """Yield elements of a region in row-major order: the place of the first, and each tensor's as a flat raw array.

    The arrays are the thread's own buffers: what they hold is gone when the next ones are read.

    Args:
        box: the region.
        tensors: of each its dtype, and shards with sources that together hold the region.
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
    """Where a region lies as consecutive bytes of one file, if it does."""
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
