"""Records and plain values as HTML: a table with a row for each record, each field or each key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ckptools.display.lines import key_name, value_text
from ckptools.display.page import MAX_LINE, MAX_ROWS, MAX_TEXT, Page
from ckptools.display.row_table import cell_text, columns_of, fields_of
from ckptools.display.tables import Column
from ckptools.dtypes import short
from ckptools.model.causes import causes_of, consequences_of
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Problem
from ckptools.model.records import Rows, record_fields
from ckptools.model.tensor import Tensor
from ckptools.model.values import Opaque
from ckptools.text import count, moment, plural, shape, size
from ckptools.training_state.section_size import measure
from ckptools.training_state.sections import Section

PROBLEM_COLUMNS = (
    Column("code"), Column("severity", "verdict"), Column("where"), Column("what"), Column("what to do")
)  # fmt: skip
FIELD_COLUMNS = (Column("field"), Column("value"))
VALUE_COLUMNS = (Column("key", "name"), Column("value"), Column("dtype"), Column("size", "number"))


@dataclass(frozen=True)
class RecordForm:
    """The table of a class of records: what one of them is called, the columns, and the cells of a record."""

    noun: str
    columns: Sequence[Column]
    cells: Callable[[Any], Sequence[str]]


def rows_html(rows: Sequence[Any]) -> str:
    """Several records as a table."""
    page = Page(".to_dicts() of these")
    if rows:
        row_table(page, "", rows, opened=True)
    else:
        page.line("none")
    return page.html()


def row_table(page: Page, title: str, rows: Sequence[Any], opened: bool = False) -> None:
    """A row for each of several records, in the form that their class has; of others every field that some have.

    Without a title it is how many there are.
    """
    cls = type(rows[0]) if rows else None
    if cls in TABLES:
        TABLES[cls](page, title, rows, opened)
        return
    form = FORMS.get(cls) or _form_of(rows)
    some = [form.cells(row) for row in rows[:MAX_ROWS]]
    kept = [n for n in range(len(form.columns)) if any(cells[n] for cells in some)]
    columns, filled = [form.columns[n] for n in kept], [[row[n] for n in kept] for row in some]
    page.table(title or plural(len(rows), form.noun), columns, filled, len(rows), opened)


def problem_table(page: Page, problems: Sequence[Problem], opened: bool = True) -> None:
    """A row for each cause behind problems, then what follows from lost files. Nothing where there are none."""
    causes, following = causes_of(problems, ("error", "warning", "note")), consequences_of(problems)
    rows = [(c.code, str(c.severity), c.where, c.what, c.remedy) for c in causes]
    rows += [(c.code, "", f"follows from {', '.join(c.causes)}", c.text, "") for c in following]
    if rows:
        title = ", ".join([plural(len(causes), "problem"), *(one.text for one in following)])
        page.table(title, PROBLEM_COLUMNS, rows, opened=opened)


def record_html(record: Any) -> str:
    """One record: a row for each of its fields."""
    page = Page(".to_dict() of this")
    page.line(repr(record))
    known = {name: value for name, value in fields_of(record).items() if value is not None and value not in ("", ())}
    rows = [(name, cell_text(name, value)) for name, value in known.items()]
    page.table(plural(len(rows), "field"), FIELD_COLUMNS, rows, opened=True)
    for value in known.values():
        if isinstance(value, tuple) and value and record_fields(value[0]) is not None:
            row_table(page, "", Rows(value))
    return page.html()


def _form_of(rows: Sequence[Any]) -> RecordForm:
    """The form of records that have none of their own: a column for each field in which some have something."""
    columns = columns_of(list(map(fields_of, rows[:MAX_ROWS])))
    noun = type(rows[0]).__name__ if rows else "row"
    return RecordForm(
        f"row of {noun}", columns, lambda row: [cell_text(c.title, fields_of(row).get(c.title)) for c in columns]
    )


def _file_cells(file: RankFile) -> list[str]:
    rank = "-" if file.rank is None else str(file.rank)
    saved = moment(file.modified) if file.modified else "-"
    return [rank, file.status, size(file.nbytes), saved, file.part, file.path.name]


def _section_cells(section: Section) -> list[str]:
    amount = measure(section.value)
    numbers = [str(amount.tensors), count(amount.params), size(amount.nbytes)] if amount.tensors else ["-", "-", "-"]
    return [section.name, section.kind, *numbers, "" if amount.tensors else value_text(section.value, MAX_TEXT)]


FORMS: dict[type | None, RecordForm] = {
    RankFile: RecordForm(
        "file",
        (Column("rank", "number"), Column("status", "verdict"), Column("size", "number"), Column("saved"),
         Column("part"), Column("file", "name")),
        _file_cells,
    ),
    Section: RecordForm(
        "section",
        (Column("section", "name"), Column("kind"), Column("tensors", "number"), Column("params", "number"),
         Column("size", "number"), Column("value")),
        _section_cells,
    ),
}  # fmt: skip
"""Tables of the records that users meet most; the HTML of a feature and `api/notebook_html.py` add others."""

TABLES: dict[type | None, Callable[[Page, str, Sequence[Any], bool], None]] = {
    Problem: lambda page, _, rows, opened: problem_table(page, rows, opened)
}
"""Tables of several records of a class that take more than a row each."""


def values_html(values: Mapping[Any, Any]) -> str:
    """A mapping of a checkpoint's tree: a row for each key, with its value, dtype and size."""
    page = Page("dict(...) of this")
    value_tree(page, plural(len(values), "key"), values, opened=True)
    return page.html()


