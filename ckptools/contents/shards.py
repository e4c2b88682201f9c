"""Where the pieces of a tensor lie: rank, region, file, record, byte offset, checksum; and what no file here holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.model.cover import TangledLayoutError, cover
from ckptools.model.regions import Box
from ckptools.model.shown import PartRow, ShardRow
from ckptools.model.tensor import Shard, Source, Tensor, in_rank_order
from ckptools.tensor_io.dcp_items import with_source


def shard_rows(tensor: Tensor) -> tuple[ShardRow, ...]:
    """A row for each piece of a tensor, in rank order; the heads of items of a DCP are read, no values."""
    return tuple(_row(shard, tensor.dtype) for shard in in_rank_order(tensor.shards))


def _row(shard: Shard, dtype: str) -> ShardRow:
    try:
        return stated_row(with_source(shard), dtype)
    except ReadError as error:
        file, nbytes = str(shard.item.path) if shard.item else "", shard.box.numel * ITEMSIZE[dtype]
        return ShardRow(shard.rank, *shard.box, "unreadable", file, "", None, nbytes, "", error.reason)


def stated_row(shard: Shard, dtype: str = "") -> ShardRow:
    """The row of a piece by what its tensor tells; nothing is read for it.

    Args:
        shard: the piece.
        dtype: of the tensor; where it is not given, that of the file, and 0 bytes where no file tells it.
    """
    file, source, parts = shard.file, next(iter(shard.sources), None), tuple(_parts(shard))
    dtype = dtype or (file.dtype if file else "")
    nbytes = sum(part.bytes for part in parts) if parts else shard.box.numel * ITEMSIZE[dtype] if dtype else 0
    if file is None:
        return ShardRow(shard.rank, *shard.box, "missing", "", "", None, nbytes, "", "no file here holds it")
    crc, record = (_crc(source), source.record) if source else ("", "")
    stored_as = shard.encoded.name if shard.encoded is not None else ""
    row = ShardRow(shard.rank, *shard.box, "here", str(file.path), record, file.offset, nbytes, crc, "")
    return row._replace(stored_as=stored_as, parts=parts)


def _parts(shard: Shard) -> Iterator[PartRow]:
    for name, source in shard.encoded.parts if shard.encoded is not None else ():
        per = shard.encoded.per(name) if shard.encoded is not None else ""
        nbytes = prod(source.shape) * ITEMSIZE[source.dtype]
        yield PartRow(name, source.dtype, source.shape, per, source.record, source.offset, nbytes, _crc(source))


def _crc(source: Source) -> str:
    return f"{source.crc:08x}" if source.crc else ""


def holes(tensor: Tensor, rows: Iterable[ShardRow]) -> tuple[tuple[str, ...], int]:
    """The regions of a tensor that no shard which is here holds, and how many elements they have.

    Nothing is said of a tensor whose pieces are not placed in it (its note says why), or was saved without values.
    """
    if tensor.note or tensor.kind in ("meta", "sparse", "quantized", "unreadable") or not tensor.numel:
        return (), 0
    here = dict.fromkeys(Box(row.offsets, row.sizes) for row in rows if row.status == "here")
    try:
        found = cover(tensor.shape, here)
    except TangledLayoutError:
        return (), 0
    return tuple(map(str, found.gaps)), found.missing
