"""Tables of text for terminals and pipes: cells are escaped, fitted and painted here, and tabulate writes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Literal, NamedTuple

from ckptools.display.palette import Mark, mark_of, painted
from ckptools.text import clip_middle, clip_name, printable

GAP = 2
"""Blanks between the columns of tabulate's `plain` format."""
NARROWEST = 8
"""A column is never made narrower than this; a screen that is narrower still wraps."""
NARROW_TEXT = 24
"""Texts are made so narrow before any name is cut."""
NARROWEST_BESIDE_NAME = 11
"""Texts and long names are made so narrow before a name of `NARROW_TEXT` characters or fewer is broken."""
NARROWEST_TEXT = 20
BELOW = "    "
"""A sentence has at least so many characters behind its label; else it goes on below it, after these blanks."""
MOST_LINES = 12
"""Lines that a cell goes on in."""
WIDEST_TITLE = 40
"""A title may be the name of a hyperparameter, which a file can make as long as it likes."""
NAME_ROOM = 30
"""A column that may be left out is, if names would have fewer characters than this."""
FEWEST_ALIKE = 3
"""In so many rows a screen says only once what all of them say."""
SHORTEST_PREFIX = 6
"""Characters of a prefix of names that is worth a line of its own."""


class Screen(NamedTuple):
    """What output is fitted to: characters per line and rows per table, of which a pipe limits neither; its colour.

    The rows are `limited` where the user gave their number.
    """

    width: int | None = None
    rows: int | None = None
    color: bool = False
    limited: bool = False


PIPE = Screen()

Role = Literal["text", "name", "number", "verdict", "provenance"]
"""What a column holds. Numbers are aligned right and never cut; names lose their middle before they take a second line;
verdicts and statuses are painted by their words; provenance, such as a time, is an aside and never cut."""


class Column(NamedTuple):
    """A column of a table: its heading, and what it holds.

    A screen that is too narrow leaves out the columns with the lowest `keep` first, those with 9 never.
    """

    title: str
    role: Role = "text"
    keep: int = 9


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], screen: Screen = PIPE) -> list[str]:
    """The lines of a table: titles, dashes, rows. None where there are no rows.

    A screen says only once what all rows have in common: the beginning of their names, and a column with one text.
    Where it is too narrow, names lose their middle as long as all of them stay distinct; other texts, and names that
    would not, go on in the line below. Numbers are never cut.
    """
    if not rows:
        return []
    cells = [[printable(cell) for cell in row] for row in rows]
    common = ""
    if screen.width is not None:
        columns, cells, common = _condensed(columns, cells)
        columns, cells = _with_room(columns, cells, screen.width)
    kept = cells if screen.rows is None else cells[: screen.rows]
    titles = [clip_middle(printable(c.title), WIDEST_TITLE) for c in columns]
    widths = _widths(columns, [titles, *kept], screen.width)
    by_column = [
        _painted(column, _laid_out(column, width, texts), screen.color)
        for column, width, *texts in zip(columns, widths, titles, *kept, strict=True)
    ]
    laid_out = list(zip(*by_column, strict=True))
    dashes = [[painted("-" * width, "dim", screen.color)] for width in widths]
    lines = [line for row in (laid_out[0], dashes, *laid_out[1:]) for line in _lines_of(row)]
    shown = tabulated(columns, lines, "plain").split("\n")
    left = len(rows) - len(kept)
    every = "--limit 0 shows all" if screen.limited else "all of them when piped, as in | less"
    more = [f"{left} more; {every}"] if left else []
    return [*wrapped("", common, screen, mark="dim"), *shown, *more] if common else [*shown, *more]


def _condensed(columns: Sequence[Column], cells: list[list[str]]) -> tuple[Sequence[Column], list[list[str]], str]:
    """Columns and cells without what all rows have in common, and that in words; the first column stays."""
    if len(cells) < FEWEST_ALIKE:
        return columns, cells, ""
    plain = [n > 0 and column.role in ("text", "number") for n, column in enumerate(columns)]
    alike = [one and len({row[n] for row in cells}) == 1 for n, one in enumerate(plain)]
    said = ", ".join(f"{c.title} {text}" for c, text in compress(zip(columns, cells[0], strict=True), alike) if text)
    words = [f"in every row: {said}"] if said else []
    for n, column in enumerate(columns):
        prefix = _common_prefix([row[n] for row in cells]) if column.role == "name" else ""
        if prefix:
            cells = [[*row[:n], row[n][len(prefix) :], *row[n + 1 :]] for row in cells]
            words.insert(0, f"each {column.title} begins with {prefix}")
    shown = [not same for same in alike]
    return list(compress(columns, shown)), [list(compress(row, shown)) for row in cells], "; ".join(words)