BRANCHES: dict[type, Callable[[Any], Mapping[Any, Any]]] = {}
"""How values of a class that is no mapping are unfolded."""

DEPTH = 6
"""Folds within each other, at most."""


def value_tree(page: Page, title: str, values: Mapping[Any, Any], opened: bool = False, depth: int = DEPTH) -> None:
    """A fold for each mapping in a mapping, and a table of its other values."""
    branches = {key: found for key, value in values.items() if (found := _branch(value)) is not None} if depth else {}
    if not branches:
        value_table(page, title, values, opened)
        return
    with page.folded(title, opened) as room:
        others = {key: value for key, value in values.items() if key not in branches}
        if room and others:
            value_table(page, plural(len(others), "value"), others, opened=True)
        for key, found in islice(branches.items(), MAX_ROWS if room else 0):
            value_tree(page, f"{key_name(key)}: {plural(len(found), 'key')}", found, depth=depth - 1)
        if room and len(branches) > MAX_ROWS:
            page.line(f"{len(branches) - MAX_ROWS} more are not shown", "dim")


def _branch(value: Any) -> Mapping[Any, Any] | None:
    """What a value unfolds to: a mapping with more than a few plain values, or a list of mappings."""
    made = next((unfold(value) for cls, unfold in BRANCHES.items() if isinstance(value, cls)), value)
    if isinstance(made, (list, tuple)) and made and all(isinstance(item, Mapping) for item in islice(made, MAX_ROWS)):
        return dict(enumerate(made))
    deep = isinstance(made, Mapping) and any(isinstance(item, (Mapping, Tensor)) for item in made.values())
    return made if isinstance(made, Mapping) and (deep or len(made) > FEW) else None


FEW = 3
"""A mapping of so many plain values stays in one line."""


def section_html(section: Section) -> str:
    """A section of a checkpoint: what it is, and what it holds."""
    page = Page(f"ckptools.open(...).records({section.name!r})")
    page.line(repr(section))
    if isinstance(section.value, Mapping):
        value_table(page, plural(len(section.value), "key"), section.value)
    else:
        page.line(value_text(section.value, MAX_LINE))
    return page.html()


def opaque_html(value: Opaque) -> str:
    """An object of a foreign class, which was never made: what the file says of it."""
    page = Page(".fields of this")
    page.line(f"an object of {value.name}, kept as data: its class is not imported and nothing of it was run")
    value_table(page, plural(len(value.fields), "field"), value.fields)
    return page.html()


def value_table(page: Page, title: str, values: Mapping[Any, Any], opened: bool = True) -> None:
    """A row for each key of a mapping, of which the first are made."""
    rows = [_cells(key, value) for key, value in islice(values.items(), MAX_ROWS)]
    columns = VALUE_COLUMNS if any(row[2] for row in rows) else VALUE_COLUMNS[:2]
    page.table(title, columns, [row[: len(columns)] for row in rows], len(values), opened)


def _cells(key: Any, value: Any) -> tuple[str, ...]:
    if isinstance(value, Tensor):
        return key_name(key), f"tensor {shape(value.shape)}", short(value.dtype), size(value.nbytes)
    return key_name(key), value_text(value, MAX_TEXT), "", ""
