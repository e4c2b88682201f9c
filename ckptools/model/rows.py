"""Rows of an answer: records that all have the same fields, which pandas and polars take as dicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeVar, overload

from ckptools.model.records import as_html, to_dict
from ckptools.text import plural

Row = TypeVar("Row")


class Rows(tuple[Row, ...]):
    """A tuple of records, such as one for each tensor, which a notebook shows as a table.

    `pandas.DataFrame(rows.to_dicts())` is a table of them.

    Args:
        rows: the records: named tuples or dataclasses, all of one class.
    """

    __slots__ = ()

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

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def sort(self, by: str, reverse: bool = False) -> Rows[Row]:
        """The rows sorted by a field, such as `rows.sort("nbytes", reverse=True)[:10]`; those without a value are last.

        Raises:
            AttributeError: the rows have no such field.
        """
        known = [row for row in self if not _is_missing(getattr(row, by))]
        return Rows([*sorted(known, key=lambda r: getattr(r, by), reverse=reverse), *self._missing(by)])

    def _missing(self, by: str) -> Sequence[Row]:
        return [row for row in self if _is_missing(getattr(row, by))]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per row: texts, numbers, flags, None, and lists and dicts of these."""
        return [to_dict(row) for row in self]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
