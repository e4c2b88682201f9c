"""A list that draws only its visible rows, so that 100,000 rows cost no more than twenty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ckptools.display.screen import SGR
from ckptools.text import clip

COLOURS = {
    "bad": ("#ff8a80", "#b00020"),
    "warn": ("#ffc473", "#7a4300"), "doubtful": ("#ffc473", "#7a4300"),
    "good": ("#6ee787", "#006b1e"), "sound": ("#6ee787", "#006b1e"),
}  # fmt: skip
"""Colours of each mark on dark and on light, with a contrast of at least 4.5 to 1; near the 16 terminal colours."""

MARKS = tuple(dict.fromkeys((*COLOURS, *SGR)))
_UNDERLINED = Style(underline=True)
MORE = ">"
"""Shown in the last column of a line that continues beyond the screen, as in `less -S`."""


def coloured(selector: str) -> str:
    """Make CSS rules that colour a selector for each mark, on dark and on light."""
    return "".join(
        f"{selector.format(mark=mark, light=light)} {{ color: {colour}; }}\n"
        for mark, colours in COLOURS.items()
        for light, colour in zip(("", ":light"), colours, strict=True)
    )


Line = Sequence[tuple[str, str]]
"""The parts of a row as plain printable text, each with its mark: `bad`, `warn`, `good`, `dim` or ""."""


def text_of(line: Line) -> str:
    """The text of a row without its marks."""
    return "".join(text for text, _ in line)


class RowSource(Protocol):
    """Rows of text; `line` may cut a row to a width."""

    def __len__(self) -> int: ...

    def line(self, n: int, width: int) -> Line:
        """Return the parts of a row."""
        ...


def _cut(line: Line, text: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a row whose text was cut to `text`, with their marks."""
    at = 0
    for part, mark in line:
        if text[at : at + len(part)]:
            yield text[at : at + len(part)], mark
        at += len(part)


class Nothing:
    """A source without rows."""

    def __len__(self) -> int:
        return 0

    def line(self, n: int, width: int) -> Line:
        """Never called: there is no row."""
        raise IndexError(n)


