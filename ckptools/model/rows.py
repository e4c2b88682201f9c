"""Rows of an answer: records that all have the same fields, which pandas and polars take as dicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

Row = TypeVar("Row")


class Rows(Sequence[Row], Generic[Row]):
    """Records in order, such as a row for each tensor. `pandas.DataFrame(rows.to_dicts())` is a table of them.

    Args:
        rows: the records: named tuples or dataclasses, all of one class.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Rows[Row]:
        return Rows(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        return self._rows == other._rows if isinstance(other, Rows) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._rows)

    def __repr__(self) -> str:
        kind = type(self._rows[0]).__name__ if self._rows else "row"
        return f"<{len(self)} rows of {kind}>" if self._rows else "<no rows>"

    def sort(self, by: str, reverse: bool = False) -> Rows[Row]:
        """The rows sorted by a field, such as `rows.sort("nbytes", reverse=True)[:10]`; those without a value are last.

        Raises:
            AttributeError: the rows have no such field.
        """
        known = [row for row in self._rows if not _is_missing(getattr(row, by))]
        return Rows([*sorted(known, key=lambda r: getattr(r, by), reverse=reverse), *self._missing(by)])

    def _missing(self, by: str) -> list[Row]:
        return [row for row in self._rows if _is_missing(getattr(row, by))]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per row: texts, numbers, flags, None, and lists and dicts of these."""
        return [to_dict(row) for row in self._rows]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def to_dict(record: Any) -> dict[str, Any]:
    """The fields of a record as a plain dict.

    Raises:
        TypeError: it is no record.
    """
    names = record_fields(record)
    if names is None:
        raise TypeError(f"{type(record).__name__} is no record")
    return {name: to_plain(getattr(record, name)) for name in names}


def record_fields(value: Any) -> tuple[str, ...] | None:
    """The names of a record's public fields, which begin with no `_`; None where a value is no record."""
    if is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in fields(value))
    else:
        names = getattr(value, "_fields", None) if isinstance(value, tuple) else None  # type: ignore[assignment]
    return None if names is None else tuple(name for name in names if not name.startswith("_"))


def to_plain(value: Any) -> Any:
    """A field of a record as texts, numbers, flags, None, and lists and dicts of these."""
    if record_fields(value) is not None:
        return to_dict(value)
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, Rows)):
        return [to_plain(child) for child in value]
    return str(value) if isinstance(value, Path) else value
