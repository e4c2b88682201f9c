"""A map of ranks: a cell for each rank in the colour of its state, two cells in a character if there are many."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip

from ckptools.browse.row_list import RowList
from ckptools.pictures.rank_map import STATES, Grouping, RankCell, State
from ckptools.text import clip, named_ranks, plural

COLOURS: dict[State, str] = {
    "fine": "#5fafff",
    "looked at": "#767676",
    "other": "#ffaf00",
    "odd": "#ffff5f",
    "values": "#ff8787",
    "step": "#af5fff",
    "cut": "#ff5fd7",
    "missing": "#ff5f5f",
}
"""Colour of a cell by the state of its rank; black is readable on each, and each is seen on black and on white."""

READ = "#afd7d7"
"""Colour of a rank that was read, and is not compared yet."""

MOST_ROWS = 8
"""At most this many rows of wide cells are drawn; with more, cells are as small as possible."""

LABEL = 5
"""Columns for the number of the first rank in a row."""

WIDE = 3
"""Columns of a wide cell, which has room for the letter of its state."""

HALVES = 2
"""Small cells in a character, one above the other; without colour it is one."""


class Arrangement(NamedTuple):
    """How cells are arranged on a screen.

    Attributes:
        rows: the cells of each row; an empty row is a gap between blocks of the device mesh.
        group: cells between two gaps in a row.
        wide: columns of a cell.
        tall: cells in a character, one above the other.
    """

    rows: tuple[range, ...]
    group: int
    wide: int
    tall: int

    @property
    def height(self) -> int:
        """Lines of the screen that the cells need."""
        return -(-len(self.rows) // self.tall)

    def column(self, place: int) -> int:
        """First column of a cell, given its place in its row."""
        return LABEL + place * self.wide + place // self.group

    def at(self, x: int, y: int) -> list[int]:
        """The cells drawn at a column and a line, the upper one first; none in a gap."""
        rows = self.rows[y * self.tall : (y + 1) * self.tall]
        return [n for row in rows for place, n in enumerate(row) if 0 <= x - self.column(place) < self.wide]

    def place_of(self, cell: int) -> tuple[int, int]:
        """Row of a cell, and its place in the row."""
        return next((y, cell - row.start) for y, row in enumerate(self.rows) if cell in row)


def arranged(count: int, how: Grouping, width: int, color: bool) -> Arrangement:
    """Arrange cells by the device mesh: wide ones with letters if they fit `MOST_ROWS`, else the smallest."""
    room = width - LABEL
    small = HALVES if color else 1
    for wide, tall in ((WIDE, 1), (1, small)):
        groups = max((room + 1) // (wide * how.group + 1), 1)
        largest = how.group << (
            groups.bit_length() - 1
        )  # so that rows of a mesh of powers of two stay below each other
        across = min(how.across, largest)
        while -(-count // across) > MOST_ROWS * tall and across * 2 <= largest:
            across *= 2
        if wide == 1 or (-(-count // across) <= MOST_ROWS and across * wide <= room):
            break
    rows: list[range] = []
    for start in range(0, count, across):
        gap = start and start % how.block == 0 and how.block % across == 0
        rows += [range(0)] * bool(gap) + [range(start, min(start + across, count))]
    if len(rows) > MOST_ROWS * tall:
        rows = [row for row in rows if row]
    return Arrangement(tuple(rows), how.group, wide, tall)


class RankMap(RowList):
    """The cells of all ranks, and a legend below; the cursor is on a cell."""

    DEFAULT_CSS = "RankMap { height: auto; max-height: 100%; }"

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.cells: Sequence[RankCell] = ()
        self.how = Grouping(1, 1, 1)
        self.kept: Collection[int] = ()
        self.read: Collection[int | None] = ()
        self.arranged = arranged(0, self.how, LABEL + 1, True)
        self.legend: list[list[Segment]] = []

    def show_ranks(self, cells: Sequence[RankCell], how: Grouping, kept: Collection[int], cursor: int) -> None:
        """Show a cell for each rank; cells that are not `kept` are left blank, and the cursor skips them."""
        self.cells, self.how, self.kept = cells, how, kept
        self.read = ()
        self.refit()
        self.go(cursor if cursor in kept else min(kept, default=0))
        self.post_message(self.Moved(self))

    def show_read(self, read: Collection[int | None]) -> None:
        """Colour the ranks that have been read so far."""
        if read != self.read:
            self.read = read
            self.refit()

    def refit(self) -> None:
        """Arrange the cells for the width."""
        width = max(self.size.width, LABEL + 1)
        self.arranged = arranged(len(self.cells), self.how, width, not self.app.no_color)
        self.legend = self._legend_lines(width)
        lines = self.arranged.height + len(self.legend)
        self.virtual_size = Size(width, lines)
        self.styles.height = lines
        self.refresh()

    def on_resize(self) -> None:
        """Arrange the cells for the new width."""
        self.refit()

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _colour(self, n: int) -> str:
        cell = self.cells[n]
        return READ if cell.state == "looked at" and cell.rank in self.read else COLOURS[cell.state]

    def _letter(self, n: int) -> str:
        """The letter of a cell's state; without colour, and where it is hidden, a cell has a dot."""
        letter = STATES[self.cells[n].state].letter if n in self.kept else "."
        return letter or ("." if self.app.no_color else " ")

    def _legend(self) -> Iterator[tuple[str, str, str]]:
        """Yield the states in the map, the worst first: colour, letter, and the ranks or their number."""
        for state in reversed(STATES):
            cells = [cell for cell in self.cells if cell.state == state]
            read = [cell for cell in cells if state == "looked at" and cell.rank in self.read]
            if read:
                yield READ, " ", f"read, not compared yet: {plural(len(read), 'rank')}"
            ranks = [cell.rank for cell in cells if cell.rank is not None and cell not in read]
            files = sum(cell.rank is None for cell in cells)
            counted = state in ("fine", "looked at")
            found = [plural(len(ranks), "rank") if counted else named_ranks(ranks)] if ranks else []
            found += [plural(files, "file") + (" of no rank" if ranks else "")] if files else []
            if found:
                yield COLOURS[state], STATES[state].letter or " ", f"{STATES[state].means}: {', '.join(found)}"

    def _legend_lines(self, width: int) -> list[list[Segment]]:
        """Fill lines with the legend, each state after its colour and letter."""
        lines: list[list[Segment]] = []
        used = width
        for colour, letter, words in self._legend():
            words = clip(words, max(width - LABEL - WIDE - 3, 8))
            if used + WIDE + len(words) + 3 > width:
                lines.append([Segment(" " * LABEL, self.rich_style)])
                used = LABEL
            swatch = self.rich_style if self.app.no_color else _on(colour)
            lines[-1] += [Segment(f" {letter} ", swatch), Segment(f" {words}  ", self.rich_style)]
            used += WIDE + len(words) + 3
        return lines

    def render_line(self, y: int) -> Strip:
        """Render line `y` of the visible part: cells, or a line of the legend."""
        width, n = self.scrollable_content_region.width, y + self.scroll_offset.y
        if n < self.arranged.height:
            return Strip(list(self._cells(n))).adjust_cell_length(width, self.rich_style)
        at = n - self.arranged.height
        line = self.legend[at] if at < len(self.legend) else []
        return Strip(line).adjust_cell_length(width, self.rich_style)

    def _cells(self, n: int) -> Iterator[Segment]:
        how = self.arranged
        rows = how.rows[n * how.tall : (n + 1) * how.tall]
        first = next((self.cells[row.start].rank for row in rows if row), None)
        dim = self.style_of("dim")
        yield Segment(f"{'' if first is None else first:>{LABEL - 1}} ", dim)
        for place in range(max(map(len, rows))):
            if place and place % how.group == 0:
                yield Segment(" ", self.rich_style)
            pair = [row[place] if place < len(row) else None for row in rows]
            yield self._wide(pair[0]) if how.tall == 1 else self._halves(pair)

    def _wide(self, n: int | None) -> Segment:
        """A cell with the letter of its state; the one under the cursor is in brackets, a small one is `@`."""
        at_cursor = n == self.cursor
        if n is None:
            return Segment(" " * self.arranged.wide, self.rich_style)
        letter = self._letter(n)
        small = self.arranged.wide == 1
        text = ("@" if at_cursor else letter) if small else f"[{letter}]" if at_cursor else f" {letter} "
        if n not in self.kept or self.app.no_color:
            return Segment(text, self.style_of("dim" if n not in self.kept else "", at_cursor and small))
        return Segment(text, _on(self._colour(n)) + Style(bold=at_cursor))

    def _halves(self, pair: Sequence[int | None]) -> Segment:
        """Two cells, one above the other, as an upper half block; the one under the cursor has the colour of text."""
        upper, lower = (self._of_half(n) for n in (*pair, None)[:HALVES])
        if upper is None and lower is None:
            return Segment(" ", self.rich_style)
        if upper is None or lower is None:
            block, colour = ("▀", upper) if lower is None else ("▄", lower)
            return Segment(block, self.rich_style + Style(color=colour))
        return Segment("▀", Style(color=upper, bgcolor=lower))

    def _of_half(self, n: int | None) -> str | None:
        if n is not None and n == self.cursor:
            ink = self.rich_style.color
            return ink.name if ink is not None else "default"
        return self._colour(n) if n is not None and n in self.kept else None

    # -- keys and mouse -----------------------------------------------------------------------------------------------

    def go(self, n: int) -> None:
        """Move the cursor to a cell, and scroll it into view."""
        kept = sorted(self.kept)
        self.cursor = 0 if not kept else kept[-1] if n < 0 else n if n in self.kept else kept[0]
        if self.cells:
            row, _ = self.arranged.place_of(self.cursor)
            self.scroll_to_region(Region(0, row // self.arranged.tall, 1, 1), animate=False, force=True, immediate=True)

    def action_move(self, by: int) -> None:
        """Move the cursor to the nearest cell in a row above or below."""
        if not self.cells:
            return
        row, place = self.arranged.place_of(self.cursor)
        beyond = self.arranged.rows[row + 1 :] if by > 0 else self.arranged.rows[:row][::-1]
        for cells in beyond:
            kept = [(abs(x - place), n) for x, n in enumerate(cells) if n in self.kept]
            if kept:
                self.go(min(kept)[1])
                return

    def action_right(self) -> None:
        """Move the cursor to the next cell."""
        self.go(min((n for n in self.kept if n > self.cursor), default=self.cursor))

    def action_left(self) -> None:
        """Move the cursor to the previous cell."""
        self.go(max((n for n in self.kept if n < self.cursor), default=self.cursor))

    def row_at(self, x: int, y: int) -> int | None:
        """The cell drawn at a position; of two in a character the one after the cursor's, so that each can be had."""
        found = [n for n in self.arranged.at(x, y + self.scroll_offset.y) if n in self.kept]
        return next((n for n in found if self.cursor in found and n > self.cursor), found[0] if found else None)


def _on(colour: str) -> Style:
    return Style(color="#000000", bgcolor=colour)
