"""Records: data with named fields, which show themselves in one line at a prompt and as a table in a notebook."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, SupportsIndex, TypeVar, overload

from ckptools.option import in_python
from ckptools.text import clip, plural, printable

# The model must not import the code that makes tables, so `api` calls `show_with` once, with functions that import it
# when a notebook asks. Wrapping every record instead would give users a second class of each to learn. Before that
# call, a notebook shows the line.


Class = TypeVar("Class", bound=type)

MAX_LINE = 120
"""Characters of a `repr`."""

MAX_TEXT = 40
"""At most this many characters of a text in a `repr`."""

SCALARS = frozenset({str, int, float, bool, type(None)})
"""Types that need no conversion: most fields of a large checkpoint's rows have one of them."""

_html_of: Callable[[Any], str] | None = None
_table_of: Callable[[Any, str], str] | None = None


def show_with(html_of: Callable[[Any], str], table_of: Callable[[Any, str], str]) -> None:
    """Set the functions that render records as HTML and tables.

    Args:
        html_of: makes the HTML of a record for a notebook.
        table_of: makes a table of rows in one of tabulate's formats.
    """
    global _html_of, _table_of  # the one place where the model learns of a view
    _html_of, _table_of = html_of, table_of


@in_python
def as_html(value: Any) -> str | None:
    """The HTML of a value for a notebook; None before `show_with` was called, so that the `repr` is shown."""
    return None if _html_of is None else _html_of(value)


def displayed(record: Class) -> Class:
    """Give a class of records a one-line `repr`, a table in a notebook, and `to_dict`.

    The line shows the result of its method `_summary`, or else its fields.
    """
    if not hasattr(record, "to_dict"):
        record.to_dict = to_dict  # type: ignore[attr-defined]
    record.__repr__ = one_line  # type: ignore[method-assign, assignment]
    record._repr_html_ = as_html  # type: ignore[attr-defined]
    return record


def one_line(record: Any) -> str:
    """Render a record in at most 120 characters that are safe to print: `<RankFile rank 3: read, 301.3 MiB>`."""
    return line_of(type(record).__name__, record._summary() if hasattr(record, "_summary") else _fields_in_line(record))


def line_of(kind: str, words: str) -> str:
    """Make a `repr` of at most 120 characters: a class name and a description."""
    return f"<{clip(printable(f'{kind} {words}'.rstrip()), MAX_LINE - 2)}>"


def _fields_in_line(record: Any) -> str:
    known = ((name, getattr(record, name)) for name in record_fields(record) or ())
    return ", ".join(f"{name}={_brief(value)}" for name, value in known if value is not None and value not in ("", ()))


def _brief(value: Any) -> str:
    """Render a field in a few characters, in time that the file cannot inflate."""
    if isinstance(value, (str, Path)):
        return clip(str(value), MAX_TEXT)
    if isinstance(value, (list, tuple)) and len(value) <= 8 and all(type(v) is int for v in value):
        return str(list(value))
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        return f"<{len(value)}>"
    if isinstance(value, Enum):
        return value.name
    return f"{value:.4g}" if isinstance(value, float) else clip(repr(value), MAX_TEXT)


# -- as plain data -----------------------------------------------------------------------------------------------------


def to_dict(record: Any) -> dict[str, Any]:
    """The fields of a record as a plain dict; the result of its method `_record`, if it has one.

    Raises:
        TypeError: the object is not a record.
    """
    if hasattr(record, "_record"):
        return {str(name): to_plain(value) for name, value in record._record().items()}
    names = record_fields(record)
    if names is None:
        raise TypeError(f"{type(record).__name__} is no record")
    return {name: to_plain(getattr(record, name)) for name in names}


def record_fields(value: Any) -> tuple[str, ...] | None:
    """The names of a record's public fields (without leading `_`); None if the value is not a record."""
    kind: type = type(value)
    return _fields_of(kind)


@lru_cache(maxsize=1024)
def _fields_of(record: type) -> tuple[str, ...] | None:
    if is_dataclass(record):
        names = tuple(field.name for field in fields(record))
    elif issubclass(record, tuple) and hasattr(record, "_fields"):
        names = record._fields
    else:
        return None
    return tuple(name for name in names if not name.startswith("_"))


def to_plain(value: Any) -> Any:
    """Convert a field of a record to texts, numbers, flags, None, and lists and dicts of these."""
    if type(value) in SCALARS:
        return value
    if hasattr(value, "_record") or record_fields(value) is not None:
        return to_dict(value)
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(child) for child in value]
    return str(value) if isinstance(value, Path) else value


# -- rows --------------------------------------------------------------------------------------------------------------


Row = TypeVar("Row")
Key = TypeVar("Key")


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Group rows by key, in the order in which the keys first occur."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


class RowMethods(Generic[Row]):
    """Methods that a sequence of records has in a notebook."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Row]:
        raise NotImplementedError

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def sort(self, by: str, reverse: bool = False) -> Rows[Row]:
        """Sort the rows by a field, such as `rows.sort("nbytes", reverse=True)[:10]`; rows without a value come last.

        Raises:
            AttributeError: the rows have no such field.
        """
        missing = [row for row in self if _is_missing(getattr(row, by))]
        known = [row for row in self if not _is_missing(getattr(row, by))]
        return Rows([*sorted(known, key=lambda r: getattr(r, by), reverse=reverse), *missing])

    def to_dicts(self) -> list[dict[str, Any]]:
        """Convert each row to a plain dict: texts, numbers, flags, None, and lists and dicts of these."""
        return [to_dict(row) for row in self]

    def to_markdown(self) -> str:
        """Make a Markdown table of the fields of `to_dicts`, with values as on a screen."""
        return repr(self) if _table_of is None else _table_of(self, "github")

    def __str__(self) -> str:
        """The table as on a screen, for `print`; the `repr` if there are no rows."""
        return (_table_of(self, "simple") if _table_of is not None else "") or repr(self)


class Rows(RowMethods[Row], tuple[Row, ...]):
    """A tuple of records, such as one for each tensor, which a notebook shows as a table.

    `pandas.DataFrame(rows.to_dicts())` is a table of them.

    Args:
        rows: the records: named tuples or dataclasses, all of one class.
    """

    __slots__ = ()
    __iter__ = tuple.__iter__

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[Row]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Row | Rows[Row]:
        found: Any = super().__getitem__(index)
        return Rows(found) if isinstance(index, slice) else found

    def __repr__(self) -> str:
        kind = type(self[0]).__name__ if self else "row"
        return f"<{plural(len(self), 'row')} of {kind}>" if self else "<no rows>"


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


# -- how much of a checkpoint a rule or a check covered: all of it, a part, or nothing ---------------------------------


class Looked(NamedTuple):
    """The number of files, tensors, zip entries or counters that a check covered.

    Attributes:
        looked_at: number that it looked at.
        of: total number.
        rest: why it did not look at the rest.
    """

    looked_at: int
    of: int
    rest: str = ""

    @property
    def result(self) -> Literal["ok", "partly", "not judged"]:
        """The result of a check without findings: `ok` only if everything was looked at."""
        if not self.looked_at:
            return "not judged"
        return "ok" if self.looked_at == self.of else "partly"

    @property
    def words(self) -> str:
        """Why the check did not cover everything; empty if it did."""
        if self.result == "ok":
            return ""
        return self.rest if not self.looked_at else f"{self.looked_at} of {self.of} looked at: {self.rest}"

    def _record(self) -> dict[str, Any]:
        return {"result": self.result, **self._asdict()}