class RowList(ScrollView, can_focus=True):
    """A list of rows with a cursor. Rows are plain text, never parsed as markup."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"row", "row--cursor", *(f"row--{mark}" for mark in MARKS)}

    DEFAULT_CSS = """
    RowList { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; scrollbar-color: $primary; }
    RowList .row--bad, RowList .row--heading, RowList .row--change { text-style: bold; }
    RowList .row--doubtful, RowList .row--sound { text-style: bold; }
    RowList .row--dim { color: $text-muted; }
    RowList .row--cursor { text-style: reverse; }
    """ + coloured("RowList{light} .row--{mark}")

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "down", show=False),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("pagedown,ctrl+f", "page(1)", "page down", show=False),
        Binding("pageup,ctrl+b", "page(-1)", "page up", show=False),
        Binding("home,g", "to(0)", "first", show=False),
        Binding("end,G", "to(-1)", "last", show=False),
        Binding("right,l", "right", "open", show=False),
        Binding("left,h", "left", "close", show=False),
        Binding("enter", "choose", "open", show=False),
    ]

    cursor: reactive[int] = reactive(0)

    class Moved(Message):
        """The cursor moved to another row, or the rows changed."""

        def __init__(self, rows: RowList) -> None:
            super().__init__()
            self.rows = rows

    class Pressed(Message):
        """A key was pressed on the row under the cursor: `choose`, `left` or `right`."""

        def __init__(self, rows: RowList, what: str) -> None:
            super().__init__()
            self.rows, self.what = rows, what

    def __init__(self, id: str, has_cursor: bool = True) -> None:
        super().__init__(id=id)
        self.has_cursor = has_cursor
        self.source: RowSource = Nothing()

    def show(self, source: RowSource, cursor: int = 0) -> None:
        """Show other rows, with the cursor on one of them."""
        self.source = source
        self.refit()
        self.scroll_to(x=0, animate=False)
        self.go(cursor)
        self.post_message(self.Moved(self))

    def refit(self) -> None:
        """Update number and width of the rows from the source."""
        texts = (text_of(self.source.line(n, 0)) for n in range(0 if self.has_cursor else len(self.source)))
        width = max(map(len, texts), default=0)
        self.virtual_size = Size(width, len(self.source))
        self.refresh()

    def go(self, n: int) -> None:
        """Move the cursor to a row, and scroll it into view."""
        last = max(len(self.source) - 1, 0)
        self.cursor = last if n < 0 else min(n, last)
        if self.has_cursor:
            self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False, force=True, immediate=True)
        else:
            self.scroll_to(y=self.cursor, animate=False, immediate=True)

    def watch_cursor(self) -> None:
        """Redraw the rows that the cursor left and entered, and post `Moved`."""
        self.refresh()
        self.post_message(self.Moved(self))

    def render_line(self, y: int) -> Strip:
        """Render line `y` of the visible part."""
        scroll_x, scroll_y = self.scroll_offset
        width, n = self.scrollable_content_region.width, y + scroll_y
        base = self.rich_style
        if n >= len(self.source):
            return Strip.blank(width, base)
        line = self.source.line(n, width)
        text = text_of(line)
        if self.has_cursor:
            text = clip(text, width)
        elif len(text) > scroll_x + width:  # a sign shows that the text, perhaps a number, is cut
            text = f"{text[: scroll_x + width - 1]}{MORE}"
        at_cursor = self.has_cursor and n == self.cursor
        segments = [Segment(part, self.style_of(mark, at_cursor)) for part, mark in _cut(line, text)]
        rest = self.style_of("", at_cursor) if at_cursor and self.has_focus else base
        return Strip(segments).crop_extend(scroll_x, scroll_x + width, rest)

    def style_of(self, mark: str, at_cursor: bool = False) -> Style:
        """The style of a text by its mark; the row of the cursor is reversed if the list has the focus."""
        if at_cursor and self.has_focus:
            return self.rich_style + self.get_component_styles("row--cursor").rich_style
        style = self.rich_style + self.get_component_styles(f"row--{mark}").rich_style if mark else self.rich_style
        return style + _UNDERLINED if at_cursor else style

    # -- mouse --------------------------------------------------------------------------------------------------------

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the row that was clicked; a second click chooses it."""
        at = event.get_content_offset(self)
        n = self.row_at(at.x, at.y) if at is not None and self.has_cursor else None
        if n is not None:
            self.go(n)
            if event.chain == 2:
                self.action_choose()

    def row_at(self, _x: int, y: int) -> int | None:
        """The row drawn at a position, counted from the upper left corner; None if there is none."""
        n = y + self.scroll_offset.y
        return n if n < len(self.source) else None

    def on_resize(self) -> None:
        """Keep the row of the cursor in view."""
        if self.has_cursor:
            self.go(self.cursor)

    # -- keys ---------------------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        """Move the cursor."""
        at = self.cursor if self.has_cursor else self.scroll_offset.y
        self.go(max(at + by, 0))

    def action_page(self, by: int) -> None:
        """Move by the number of visible rows."""
        self.action_move(by * max(self.size.height - 1, 1))

    def action_to(self, n: int) -> None:
        """Move to the first row, or the last."""
        self.go(n)

    def action_right(self) -> None:
        """Unfold the row; in a text, scroll right."""
        if self.has_cursor:
            self.post_message(self.Pressed(self, "right"))
        else:
            self.scroll_relative(x=8, animate=False)

    def action_left(self) -> None:
        """Fold the row; in a text, scroll left."""
        if self.has_cursor or self.scroll_offset.x == 0:
            self.post_message(self.Pressed(self, "left"))
        else:
            self.scroll_relative(x=-8, animate=False)

    def action_choose(self) -> None:
        """Post that Enter was pressed on the row."""
        self.post_message(self.Pressed(self, "choose"))

    def on_focus(self) -> None:
        """Draw the cursor of a focused list."""
        self.refresh()

    def on_blur(self) -> None:
        """Draw the cursor of an unfocused list."""
        self.refresh()
