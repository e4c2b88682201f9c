"""Options that choose among the keys of a checkpoint, and how many rows of a table are shown; the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ckptools.errors import UsageError
from ckptools.model.records import record_fields
from ckptools.model.rows import Rows
from ckptools.option import option

if TYPE_CHECKING:
    from ckptools.contents.selection import Selection

Row = TypeVar("Row")


@dataclass(frozen=True)
class PrivateOption:
    """Whether values that are private to the class that wrote them are shown."""

    private: bool = option(False, "Show also values whose names begin with '_'.")


WITHOUT_PRIVATE = PrivateOption()


@dataclass(frozen=True)
class SelectionOptions:
    """Which keys of a checkpoint are looked at."""

    filter: list[str] | None = option(
        None,
        "Only keys that match, such as 'blocks.*.weight' (* matches dots too); may be repeated.",
        metavar="GLOB",
        completed="keys",
    )
    exclude: list[str] | None = option(None, "No keys that match; may be repeated.", metavar="GLOB", completed="keys")
    section: str | None = option(
        None,
        "Only one section: model, optimizer, scheduler, rng, other, a section's own name; or all.",
        completed="sections",
    )

    @property
    def selection(self) -> Selection:
        """What was asked for, as the rooms below take it."""
        from ckptools.contents.selection import Selection

        return Selection(tuple(self.filter or ()), tuple(self.exclude or ()), self.section or "")


ALL_KEYS = SelectionOptions()


@dataclass(frozen=True)
class RowOptions:
    """Which rows of a table are shown, and in which order."""

    sort: str | None = option(
        None,
        "Sort by this column: names from a to z, numbers from the largest; -COLUMN the other way.",
        metavar="COLUMN",
    )
    limit: int | None = option(None, "Show so many rows; 0 for all. [default: what fits a terminal, all when piped]")

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 0:
            raise UsageError(None, f"--limit {self.limit}: 0 is for all")


IN_ORDER = RowOptions()


def arranged(rows: Rows[Row], how: RowOptions) -> Rows[Row]:
    """The rows that are shown, in the order that was asked for: by names from a to z, by numbers from the largest.

    Raises:
        UsageError: the rows have no such column.
    """
    by = (how.sort or "").removeprefix("-").replace("-", "_")
    if by and rows:
        known = record_fields(rows[0]) or ()
        if by not in known:
            raise UsageError(None, f"--sort {how.sort}: there is no such column; they are {', '.join(known)}")
        numbers = any(isinstance(getattr(row, by), (int, float)) for row in rows)
        rows = rows.sort(by, reverse=numbers != str(how.sort).startswith("-"))
    return rows[: how.limit] if how.limit else rows
