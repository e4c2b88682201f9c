"""A list that draws only the rows that are seen: a hundred thousand cost no more than twenty."""

from __future__ import annotations

from typing import ClassVar, Protocol

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ckptools.text import clip

COLOURS = {"bad": ("#ff8a80", "#b00020"), "warn": ("#ffc473", "#7a4300"), "good": ("#6ee787", "#006b1e")}
"""Of each mark, on dark and on light: at least 4.5 to 1, and red, yellow, green where a terminal has 16 colours."""

MARKS = (*COLOURS, "dim")
_UNDERLINED = Style(underline=True)
MORE = ">"
"""The last column of a line that goes on behind it, as in `less -S`."""


def coloured(selector: str) -> str:
    """Rules of CSS that colour what each mark selects, on dark and on light."""
    return "".join(
        f"{selector.format(mark=mark, light=light)} {{ color: {colour}; }}\n"
        for mark, colours in COLOURS.items()
        for light, colour in zip(("", ":light"), colours, strict=True)
    )


class RowSource(Protocol):
    """Rows of text; `line` gives one, cut to a width if it wants, and its mark: `bad`, `warn`, `good`, `dim` or ""."""

    def __len__(self) -> int: ...

    def line(self, n: int, width: int) -> tuple[str, str]:
        """A row as plain text, safe to print, and its mark."""
        ...


class Nothing:
    """A source without rows."""

    def __len__(self) -> int:
        return 0

    def line(self, n: int, width: int) -> tuple[str, str]:
        """No row is there."""
        raise IndexError(n)


class RowList(ScrollView, can_focus=True):
    """A list of rows with a cursor. What a row says is plain text: no markup is looked for in it."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"row", "row--cursor", *(f"row--{mark}" for mark in MARKS)}

    DEFAULT_CSS = """
    RowList { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; scrollbar-color: $primary; }
    RowList .row--bad { text-style: bold; }
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
        """The cursor came to another row, or the rows changed below it."""

        def __init__(self, rows: RowList) -> None:
            super().__init__()
            self.rows = rows

    class Pressed(Message):
        """A key asks for something of the row under the cursor: `choose`, `left` or `right`."""

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
        """Take the number and width of the rows from the source again."""
        texts = (self.source.line(n, 0)[0] for n in range(0 if self.has_cursor else len(self.source)))
        width = max(map(len, texts), default=0)
        self.virtual_size = Size(width, len(self.source))
        self.refresh()

    def go(self, n: int) -> None:
        """Put the cursor on a row, and scroll so that it is seen."""
        last = max(len(self.source) - 1, 0)
        self.cursor = last if n < 0 else min(n, last)
        if self.has_cursor:
            self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False, force=True, immediate=True)
        else:
            self.scroll_to(y=self.cursor, animate=False, immediate=True)

    def watch_cursor(self) -> None:
        """Draw the row that the cursor left and the one that it came to, and say so."""
        self.refresh()
        self.post_message(self.Moved(self))

    def render_line(self, y: int) -> Strip:
        """The line `y` of what is seen."""
        scroll_x, scroll_y = self.scroll_offset
        width, n = self.scrollable_content_region.width, y + scroll_y
        base = self.rich_style
        if n >= len(self.source):
            return Strip.blank(width, base)
        text, mark = self.source.line(n, width)
        if self.has_cursor:
            text = clip(text, width)
        elif len(text) > scroll_x + width:  # a text can be moved to the left; without a sign a number would be another
            text = f"{text[: scroll_x + width - 1]}{MORE}"
        style = base + self.get_component_styles(f"row--{mark}").rich_style if mark else base
        if self.has_cursor and n == self.cursor:
            style = (
                base + self.get_component_styles("row--cursor").rich_style if self.has_focus else style + _UNDERLINED
            )
        strip = Strip([Segment(text, style)])
        return strip.crop_extend(scroll_x, scroll_x + width, style if n == self.cursor and self.has_focus else base)

    # -- keys ---------------------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        """Move the cursor."""
        at = self.cursor if self.has_cursor else self.scroll_offset.y
        self.go(max(at + by, 0))

    def action_page(self, by: int) -> None:
        """Move by what is seen."""
        self.action_move(by * max(self.size.height - 1, 1))

    def action_to(self, n: int) -> None:
        """Move to the first row, or the last."""
        self.go(n)

    def action_right(self) -> None:
        """Open the row; in a text, move to the right."""
        if self.has_cursor:
            self.post_message(self.Pressed(self, "right"))
        else:
            self.scroll_relative(x=8, animate=False)

    def action_left(self) -> None:
        """Close the row; in a text, move to the left."""
        if self.has_cursor or self.scroll_offset.x == 0:
            self.post_message(self.Pressed(self, "left"))
        else:
            self.scroll_relative(x=-8, animate=False)

    def action_choose(self) -> None:
        """Ask for what the row leads to."""
        self.post_message(self.Pressed(self, "choose"))

    def on_focus(self) -> None:
        """Draw the cursor as that of the list that keys go to."""
        self.refresh()

    def on_blur(self) -> None:
        """Draw the cursor as that of a list that keys do not go to."""
        self.refresh()
