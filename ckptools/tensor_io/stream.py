"""Stream the bytes of tensors in row-major order: plan the parts to read, read them, compute digests.

A tensor whose shards are runs of consecutive bytes, in the file and in the tensor, becomes `Copy`s; a tensor that is
strided, cut into short rows or changes its dtype is assembled in bands of bounded size.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import prod
from operator import mul
from pathlib import Path

from ckptools.dtypes import ITEMSIZE, NAN_BITS
from ckptools.errors import ReadError
from ckptools.files.opening import File, OpenFiles
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import LowRank, Seen, Shard
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.checksums import Record, read_pieces
from ckptools.tensor_io.slicing import bands_of, count_bands

MIN_RUN = 64 << 10
"""Runs of fewer bytes cost more as system calls than as copies in memory."""

FEW_RUNS = 32
"""Up to this many short runs are copied one by one all the same."""

BAND = 16 << 20
"""Bytes of a tensor that are assembled in memory at once."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Consecutive bytes that are copied unchanged.

    Attributes:
        source: file to read.
        source_offset: byte offset there.
        offset: byte offset in the tensor's own bytes in the output.
        nbytes: number of bytes.
        record: the record in the source that contains them; None when unknown.
    """

    source: Path
    source_offset: int
    offset: int
    nbytes: int
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Band:
    """A region of a tensor, consecutive in the output, that is assembled in memory.

    Attributes:
        offset: byte offset in the tensor's own bytes in the output.
        nbytes: bytes in the output.
    """

    box: Box
    offset: int
    nbytes: int


def parts_of(tensor: Tensor, dtype: str) -> Iterable[Copy | Band]:
    """Plan the bytes of a tensor whose shards cover it exactly once."""
    if not tensor.numel:
        return ()
    runs = _runs(tensor, dtype)
    if runs is None:
        return _bands(Box.whole(tensor.shape), tensor, ITEMSIZE[dtype])
    return sorted((copy for shard, run, _ in runs for copy in _copies_of(shard, tensor, run)), key=lambda c: c.offset)


def has_adapter(tensor: Tensor) -> bool:
    """Whether a tensor is a weight to which an adapter is added."""
    return any(isinstance(encoded.coding, LowRank) for encoded in tensor.encoded_as)


def count_parts(tensor: Tensor, dtype: str) -> int:
    """The number of parts that `parts_of` plans, without planning them."""
    if not tensor.numel:
        return 0
    kinds = tensor.extents.kinds()
    if kinds is not None and dtype == tensor.dtype and not tensor.fill:
        one_each = tuple([Shard(Box(sizes, sizes), None, layout.source(Path(), 0, 0)) for sizes, layout in kinds])
        runs = _runs(replace(tensor, shards=one_each), dtype)
        counts: Iterable[int] = [kinds[kind] for kind in kinds if prod(kind[0])]
    else:
        runs, counts = _runs(tensor, dtype), repeat(1)
    if runs is None:
        return count_bands(tensor.shape, BAND // ITEMSIZE[dtype])
    return sum(count * times for (_, _, count), times in zip(runs, counts, strict=False))


def _runs(tensor: Tensor, dtype: str) -> list[tuple[Shard, int, int]] | None:
    """Each shard with its run length in elements, contiguous in file and tensor, and its number of runs.

    None if the tensor must be assembled in memory: its dtype changes, holes are filled, or runs are short.
    """
    if dtype != tensor.dtype or tensor.fill or tensor.encoded_as:
        return None
    found, packed = list[tuple[Shard, int, int]](), contiguous_strides(tensor.shape)
    for shard in tensor.shards:
        if shard.source is None or not shard.box.numel:
            continue
        run = _run_length(shard.box.sizes, shard.source.strides, packed)
        count = shard.box.numel // run
        if run * ITEMSIZE[tensor.dtype] < MIN_RUN and count > FEW_RUNS:
            return None
        found.append((shard, run, count))
    return found


def _run_length(sizes: Sequence[int], strides: Sequence[int], packed: Sequence[int]) -> int:
    """Length in elements of the runs of a shard that are contiguous both in its file and in the tensor."""
    run = 1
    for n, stride, of_tensor in zip(reversed(sizes), reversed(strides), reversed(packed), strict=True):
        if n > 1 and (stride != run or of_tensor != run):
            break
        run *= n
    return run


def _copies_of(shard: Shard, tensor: Tensor, run: int) -> Iterator[Copy]:
    source, width, packed = shard.source, ITEMSIZE[tensor.dtype], contiguous_strides(tensor.shape)
    assert source is not None
    start = sum(map(mul, shard.box.offsets, packed))
    record = Record.of(source)
    for read, write in _starts(shard.box.sizes, source.strides, packed, run):
        at, nbytes = source.offset + read * width, run * width
        yield Copy(source.path, at, (start + write) * width, nbytes, record)


def _starts(sizes: Sequence[int], strides: Sequence[int], packed: Sequence[int], run: int) -> Iterator[tuple[int, int]]:
    """Yield the index of each run's first element, in the source and in the tensor."""
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
    """Cut a region into bands of at most `BAND` bytes that are consecutive in the output, in order."""
    packed = contiguous_strides(tensor.shape)
    for part in bands_of(box, BAND // width):
        start = sum(o * s for o, s in zip(part.offsets, packed, strict=True))
        yield Band(part, start * width, part.numel * width)


# -- reading -----------------------------------------------------------------------------------------------------------


PIECE = 4 << 20
"""Bytes of a whole tensor that are read at a time."""


def tensor_bytes(tensor: Tensor, dtype: str, files: OpenFiles) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a tensor whose shards cover it exactly once, converted to `dtype`.

    Args:
        tensor: the tensor.
        dtype: dtype of the yielded bytes.
        files: keeps sources open.

    Raises:
        ReadError: a file cannot be read.
    """
    for part in parts_of(tensor, dtype):
        if isinstance(part, Copy):
            with files.open(part.source) as file:
                for at in range(0, part.nbytes, PIECE):
                    yield file.read(part.source_offset + at, min(PIECE, part.nbytes - at))
        else:
            yield assemble(tensor, part.box, dtype, files)


def shard_bytes(shard: Shard, files: OpenFiles) -> bytes:
    """The elements of a shard with a source, in row-major order.

    Contiguous elements are read without numpy: importing it takes longer than reading a few of them.

    Raises:
        ReadError: its file cannot be read.
    """
    source = shard.source
    if source is not None and source.contiguous:
        with files.open(source.path) as file:
            return file.read(source.offset, shard.box.numel * ITEMSIZE[source.dtype])
    from ckptools.tensor_io.read import read_shard

    return read_shard(shard, files).tobytes()


def assemble(tensor: Tensor, box: Box, dtype: str, files: OpenFiles, seen: Seen | None = None) -> memoryview:
    """Return the bytes of a region, row-major, converted to `dtype`.

    Conversion is torch's own, so that rounding is as in a training script (to nearest even). `seen` is called with all
    bytes that are read on the way.
    """
    import numpy as np

    from ckptools.tensor_io.numbers import raw_dtype
    from ckptools.tensor_io.read import fill

    raw = np.zeros(box.sizes, raw_dtype(tensor.dtype))
    if tensor.fill == "nan":
        raw.fill(NAN_BITS[tensor.dtype])
    fill(raw, box, tensor.shards, files, seen)
    as_bytes = raw.reshape(-1).view("u1") if raw.size else np.empty(0, "u1")
    if dtype == tensor.dtype:
        return as_bytes.data
    import torch

    typed = torch.from_numpy(as_bytes).view(getattr(torch, tensor.dtype))
    converted = typed.to(getattr(torch, dtype)).view(torch.uint8).numpy()
    data: memoryview = converted.data
    return data


# -- digests, as manifests list them -----------------------------------------------------------------------------------

# A tensor's digest covers its full values in row-major, little-endian order, so it is the same for a sharded
# checkpoint and for every file made from it with the same dtypes. A file's digest covers its bytes.

MANIFEST_SCHEMA = "ckptools/manifest/1"
"""Schema of a manifest."""


def tensor_digest(tensor: Tensor, files: OpenFiles) -> str:
    """SHA-256 of a tensor's values, wherever its shards lie.

    Raises:
        ReadError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for piece in tensor_bytes(tensor, tensor.dtype, files):
        digest.update(piece)
    return digest.hexdigest()


def file_digest(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file.

    Raises:
        ReadError: it cannot be read.
    """
    with File(path) as file:
        digest = hashlib.sha256()
        for piece in read_pieces(file, 0, file.size, memoryview(bytearray(PIECE))):
            digest.update(piece)
        return file.size, digest.hexdigest()


def digest_of(spans: Iterable[tuple[int, int, int]]) -> str:
    """SHA-256 of some spans of open files, concatenated.

    Args:
        spans: the file descriptor, the first byte and the number of bytes of each.

    Raises:
        ReadError: a file ends before its span does.
    """
    digest = hashlib.sha256()
    for descriptor, start, nbytes in spans:
        done = 0
        while done < nbytes:
            piece = os.pread(descriptor, min(PIECE, nbytes - done), start + done)
            if not piece:
                raise ReadError(None, f"the output ends at byte {start + done}; expected {nbytes - done} more")
            digest.update(piece)
            done += len(piece)
    return digest.hexdigest()
