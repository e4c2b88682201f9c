"""Tables of text for terminals and pipes: cells are escaped and fitted to the screen here, and tabulate writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckptools.text import clip_middle, printable

GAP = 2
"""Blanks between the columns of tabulate's `plain` format."""
NARROWEST = 10
"""A column is never made narrower than this; a screen that is narrower still wraps."""
MOST_LINES = 12
"""Lines that a cell goes on in."""
WIDEST_TITLE = 40
"""A title may be the name of a hyperparameter, which a file can make as long as it likes."""


class Screen(NamedTuple):
    """The size that output is cut to: characters per line, rows per table; a pipe has neither limit."""

    width: int | None = None
    rows: int | None = None


PIPE = Screen()


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: its heading.
        right: it holds numbers, which are aligned right and never cut.
        name: it holds names, which lose their middle before they take a second line.
        verdict: it holds verdicts or statuses, which a page colours by their words.
    """

    title: str
    right: bool = False
    name: bool = False
    verdict: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], screen: Screen = PIPE) -> list[str]:
    """The lines of a table: titles, dashes, rows. None where there are no rows.

    Where the screen is too narrow, names lose their middle as long as all of them stay distinct; other texts, and names
    that would not, go on in the line below. Numbers are never cut.
    """
    if not rows:
        return []
    kept = rows if screen.rows is None else rows[: screen.rows]
    titles = [clip_middle(printable(c.title), WIDEST_TITLE) for c in columns]
    cells = [titles, *([printable(cell) for cell in row] for row in kept)]
    widths = _widths(columns, cells, screen.width)
    by_column = map(_laid_out, columns, widths, zip(*cells, strict=True))
    laid_out = list(zip(*by_column, strict=True))
    dashes = ["-" * width for width in widths]
    lines = [line for row in (laid_out[0], [[dash] for dash in dashes], *laid_out[1:]) for line in _lines_of(row)]
    shown = tabulated(columns, lines, "plain").split("\n")
    left = len(rows) - len(kept)
    return [*shown, f"{left} more; all of them when piped, as in | less"] if left else shown


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Width of each column, the widest of texts and names made narrower until the table fits."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is None:
        return widths
    excess = sum(widths) + GAP * (len(widths) - 1) - width
    soft = [n for n, column in enumerate(columns) if not column.right]
    while excess > 0 and soft:
        widest = max(soft, key=lambda n: widths[n])
        if widths[widest] <= NARROWEST:
            break
        others = [widths[n] for n in soft if n != widest]
        step = min(excess, max(widths[widest] - max([*others, NARROWEST]), 1))
        widths[widest] -= step
        excess -= step
    return widths


def _laid_out(column: Column, width: int, cells: Sequence[str]) -> list[list[str]]:
    """The lines of each cell of a column, its title first."""
    if column.right:
        return [[cell] for cell in cells]
    if column.name:
        cut = [clip_middle(cell, width) for cell in cells[1:]]
        if len(set(cut)) == len(set(cells[1:])):
            return [[clip_middle(cells[0], width)], *([cell] for cell in cut)]
    return [_pieces(cell, width) for cell in cells]


def _pieces(text: str, width: int) -> list[str]:
    """A text in lines of at most `width` characters; one that a file made very long loses its middle."""
    if len(text) <= width:
        return [text]
    from textwrap import wrap

    return wrap(clip_middle(text, MOST_LINES * width), width) or [""]


def _lines_of(row: Sequence[Sequence[str]]) -> list[list[str]]:
    height = max(map(len, row))
    return [[cell[n] if n < len(cell) else "" for cell in row] for n in range(height)]


def tabulated(
    columns: Sequence[Column], lines: Sequence[Sequence[str]], table_format: str, titles: Sequence[str] = ()
) -> str:
    """Write cells that are escaped and cut in one of tabulate's formats; a cell is never taken for a number."""
    from tabulate import tabulate  # type: ignore[import-untyped]

    how = {"tablefmt": table_format, "disable_numparse": True, "preserve_whitespace": True}
    if table_format == "tsv":  # for programs: no padding
        return str(tabulate(lines, titles, **how, stralign=None, numalign=None))
    return str(tabulate(lines, titles, **how, colalign=["right" if c.right else "left" for c in columns]))


def wrapped(first: str, text: str, screen: Screen) -> list[str]:
    """The lines of a sentence behind a label; what a screen has no room for goes on below it, indented."""
    room = (screen.width or 0) - len(first)
    if screen.width is None or room < 20 or len(text) <= room:
        return [f"{first}{text}".rstrip()]
    from textwrap import wrap

    pieces = wrap(text, room)
    # A word that is cut leaves the blank before it at the end of its line.
    return [f"{first if i == 0 else ' ' * len(first)}{piece}".rstrip() for i, piece in enumerate(pieces)]