def _with_room(
    columns: Sequence[Column], cells: list[list[str]], width: int
) -> tuple[Sequence[Column], list[list[str]]]:
    """Columns and cells without those columns that a screen has no room for."""
    needed = [max(len(column.title), *map(len, texts)) for column, *texts in zip(columns, *cells, strict=True)]
    needed = [min(n, NAME_ROOM) if c.role == "name" else n for n, c in zip(needed, columns, strict=True)]
    kept = list(range(len(columns)))
    while sum(needed[n] + GAP for n in kept) - GAP > width:
        least = min(kept, key=lambda n: columns[n].keep)
        if columns[least].keep == Column("").keep:
            break
        kept.remove(least)
    return [columns[n] for n in kept], [[row[n] for n in kept] for row in cells]


def _common_prefix(names: Sequence[str]) -> str:
    """What names begin with, up to a dot, if all have it and more behind it: `model.layers.`; "" if it is short."""
    first, last = min(names), max(names)
    shared = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    prefix = first[: first.rfind(".", 0, min(shared, len(first) - 1)) + 1]
    return prefix if len(prefix) >= SHORTEST_PREFIX else ""


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Width of each column: texts, which go on below, and then names are made narrower until the table fits."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is None:
        return widths
    excess = sum(widths) + GAP * (len(widths) - 1) - width
    texts = [n for n, column in enumerate(columns) if column.role in ("text", "verdict")]
    names = [n for n, column in enumerate(columns) if column.role == "name"]
    long = [n for n in names if widths[n] > NARROW_TEXT]
    passes = ((texts, NARROW_TEXT), ([*texts, *long], NARROWEST_BESIDE_NAME), ([*texts, *names], NARROWEST))
    for soft, least in passes:
        while excess > 0 and soft:
            widest = max(soft, key=lambda n: widths[n])
            if widths[widest] <= least:
                break
            others = [widths[n] for n in soft if n != widest]
            step = min(excess, max(widths[widest] - max([*others, least]), 1))
            widths[widest] -= step
            excess -= step
    return widths


def _laid_out(column: Column, width: int, cells: Sequence[str]) -> list[list[str]]:
    """The lines of each cell of a column, its title first."""
    if column.role == "number":
        return [[cell] for cell in cells]
    if column.role == "name":
        for cut in (clip_name, clip_middle):
            shown = [cut(cell, width) for cell in cells[1:]]
            if len(set(shown)) == len(set(cells[1:])):
                return [[clip_middle(cells[0], width)], *([cell] for cell in shown)]
    return [broken(clip_middle(cell, MOST_LINES * width), width) for cell in cells]


def _painted(column: Column, cells: list[list[str]], color: bool) -> list[list[str]]:
    """The cells of a column in their colours, its title first."""
    if not color:
        return cells
    plain: Mark = "dim" if column.role == "provenance" else ""
    marks = [mark_of(" ".join(cell)) if column.role == "verdict" else plain for cell in cells[1:]]
    return [[painted(line, mark) for line in cell] for cell, mark in zip(cells, ["heading", *marks], strict=True)]


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
    aligned = ["right" if c.role == "number" else "left" for c in columns]
    return str(tabulate(lines, titles, **how, colalign=aligned))


def wrapped(first: str, text: str, screen: Screen, label: Mark = "", mark: Mark = "") -> list[str]:
    """The lines of a sentence behind a label; what a screen has no room for goes on below it, indented.

    `label` and `mark` are those of the label and of the sentence.
    """
    room = (screen.width or 0) - len(first)
    if screen.width is None or len(text) <= room:
        return [f"{painted(first, label, screen.color)}{painted(text, mark, screen.color)}".rstrip()]
    if room < NARROWEST_TEXT:  # the label has lines of its own
        inside = screen.width - len(BELOW)
        below = [f"{BELOW}{painted(piece, mark, screen.color)}" for piece in broken(text, inside)]
        return [*(painted(line, label, screen.color) for line in broken(first.rstrip(), screen.width)), *below]
    pieces = broken(text, room)
    starts = [painted(first, label, screen.color), *[" " * len(first)] * (len(pieces) - 1)]
    # A word that is cut leaves the blank before it at the end of its line.
    return [
        f"{start}{painted(piece, mark, screen.color)}".rstrip() for start, piece in zip(starts, pieces, strict=True)
    ]


def broken(text: str, width: int) -> list[str]:
    """A text in lines of at most `width` characters; a name that is too long for one goes on behind a dot of it."""
    if len(text) <= width:
        return [text]
    from ckptools.display.line_breaks import LineBreaks

    return LineBreaks(width).wrap(text) or [""]
