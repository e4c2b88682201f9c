"""Records as HTML: a table with a row for each of several, and one with a row for each field of a single one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ckptools.dtypes import short
from ckptools.model.checkpoint import RankFile
from ckptools.model.keys import KeyRow
from ckptools.model.problems import Problem
from ckptools.model.records import record_fields
from ckptools.model.rows import Rows
from ckptools.model.run_folder import CheckpointRow
from ckptools.model.shown import StreamRow
from ckptools.model.tensor import Shard
from ckptools.model.verification import Check
from ckptools.text import count, few, moment, number, plural, shape, size
from ckptools.training_state.optimizers import ParamGroup
from ckptools.training_state.sections import Section, measure
from ckptools.views import run_folder, verification
from ckptools.views.html.checkpoint import group_table, problem_table
from ckptools.views.html.page import MAX_ROWS, MAX_TEXT, Page
from ckptools.views.html.tensor import shard_table
from ckptools.views.param_groups import GroupRow
from ckptools.views.tables import Column
from ckptools.views.value_text import value_text

FIELD_COLUMNS = (Column("field"), Column("value"))
SIZES = ("bytes", "nbytes")
"""Fields that are numbers of bytes."""
VERDICTS = ("result", "severity", "status", "verdict")
"""Fields that say whether all is well."""


@dataclass(frozen=True)
class Form:
    """The table of a class of records.

    Attributes:
        noun: what one of them is called.
        columns: of the table.
        cells: of a record.
    """

    noun: str
    columns: Sequence[Column]
    cells: Callable[[Any], Sequence[str]]


def rows_html(rows: Rows[Any]) -> str:
    """Several records as a table."""
    page = Page(".to_dicts() of these")
    if rows:
        row_table(page, "", rows, opened=True)
    else:
        page.line("no rows")
    return page.html()


def row_table(page: Page, title: str, rows: Rows[Any], opened: bool = False) -> None:
    """A row for each of several records, in the form that their class has; of others every field that some have.

    Args:
        page: where to.
        title: of the table; "" for how many there are.
        rows: the records.
        opened: whether it is unfolded.
    """
    first = rows[0] if rows else None
    if isinstance(first, Problem):
        problem_table(page, rows, opened)
    elif isinstance(first, ParamGroup):
        group_table(page, title or plural(len(rows), "param group"), group_rows(rows), opened)
    elif isinstance(first, Shard):
        shard_table(page, rows)
    elif isinstance(first, Check):
        cells = [row for check in rows for row in verification.check_rows(check)]
        page.table(title or plural(len(rows), "check"), verification.COLUMNS, cells, opened=opened)
    else:
        form = FORMS.get(type(first)) or _form_of(rows)
        some = [form.cells(row) for row in rows[:MAX_ROWS]]
        kept = [n for n in range(len(form.columns)) if any(cells[n] for cells in some)]
        columns, filled = [form.columns[n] for n in kept], [[row[n] for n in kept] for row in some]
        page.table(title or plural(len(rows), form.noun), columns, filled, len(rows), opened)


def group_rows(groups: Sequence[ParamGroup]) -> list[GroupRow]:
    """Param groups as rows, without the number of elements: that takes the model."""
    return [
        GroupRow({k: v for k, v in group.items() if k != "params"}, len(group.names), None, group.names)
        for group in groups
    ]


def record_html(record: Any) -> str:
    """One record: a row for each of its fields."""
    page = Page(".to_dict() of this")
    page.line(repr(record))
    known = {name: value for name, value in _fields(record).items() if value is not None and value not in ("", ())}
    rows = [(name, cell_text(name, value)) for name, value in known.items()]
    page.table(plural(len(rows), "field"), FIELD_COLUMNS, rows, opened=True)
    for value in known.values():
        if isinstance(value, tuple) and value and record_fields(value[0]) is not None:
            row_table(page, "", Rows(value))
    return page.html()


def _fields(record: Any) -> Mapping[str, Any]:
    if hasattr(record, "_record"):
        found: Mapping[str, Any] = record._record()
        return found
    return {name: getattr(record, name) for name in record_fields(record) or ()}


# -- records that have no form of their own ----------------------------------------------------------------------


def _form_of(rows: Rows[Any]) -> Form:
    """A column for each field in which some of the records have something."""
    known = [_fields(row) for row in rows[:MAX_ROWS]]
    names = [name for name in (known[0] if known else ()) if any(not _is_empty(row[name]) for row in known)]
    numeric = [_is_numeric([row[name] for row in known]) for name in names]
    columns = [Column(n, right, n == "name", n in VERDICTS) for n, right in zip(names, numeric, strict=True)]
    noun = type(rows[0]).__name__ if rows else "row"
    return Form(f"row of {noun}", columns, lambda row: [cell_text(name, _fields(row)[name]) for name in names])


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", (), False) or (isinstance(value, (Mapping, list)) and not value)


def _is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values if value is not None)


def cell_text(name: str, value: Any) -> str:
    """A field of a record in a few words: `-` for nothing, bytes with their unit, a record in it by its line."""
    if value is None or (isinstance(value, (str, tuple)) and not value):
        return "-"
    if name in SIZES and isinstance(value, int):
        return size(value)
    if isinstance(value, Enum):
        return f"{value.name} ({value.value[0]})" if isinstance(value.value, tuple) else str(value.value)
    if isinstance(value, (str, Path)):
        return str(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _structure_text(value)


def _structure_text(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, tuple) and all(type(item) is int for item in value):
        return shape(value)
    if record_fields(value) is not None or (isinstance(value, tuple) and record_fields(value[0]) is not None):
        return repr(value)
    return value_text(value, MAX_TEXT)


# -- records that have a form ------------------------------------------------------------------------------------


def _file_cells(file: RankFile) -> list[str]:
    rank = "-" if file.rank is None else str(file.rank)
    saved = moment(file.modified) if file.modified else "-"
    return [rank, file.status, size(file.nbytes), saved, file.part, file.path.name]


def _section_cells(section: Section) -> list[str]:
    held = measure(section.value)
    numbers = [str(held.tensors), count(held.params), size(held.nbytes)] if held.tensors else ["-", "-", "-"]
    return [section.name, section.kind, *numbers, "" if held.tensors else value_text(section.value, MAX_TEXT)]


def _key_cells(row: KeyRow) -> list[str]:
    held = row.note or ("" if row.type == "tensor" else value_text(row.value, MAX_TEXT))
    tensor = row.type == "tensor"
    known = [shape(row.shape) if row.shape is not None else "", short(row.dtype) if tensor else row.dtype]
    tied = f"tied to {row.tied}" if row.tied else ""
    return [row.name, row.type, *known, size(row.bytes) if tensor else "", row.layout, tied or held]


def _stream_cells(row: StreamRow) -> list[str]:
    told = [f"rank {rank} {known}" for rank, known in row.fingerprints.items()]
    return [row.stream, str(row.ranks), str(row.distinct), row.problem or few(told, 20)]


FORMS: dict[type, Form] = {
    RankFile: Form(
        "file",
        (Column("rank", True), Column("status", verdict=True), Column("size", True), Column("saved"), Column("part"),
         Column("file", name=True)),
        _file_cells,
    ),
    Section: Form(
        "section",
        (Column("section", name=True), Column("kind"), Column("tensors", True), Column("params", True),
         Column("size", True), Column("value")),
        _section_cells,
    ),
    KeyRow: Form(
        "key",
        (Column("key", name=True), Column("type"), Column("shape", True), Column("dtype"), Column("size", True),
         Column("layout"), Column("value")),
        _key_cells,
    ),
    CheckpointRow: Form("checkpoint", run_folder.COLUMNS, run_folder.cells_of),
    StreamRow: Form(
        "generator",
        (Column("generator"), Column("ranks", True), Column("distinct", True), Column("fingerprints")),
        _stream_cells,
    ),
}  # fmt: skip
"""How the records are shown that users meet most."""
