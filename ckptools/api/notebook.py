"""HTML that a notebook displays for each class of the Python interface; no file is read for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import singledispatch
from itertools import islice
from typing import Any

from ckptools.consolidate.record import Consolidated, consolidation_html
from ckptools.contents.record import KeyRow, Keys, ShardRow, Shown
from ckptools.contents.show import stated_row
from ckptools.contents.text import (
    SHARD_COLUMNS,
    element_lines,
    figures_line,
    holes_line,
    shard_cells,
    shard_map,
    stream_lines,
    tensor_facts,
)
from ckptools.diff.record import TensorDifference
from ckptools.diff.text import TENSOR_COLUMNS as TENSOR_COLUMNS_OF_DIFF
from ckptools.diff.text import difference_cells
from ckptools.display.html import (
    BRANCHES,
    DICTS,
    FORMS,
    MAX_ROWS,
    MAX_TEXT,
    TABLES,
    Page,
    RecordForm,
    opaque_html,
    problem_table,
    record_html,
    row_table,
    rows_html,
    section_html,
    value_table,
    values_html,
)
from ckptools.display.page import PagedRecord
from ckptools.display.screen import mark_of
from ckptools.display.tables import Column, checkpoint_line, value_text
from ckptools.dtypes import short
from ckptools.inspect.record import (
    FACT_COLUMNS,
    SECTION_COLUMNS,
    Report,
    facts,
    group_rows,
    group_table,
    inspect_report,
    scheduler_words,
    section_cells,
)
from ckptools.inspect.sections import TENSOR_COLUMNS, named_tensors, tensor_cells
from ckptools.keys.random_states import StreamRow
from ckptools.keys.sharding import placement
from ckptools.ls.record import COLUMNS, CheckpointRow, cells_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import RowMethods, Rows, grouped
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque
from ckptools.pictures.rank_map import rank_map
from ckptools.pictures.tensor_layout import tensor_layout
from ckptools.text import few, named_ranks, plural, shape, size
from ckptools.training_state.optimizers import Optimizer, ParamGroup
from ckptools.training_state.sections import Section, sections_of_kind
from ckptools.verify import record as verification


def page_html(record: PagedRecord) -> str:
    """Render the page of a record."""
    page = Page(DICTS)
    record._fill(page)
    return page.html()


# -- a checkpoint ------------------------------------------------------------------------------------------------------


def checkpoint_html(ck: Checkpoint) -> str:
    """Render a checkpoint: its problems, facts and contents."""
    report = inspect_report(ck)
    models = {section.name for section in sections_of_kind(ck, "model")}
    page = Page(lambda title: _command(report, title if title in models else ""))
    page.line(checkpoint_line(ck))
    page.verdict(report.verdict)
    problem_table(page, report.problems, opened=report.verdict.level == "bad")
    if len(ck.files) > 1:
        page.picture(rank_map(ck), opened=report.verdict.level == "bad")
    page.table("what it is", FACT_COLUMNS, list(facts(report)))
    page.table("sections", SECTION_COLUMNS, section_cells(report.sections), opened=True)
    for optimizer in report.optimizers:
        group_table(page, f"param groups of {optimizer.section}", optimizer.groups)
    for scheduler in report.schedulers:
        page.line(f"{scheduler.section}: {scheduler_words(scheduler)}")
    for section in sections_of_kind(ck, "model"):
        rows = [tensor_cells(*named) for named in islice(named_tensors(section.value), MAX_ROWS)]
        total = next(s.size.tensors for s in report.sections if s.path == section.path)
        page.table(section.name, TENSOR_COLUMNS, rows, total)
    return page.html()


def _command(report: Report, section: str) -> str:
    """The command that shows every row of a section, or of the tables of `inspect`."""
    more = f" --section {shlex.quote(section)}" if section else ""
    return f"ckptools inspect {report.arguments or 'FILES'}{more}"


def optimizer_html(optimizer: Optimizer) -> str:
    """Render an optimizer: its param groups, and its state for each parameter."""
    page = Page(".state and .param_groups of this")
    page.line(repr(optimizer))
    if optimizer.naming.note:
        page.line(optimizer.naming.note, "warn" if optimizer.naming.unnamed or optimizer.naming.assumed else "")
    group_table(page, plural(len(optimizer.param_groups), "param group"), group_rows(optimizer.param_groups), True)
    value_table(page, f"state of {plural(len(optimizer.state), 'parameter')}", optimizer.state, opened=False)
    return page.html()


TABLES[ParamGroup] = lambda page, title, rows, opened: group_table(
    page, title or plural(len(rows), "param group"), group_rows(rows), opened
)


# -- keys and tensors --------------------------------------------------------------------------------------------------


ELEMENT_ROWS = 40
"""At most this many lines of a tensor's elements."""

