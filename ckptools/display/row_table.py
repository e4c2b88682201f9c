"""The table of several records: a column for each field in which some of them have something."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from ckptools.display.lines import value_text
from ckptools.display.tables import Column, Role, tabulated
from ckptools.errors import UsageError
from ckptools.model.records import Rows, record_fields
from ckptools.text import few, number, printable, shape, size

MAX_TEXT = 600
"""Characters of one value."""
SIZES = ("bytes", "nbytes")
"""Fields that are numbers of bytes."""
VERDICTS = ("result", "severity", "status", "verdict")
"""Fields that say whether all is well."""
UNSAFE = ("unsafehtml", "latex_raw")
"""Formats of tabulate in which a name from a file could be markup."""


def check_table_format(name: str) -> None:
    """Refuse a format that tabulate does not have.

    Raises:
        UsageError: naming those that it has.
    """
    from tabulate import tabulate_formats  # type: ignore[import-untyped]

    known = [one for one in tabulate_formats if one not in UNSAFE]
    if name not in known:
        raise UsageError(None, f"--table-format {name}: choose one of {', '.join(known)}")


def rows_text(rows: Rows[Any], table_format: str) -> str:
    """Write rows as a table for a document or program: the fields that `to_dicts` has, values as on a screen."""
    known = [fields_of(row) for row in rows]
    columns = columns_of(known)
    cells = [[_cell(c.title, fields.get(c.title), table_format) for c in columns] for fields in known]
    return table_text(columns, cells, table_format)


def table_text(columns: Sequence[Column], cells: Sequence[Sequence[str]], table_format: str) -> str:
    """Write the cells of a table in one of tabulate's formats; nothing where there are no columns."""
    check_table_format(table_format)
    if not columns:
        return ""
    lines = [[_safe(text, table_format) for text in row] for row in cells]
    return tabulated(columns, lines, table_format, [column.title for column in columns])


def _cell(name: str, value: Any, table_format: str) -> str:
    """A field of a record, a plain number where the table is for programs."""
    plain = table_format == "tsv" and isinstance(value, (int, float))
    return str(value) if plain else cell_text(name, value)


def _safe(text: str, table_format: str) -> str:
    """A cell with its control characters visible, and no bar that begins a column in Markdown."""
    return printable(text).replace("|", "\\|") if table_format in ("github", "pipe") else printable(text)


def columns_of(known: Sequence[Mapping[str, Any]]) -> list[Column]:
    """A column for each field in which some records, given by their fields, have something; numbers on the right."""
    every = dict.fromkeys(name for row in known for name in row)
    names = [name for name in every if any(not _is_empty(row.get(name)) for row in known)]
    numeric = [_is_numeric(row.get(name) for row in known) for name in names]
    return [Column(name, _role(name, right)) for name, right in zip(names, numeric, strict=True)]


def _role(name: str, numeric: bool) -> Role:
    """The role of a field's column."""
    return "number" if numeric else "name" if name == "name" else "verdict" if name in VERDICTS else "text"


def fields_of(record: Any) -> Mapping[str, Any]:
    """The fields of a record, as `to_dict` names them."""
    if hasattr(record, "_record"):
        found: Mapping[str, Any] = record._record()
        return found
    return {name: getattr(record, name) for name in record_fields(record) or ()}


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", (), False) or (isinstance(value, (Mapping, list)) and not value)


def _is_numeric(values: Iterable[Any]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values if value is not None)


def cell_text(name: str, value: Any) -> str:
    """A field of a record in a few words: `-` for nothing, bytes with their unit, a record in it by its line."""
    if value == () and "shape" in name:
        return shape(())  # of a scalar
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
    if record_fields(value) is not None:
        return repr(value)
    if isinstance(value, tuple) and all(type(item) is str for item in value):
        return few(value)
    if isinstance(value, tuple) and record_fields(value[0]) is not None:
        return repr(Rows(value))
    return value_text(value, MAX_TEXT)
