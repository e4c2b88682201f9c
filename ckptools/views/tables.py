"""Tables of text for terminals and pipes, over strings that are escaped and cut here.

The widths are known by then, so padding is all that is left. Importing tabulate for it would make every `inspect` at
least 18 ms longer, more than Python itself takes to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckptools.text import clip, clip_middle, printable

GAP = 2
NARROWEST = 10
"""A column is never cut below this; a screen that is narrower still wraps."""
WIDEST_TITLE = 40
"""A title may be the name of a hyperparameter, which a file can make as long as it likes."""


class Screen(NamedTuple):
    """The size that output is cut to; a pipe has neither limit.

    Attributes:
        width: characters per line.
        rows: rows per table.
    """

    width: int | None = None
    rows: int | None = None


PIPE = Screen()


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: its heading.
        right: whether it holds numbers, which are aligned right.
        name: whether it holds names, which lose their middle when they are cut; other texts lose their end.
    """

    title: str
    right: bool = False
    name: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], screen: Screen = PIPE) -> list[str]:
    """The lines of a table, cut to the screen: titles, dashes, rows. None where there are no rows."""
    if not rows:
        return []
    kept = rows if screen.rows is None else rows[: screen.rows]
    titles = [clip_middle(printable(c.title), WIDEST_TITLE) for c in columns]
    cells = [titles, *([printable(cell) for cell in row] for row in kept)]
    widths = _widths(cells, screen.width)
    cut = [[_cut(c, cell, w) for c, cell, w in zip(columns, row, widths, strict=True)] for row in cells]
    lines = [cut[0], ["-" * w for w in widths], *cut[1:]]
    shown = [(" " * GAP).join(map(_padded, columns, line, widths)).rstrip() for line in lines]
    left = len(rows) - len(kept)
    return [*shown, f"{left} more; all of them when piped, as in | less"] if left else shown


def _widths(cells: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Width of each column, the widest made narrower until the table fits."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is None:
        return widths
    excess = sum(widths) + GAP * (len(widths) - 1) - width
    while excess > 0 and max(widths) > NARROWEST:
        widest = widths.index(max(widths))
        others = [w for i, w in enumerate(widths) if i != widest]
        step = min(excess, max(widths[widest] - max([*others, NARROWEST]), 1))
        widths[widest] -= step
        excess -= step
    return widths


def _padded(column: Column, text: str, width: int) -> str:
    return text.rjust(width) if column.right else text.ljust(width)


def _cut(column: Column, text: str, width: int) -> str:
    return clip_middle(text, width) if column.name else clip(text, width)


def wrapped(first: str, text: str, screen: Screen) -> list[str]:
    """The lines of a sentence behind a label; what a screen has no room for goes on below it, indented."""
    room = (screen.width or 0) - len(first)
    if screen.width is None or room < 20 or len(text) <= room:
        return [f"{first}{text}".rstrip()]
    from textwrap import wrap

    pieces = wrap(text, room)
    # A word that is cut leaves the blank before it at the end of its line.
    return [f"{first if i == 0 else ' ' * len(first)}{piece}".rstrip() for i, piece in enumerate(pieces)]
