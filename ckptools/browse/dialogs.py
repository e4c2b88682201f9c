"""Dialogs over the screen: help, a line of input, a plan to confirm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from ckptools.browse.pages import PageRows
from ckptools.browse.row_list import RowList
from ckptools.display.screen import Screen
from ckptools.display.tables import wrapped

HELP = (
    ("arrows, h j k l", "move, close and open; g, G: first and last row"),
    ("Tab, Shift+Tab", "the list or map, and its details; a click chooses a row or a rank"),
    ("1 .. 7", "the tabs; 7 lists the checkpoints of the run"),
    ("Enter", "read a tensor's shards by file, or what each rank has; go to the rank, tensor or file of a problem; "
              "open a checkpoint of the run"),
    ("p", "only keys, ranks and files with problems; Esc shows all"),
    ("/", "filter the keys while you type: a part of a name, or a glob; Esc ends it"),
    ("o", "order of the keys: as saved, size, rms, change"),
    ("u", "show each layer, or fold those that are the same"),
    ("f", "read values of the row's tensors: rms, extremes, histogram"),
    ("e", "read the elements of a slice, such as 0:4,:8"),
    ("c", "with OTHER: read and compare values of the row's tensors"),
    ("r", "read the structure of every rank"),
    ("x", "stop what is being read or written"),
    ("y", "copy the command line that shows the same"),
    ("s", "save the page that report writes"),
    ("w", "consolidate what is selected, after its plan was shown"),
    ("t", "light or dark"),
    ("? and q", "these keys, and leave"),
)  # fmt: skip

MOST_WIDE = 100
"""Widest dialog in columns."""

CSS = f"""
Dialog {{ align: center middle; }}
Dialog > Vertical {{ width: 100%; max-width: {MOST_WIDE}; height: auto; border: round $primary; padding: 0 1;
    background: $surface; }}
Dialog Static {{ height: auto; text-style: bold; }}
Dialog RowList {{ height: auto; max-height: 84vh; }}
Dialog Input, Dialog Input:focus {{ border: none; height: 1; padding: 0; background: $boost; }}
"""


class Dialog(ModalScreen[str | None]):
    """A box over the screen with a title; Esc closes it without a result."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "leave", show=False)]
    DEFAULT_CSS = CSS

    def __init__(self, title: str) -> None:
        super().__init__()
        self.words = title

    def action_leave(self) -> None:
        """Close the dialog."""
        self.dismiss(None)


class TextDialog(Dialog):
    """A dialog with lines of text, wrapped to its width."""

    def wrapped(self, screen: Screen) -> Iterator[str]:
        """Yield the lines for a screen width."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        """Lay out the title and the lines."""
        with Vertical():
            yield Static(self.words, markup=False)
            yield RowList("text", has_cursor=False)

    def on_resize(self) -> None:
        """Show the lines; textual also calls this when the dialog opens."""
        width = min(self.app.size.width, MOST_WIDE) - 5  # borders, padding and the scroll bar
        self.query_one(RowList).show(PageRows(self.wrapped(Screen(width))))
        self.query_one(RowList).focus()


class HelpDialog(TextDialog):
    """Help: the keys and their actions."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark,q,enter", "leave", "leave", show=False)]

    def wrapped(self, screen: Screen) -> Iterator[str]:
        """Yield a line for each key."""
        for keys, text in HELP:
            yield from wrapped(f"{keys:17}", text, screen)


class LineDialog(Dialog):
    """A dialog with a line of input; the result is the text."""

    def __init__(self, title: str, text: str) -> None:
        super().__init__(title)
        self.text = text

    def compose(self) -> ComposeResult:
        """Lay out the title and the input line."""
        with Vertical():
            yield Static(self.words, markup=False)
            yield Input(self.text, id="line")

    def on_mount(self) -> None:
        """Focus the input line."""
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close with the text as the result."""
        event.stop()
        self.dismiss(event.value.strip() or None)


class PlanDialog(TextDialog):
    """A dialog with a plan to read; Enter confirms it, with the result `yes`."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,n", "leave", "leave", show=False)]

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__(title)
        self.lines = lines

    def wrapped(self, screen: Screen) -> Iterator[str]:
        """Yield the lines of the plan."""
        for line in self.lines:
            yield from wrapped("", line, screen)

    def on_row_list_pressed(self, event: RowList.Pressed) -> None:
        """Confirm the plan."""
        event.stop()
        if event.what == "choose":
            self.dismiss("yes")
