"""Records: data with named fields, which show themselves in one line at a prompt and as a table in a notebook.

What makes a table of a record is a view, which the model must not know. So it is handed in from above: the layer that
gives records to users (`api`) calls `show_with` once, with a function that imports the views when a notebook asks.
A wrapper around every answer would do without that, and would be another class for each, which users have to learn.
Where nobody handed anything in, a notebook shows the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ckptools.text import clip, printable

Class = TypeVar("Class", bound=type)

MAX_LINE = 120
"""Characters of a `repr`."""

MAX_TEXT = 40
"""Characters of a text in it."""

SCALARS = frozenset({str, int, float, bool, type(None)})
"""Types that are plain as they are: most fields of the rows of a large checkpoint."""

_html_of: Callable[[Any], str] | None = None


def show_with(html_of: Callable[[Any], str]) -> None:
    """Say what makes the HTML of a record that a notebook shows.

    Args:
        html_of: called with the record.
    """
    global _html_of  # the one place where a view comes down to the data
    _html_of = html_of


def as_html(value: Any) -> str | None:
    """What a notebook shows of a value; None, for which it shows the `repr`, where nothing makes HTML."""
    return None if _html_of is None else _html_of(value)


def displayed(record: Class) -> Class:
    """Give a class of records a `repr` of one line, a table in a notebook, and `to_dict`.

    The line has what its method `_told` returns, and without one its fields.
    """
    if not hasattr(record, "to_dict"):
        record.to_dict = to_dict  # type: ignore[attr-defined]
    record.__repr__ = one_line  # type: ignore[method-assign, assignment]
    record._repr_html_ = as_html  # type: ignore[attr-defined]
    return record


def one_line(record: Any) -> str:
    """A record in at most 120 characters that are safe to print: `<RankFile rank 3: read, 301.3 MiB>`."""
    told = record._told() if hasattr(record, "_told") else _fields_told(record)
    return line_of(type(record).__name__, told)


def line_of(kind: str, told: str) -> str:
    """What a thing is and what is told of it, as a `repr` of at most 120 characters."""
    return f"<{clip(printable(f'{kind} {told}'.rstrip()), MAX_LINE - 2)}>"


def _fields_told(record: Any) -> str:
    known = ((name, getattr(record, name)) for name in record_fields(record) or ())
    return ", ".join(f"{name}={_brief(value)}" for name, value in known if value is not None and value not in ("", ()))


def _brief(value: Any) -> str:
    """A field in a few characters, in time that the file cannot choose."""
    if isinstance(value, (str, Path)):
        return clip(str(value), MAX_TEXT)
    if isinstance(value, (list, tuple)) and len(value) <= 8 and all(type(v) is int for v in value):
        return str(list(value))
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        return f"<{len(value)}>"
    if isinstance(value, Enum):
        return value.name
    return f"{value:.4g}" if isinstance(value, float) else clip(repr(value), MAX_TEXT)


# -- as plain data -----------------------------------------------------------------------------------------------


def to_dict(record: Any) -> dict[str, Any]:
    """The fields of a record as a plain dict; those that its method `_record` names, where it has one.

    Raises:
        TypeError: it is no record.
    """
    if hasattr(record, "_record"):
        return {str(name): to_plain(value) for name, value in record._record().items()}
    names = record_fields(record)
    if names is None:
        raise TypeError(f"{type(record).__name__} is no record")
    return {name: to_plain(getattr(record, name)) for name in names}


def record_fields(value: Any) -> tuple[str, ...] | None:
    """The names of a record's public fields, which begin with no `_`; None where a value is no record."""
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
    """A field of a record as texts, numbers, flags, None, and lists and dicts of these."""
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
