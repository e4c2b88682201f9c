"""A tensor as HTML: what is known of it, which rank holds which part of it, and where each shard lies. No file is
read for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptools.contents.sharding import placement
from ckptools.contents.shards import stated_row
from ckptools.model.regions import Box
from ckptools.model.shown import ShardRow
from ckptools.model.tensor import Shard, Tensor
from ckptools.text import plural, size, spans
from ckptools.views.html.page import MAX_ROWS, Page
from ckptools.views.pictures import tensor_layout
from ckptools.views.shard_map import shard_map
from ckptools.views.tables import Column

SHARD_COLUMNS = (
    Column("rank", right=True),
    Column("region"),
    Column("size", right=True),
    Column("file", name=True),
    Column("record", name=True),
    Column("offset", right=True),
    Column("crc"),
)
FEW = 16
"""Shards that are shown unfolded."""


def tensor_html(tensor: Tensor) -> str:
    """A tensor with a picture of its layout, and a row for each of its shards.

    Where only some ranks' files were read, a strip says whose each part is: a picture would show holes, and the bytes
    may well be in the files that were not read.
    """
    page = Page("to_dicts() of .shards")
    page.line(repr(tensor))
    if tensor.note:
        page.line(tensor.note, "bad")
    page.line(placement(tensor))
    rows = [stated_row(shard, tensor.dtype) for shard in tensor.shards]
    if tensor.unread and not all(row.file for row in rows):
        page.lines(shard_map(tensor.shape, [row._replace(status="here") for row in rows]))
    elif tensor.shards:
        page.picture(tensor_layout(tensor))
    _remark(page, tensor)
    shard_table(page, tensor.shards, tensor)
    return page.html()


def _remark(page: Page, tensor: Tensor) -> None:
    """What the map does not say: whose bytes are not known here."""
    ranks = {shard.rank for shard in tensor.shards if shard.rank is not None and not (shard.source or shard.item)}
    if ranks and tensor.unread:
        page.line(f"ranks {spans(ranks)}: their files were not read yet; the place of each is as other files tell it")
    elif ranks:
        page.line(f"MISSING: no file here holds the shards of rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}")


def shard_table(page: Page, shards: Sequence[Shard], tensor: Tensor | None = None) -> None:
    """A row for each shard, of which the first are made."""
    dtype = tensor.dtype if tensor is not None else ""
    rows = [_cells(stated_row(shard, dtype), tensor) for shard in shards[:MAX_ROWS]]
    page.table(plural(len(shards), "shard"), SHARD_COLUMNS, rows, len(shards), opened=len(shards) <= FEW)


def _cells(row: ShardRow, tensor: Tensor | None) -> list[str]:
    unread = "not read yet" if tensor is None or tensor.unread else "MISSING"
    place = "" if row.offset is None else str(row.offset)
    file = Path(row.file).name if row.file else unread
    rank = "-" if row.rank is None else str(row.rank)
    nbytes = size(row.bytes) if row.bytes or tensor is not None else "-"
    return [rank, str(Box(row.offsets, row.sizes)), nbytes, file, row.record, place, row.crc]
