"""The bytes of tensors and shards in row-major order; those of a whole tensor a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator

from ckptools.dtypes import ITEMSIZE
from ckptools.files.opening import OpenFiles
from ckptools.model.tensor import Shard, Tensor
from ckptools.tensor_io.byte_plan import Copy, parts_of

PIECE = 4 << 20
"""Bytes read at a time."""


def tensor_bytes(tensor: Tensor, dtype: str, files: OpenFiles) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a tensor whose shards cover it exactly once, converted to `dtype`.

    Args:
        tensor: the tensor.
        dtype: of the bytes that are wanted.
        files: keeps sources open.

    Raises:
        ReadError: a file cannot be read.
    """
    for part in parts_of(tensor, dtype):
        if isinstance(part, Copy):
            yield from _copied(part, files)
        else:
            from ckptools.tensor_io.assemble import assemble

            yield assemble(tensor, part.box, dtype, files)


def _copied(copy: Copy, files: OpenFiles) -> Iterator[bytes]:
    with files.open(copy.source) as file:
        for at in range(0, copy.nbytes, PIECE):
            yield file.read(copy.source_offset + at, min(PIECE, copy.nbytes - at))


def shard_bytes(shard: Shard, files: OpenFiles) -> bytes:
    """The elements of one shard, which has a source, in row-major order.

    Contiguous ones are read without numpy: importing it takes longer than reading a few of them.

    Raises:
        ReadError: its file cannot be read.
    """
    source = shard.source
    if source is not None and source.contiguous:
        with files.open(source.path) as file:
            return file.read(source.offset, shard.box.numel * ITEMSIZE[source.dtype])
    from ckptools.tensor_io.read import read_shard

    return read_shard(shard, files).tobytes()
