"""The page of a record, which each record fills in one method: lines, incidents and tables, as text for a screen.

`Page` of `html.py` makes HTML of the same page for a notebook; commands do not import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckptools.display.screen import PIPE, Mark, Screen, in_roles, mark_of, painted
from ckptools.display.tables import Column, incident_lines, table, verdict_lines, wrapped
from ckptools.model.incidents import Cause, Consequence
from ckptools.model.records import Rows
from ckptools.model.verdict import Verdict
from ckptools.option import in_python
from ckptools.text import printable

MOST_LINES = 14
"""Most lines of a short table on a terminal, so that the lines above it stay on screen."""

FEWEST_ROWS = 3
"""Fewest rows of a short table on a terminal, however many lines each takes."""


class ScreenPage:
    """Collects the lines of a page, cut to a screen."""

    def __init__(self, screen: Screen = PIPE) -> None:
        self.screen = screen
        self._lines: list[str] = []
        self._gap = False

    def line(self, text: str, mark: Mark = "", label: str = "", label_mark: Mark = "heading") -> None:
        """Add a sentence behind a label; the marks colour them."""
        self._add(wrapped(printable(label), printable(text), self.screen, label_mark, mark))

    def lines(self, texts: Iterable[str]) -> None:
        """Add lines that are never wrapped, such as commands, so that users can copy them."""
        self._add([in_roles(printable(text), self.screen.color) for text in texts])

    def verdict(self, verdict: Verdict) -> None:
        """Add the headline of a verdict, and its remark."""
        self._add(verdict_lines(verdict, self.screen))

    def incidents(self, causes: Sequence[Cause], consequences: Sequence[Consequence]) -> None:
        """Add the incidents: culprit, evidence, next step; then the consequences of missing files."""
        self._add(incident_lines(causes, consequences, self.screen, self.screen.rows))

    def table(
        self, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, opened: bool = False
    ) -> None:
        """Add a table without its title; nothing if it is not `opened`, as a screen has no folds."""
        self._add(table(columns, rows, self.screen) if opened else [])

    def short_table(self, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Add a title and a table, on a terminal only as many rows as fit on a part of it."""
        lines = table(columns, rows, self.screen)
        if self.screen.rows is not None:
            for count in range(min(MOST_LINES - 3, self.screen.rows), FEWEST_ROWS - 1, -1):
                lines = table(columns, rows, self.screen._replace(rows=count))
                if len(lines) <= MOST_LINES:
                    break
        self._add([painted(printable(title), "heading", self.screen.color), *lines])

    def subjects(self, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
        """Add a line for each row of subject, verdict and detail, which is never cut; without the title."""
        width = max((len(subject) for subject, _, _ in rows), default=0)
        widest = max((len(verdict) for _, verdict, _ in rows), default=0)
        for subject, verdict, detail in rows:
            label = f"{subject:{width}}  {verdict:{widest}}  "
            first, *rest = wrapped(label, printable(detail), self.screen, mark="values")
            behind = first.removeprefix(f"{subject:{width}}  {verdict}")
            shown = painted(verdict, mark_of(verdict), self.screen.color)
            self._add([f"{subject:{width}}  {shown}{behind}", *rest])

    def gap(self) -> None:
        """Leave a blank line between the lines above and the next line, if there are both."""
        self._gap = True

    def text(self) -> str:
        """Return the finished text."""
        return "\n".join(self._lines)

    def _add(self, lines: list[str]) -> None:
        self._lines += ["", *lines] if lines and self._lines and self._gap else lines
        self._gap = self._gap and not lines


class PagedRecord:
    """What a feature returns: its page is what its command prints and a notebook shows."""

    rows: Rows[Any]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a plain dict per row, for `pandas.DataFrame`."""
        return self.rows.to_dicts()

    def _fill(self, page: ScreenPage) -> None:
        raise NotImplementedError

    @in_python
    def __str__(self) -> str:
        """The text that the command prints, with options in Python's words."""
        return page_text(self)


def page_text(record: PagedRecord, screen: Screen = PIPE) -> str:
    """Render the page of a record as text, cut to a screen."""
    page = ScreenPage(screen)
    record._fill(page)
    return page.text()
