"""The records of `tree` and `show`, and a single tensor with its shards, as HTML; no file is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from ckptools.contents import show_text
from ckptools.contents.picture import tensor_layout
from ckptools.contents.record import KeyRow, Keys, ShardRow, Shown, ShownKey
from ckptools.contents.shards import stated_row
from ckptools.contents.show_text import SHARD_COLUMNS, shard_cells, shard_map
from ckptools.display.lines import value_text
from ckptools.display.page import DICTS, MAX_ROWS, MAX_TEXT, Page
from ckptools.display.record_html import FORMS, TABLES, RecordForm, row_table, value_table
from ckptools.display.tables import Column
from ckptools.dtypes import short
from ckptools.keys.random_states import StreamRow
from ckptools.keys.sharding import placement
from ckptools.model.records import Rows
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor
from ckptools.text import few, named_ranks, plural, shape, size

ELEMENT_ROWS = 40
"""Lines of a tensor's elements."""

FEW = 16
"""At most this many shards are shown unfolded."""

LOST = {
    "missing": "MISSING: no file of {ranks} is here",
    "cut": "CUT: a file ends too early, that of {ranks}",
    "bad": "BAD: a file cannot be read, that of {ranks}",
}
"""Remarks on ranks by the status of their files (`RankFile.status`)."""


def keys_html(found: Keys) -> str:
    """Render the keys of a checkpoint, a table for each section."""
    page = Page(DICTS)
    page.line(repr(found))
    sections: dict[str, list[Any]] = {}
    for row in found.rows:
        sections.setdefault(row.section, []).append(row)
    for name, rows in sections.items():
        row_table(page, f"{name}: {plural(len(rows), 'key')}", Rows(rows), opened=len(sections) == 1)
    return page.html()


def shown_html(found: Shown) -> str:
    """Render some keys: random states as fingerprints, tensors with their shards, values."""
    page = Page(DICTS)
    page.line(repr(found))
    for line in show_text.stream_lines(found.streams):
        page.line(line)
    tensors = [row for row in found.rows if row.type == "tensor" and (row.kind != "rng" or len(found.rows) == 1)]
    for row in tensors[:MAX_ROWS]:
        _shown_tensor(page, row, opened=len(tensors) == 1)
    others = {row.name: row.note or row.value for row in found.rows if row.type != "tensor"}
    if others:
        value_table(page, plural(len(others), "value"), others)
    return page.html()


def _shown_tensor(page: Page, row: ShownKey, opened: bool) -> None:
    page.line(f"{row.name}  {show_text.tensor_facts(row)}")
    for text in filter(None, (row.note, show_text.holes_line(row), row.problem)):
        page.line(text, "bad")
    if row.statistics is not None:
        page.line(show_text.figures_line(row.statistics))
    if row.values is not None:
        lines = list(show_text.element_lines(row.values, row.dtype))
        left = len(lines) - ELEMENT_ROWS
        page.lines([f"[{row.slice}]", *lines[:ELEMENT_ROWS], *([f"{left} more lines"] if left > 0 else [])])
    else:
        page.lines(shard_map(row.shape or (), row.shards))
    cells = list(map(shard_cells, row.shards[:MAX_ROWS]))
    page.table(plural(len(row.shards), "shard"), SHARD_COLUMNS, cells, len(row.shards), opened)


def _key_cells(row: KeyRow) -> list[str]:
    value = row.note or ("" if row.type == "tensor" else value_text(row.value, MAX_TEXT))
    tensor = row.type == "tensor"
    known = [shape(row.shape) if row.shape is not None else "", short(row.dtype) if tensor else row.dtype]
    tied = f"tied to {row.tied}" if row.tied else ""
    return [row.name, row.type, *known, size(row.bytes) if tensor else "", row.layout, tied or value]


def _stream_cells(row: StreamRow) -> list[str]:
    prints = [f"rank {rank} {known}" for rank, known in row.fingerprints.items()]
    return [row.stream, str(row.ranks), str(row.distinct), row.problem or few(prints, 20)]


FORMS[KeyRow] = RecordForm(
    "key",
    (
        Column("key", "name"),
        Column("type"),
        Column("shape", "number"),
        Column("dtype"),
        Column("size", "number"),
        Column("layout"),
        Column("value"),
    ),
    _key_cells,
)
FORMS[StreamRow] = RecordForm(
    "generator",
    (Column("generator"), Column("ranks", "number"), Column("distinct", "number"), Column("fingerprints")),
    _stream_cells,
)


# -- a tensor -----------------------------------------------------------------------------------------------------


def tensor_html(tensor: Tensor) -> str:
    """Render a tensor with a picture of its layout and a row for each shard.

    If only some ranks' files were read, a part is a hole only if its file is known to be missing or unreadable: the
    bytes of others may be in the files that were not read.
    """
    page = Page("to_dicts() of .shards")
    page.line(repr(tensor))
    if tensor.note:
        page.line(tensor.note, "bad")
    page.line(placement(tensor))
    if tensor.shards:
        unread = tensor.unread and not all(shard.is_here for shard in tensor.shards)
        page.picture(tensor_layout(tensor, rows=_stated_rows(tensor) if unread else None))
    _remarks(page, tensor)
    shard_table(page, tensor.shards, tensor)
    return page.html()


def _stated_rows(tensor: Tensor) -> Iterator[ShardRow]:
    """Rows of its shards, assuming that files exist unless they are known to be missing or unreadable."""
    for shard in tensor.shards:
        gone = shard.rank is not None and tensor.lost.get(shard.rank) in ("missing", "bad")
        yield stated_row(shard, tensor.dtype)._replace(status="missing" if gone else "here")


def _remarks(page: Page, tensor: Tensor) -> None:
    ranks = {shard.rank for shard in tensor.shards if shard.rank is not None and not shard.is_here}
    if not tensor.unread:
        _remark(page, "MISSING: no file here holds the shards of {ranks}", ranks)
        return
    for status, words in LOST.items():
        _remark(page, words, {rank for rank in ranks if tensor.lost.get(rank) == status})
    _remark(page, "{ranks}: not read yet; the place of each shard is taken from other files", ranks - set(tensor.lost))


def _remark(page: Page, words: str, ranks: AbstractSet[int]) -> None:
    if ranks:
        page.verdict(words.format(ranks=named_ranks(ranks)))


def shard_table(page: Page, shards: Sequence[Shard], tensor: Tensor | None = None) -> None:
    """Add a row for each of the first shards."""
    dtype = tensor.dtype if tensor is not None else ""
    rows = [shard_cells(stated_row(shard, dtype), _absent(shard, tensor)) for shard in shards[:MAX_ROWS]]
    page.table(plural(len(shards), "shard"), SHARD_COLUMNS, rows, len(shards), opened=len(shards) <= FEW)


def _absent(shard: Shard, tensor: Tensor | None) -> str:
    if tensor is None:
        return "in no file that was read"
    lost = "" if shard.rank is None else tensor.lost.get(shard.rank, "")
    return lost.upper() or ("not read yet" if tensor.unread else "MISSING")


TABLES[Shard] = lambda page, _, shards, __: shard_table(page, shards)