FEW = 16
"""At most this many shards are shown unfolded."""

LOST = {
    "missing": "MISSING: no file of {ranks} is here",
    "cut": "CUT: a file ends too early, that of {ranks}",
    "bad": "BAD: a file cannot be read, that of {ranks}",
}
"""Remarks on ranks, by the status of their files (`RankFile.status`)."""


def keys_html(found: Keys) -> str:
    """Render the keys of a checkpoint, a table for each section."""
    page = Page(DICTS)
    page.line(repr(found))
    sections = grouped(found.rows, lambda row: row.section)
    for name, rows in sections.items():
        row_table(page, f"{name}: {plural(len(rows), 'key')}", Rows(rows), opened=len(sections) == 1)
    return page.html()


def shown_html(found: Shown) -> str:
    """Render some keys: random states as fingerprints, tensors with their shards, values."""
    page = Page(DICTS)
    page.line(repr(found))
    for line in stream_lines(found.streams):
        page.line(line)
    tensors = [row for row in found.rows if row.type == "tensor" and (row.kind != "rng" or len(found.rows) == 1)]
    for row in tensors[:MAX_ROWS]:
        page.line(f"{row.name}  {tensor_facts(row)}")
        for text in filter(None, (row.note, holes_line(row), row.problem)):
            page.line(text, "bad")
        if row.statistics is not None:
            page.line(figures_line(row.statistics))
        if row.values is not None:
            lines = list(element_lines(row.values, row.dtype))
            left = len(lines) - ELEMENT_ROWS
            page.lines([f"[{row.slice}]", *lines[:ELEMENT_ROWS], *([f"{left} more lines"] if left > 0 else [])])
        else:
            page.lines(shard_map(row.shape or (), row.shards))
        cells = list(map(shard_cells, row.shards[:MAX_ROWS]))
        page.table(plural(len(row.shards), "shard"), SHARD_COLUMNS, cells, len(row.shards), len(tensors) == 1)
    others = {row.name: row.note or row.value for row in found.rows if row.type != "tensor"}
    if others:
        value_table(page, plural(len(others), "value"), others)
    return page.html()


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


# -- a tensor ----------------------------------------------------------------------------------------------------------


def tensor_html(tensor: Tensor) -> str:
    """Render a tensor with a picture of its layout and a row for each shard.

    If only some ranks' files were read, a region counts as a hole only if its file is known to be missing or
    unreadable: other bytes may be in files that were not read.
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
    """Make rows of the shards, assuming that files exist unless they are known to be missing or unreadable."""
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
        text = words.format(ranks=named_ranks(ranks))
        page.line(text, mark_of(text))


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


# -- HTML by class -----------------------------------------------------------------------------------------------------


@singledispatch
def html_of(value: Any) -> str:
    """Render a value as HTML; for a record of an unlisted class, each of its fields."""
    return record_html(value)


html_of.register(Checkpoint, checkpoint_html)
html_of.register(Tensor, tensor_html)
html_of.register(Mapping, values_html)
html_of.register(Section, section_html)
html_of.register(Opaque, opaque_html)
html_of.register(RowMethods, rows_html)
html_of.register(Optimizer, optimizer_html)
html_of.register(PagedRecord, page_html)
html_of.register(Keys, keys_html)
html_of.register(Shown, shown_html)
html_of.register(Consolidated, consolidation_html)

# Registered here, so that the command line does not import code that makes HTML.
FORMS[TensorDifference] = RecordForm("tensor", TENSOR_COLUMNS_OF_DIFF, difference_cells)
FORMS[CheckpointRow] = RecordForm("checkpoint", COLUMNS, cells_of)
TABLES[verification.Check] = lambda page, title, rows, opened: page.table(
    title or plural(len(rows), "check"), verification.COLUMNS, verification.check_rows(rows), opened=opened
)
BRANCHES[Optimizer] = lambda found: {"param_groups": found.param_groups, "state": found.state}
