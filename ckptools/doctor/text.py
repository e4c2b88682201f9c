"""The record of `doctor` as text, a line per question and its evidence below, and as HTML."""

from __future__ import annotations

from collections.abc import Iterator

from ckptools.display.lines import MAX_LINE
from ckptools.display.page import DICTS, Page
from ckptools.display.palette import Mark, mark_of, painted
from ckptools.display.tables import PIPE, Column, Screen, wrapped
from ckptools.doctor.record import Diagnosis, Finding
from ckptools.text import clip_middle, plural, printable

COLUMNS = (Column("question"), Column("", "verdict"), Column("answer"), Column("evidence"))

WORDS = {True: "ok", False: "BAD", None: "-"}


def _word(row: Finding) -> str:
    return "warn" if row.doubtful else WORDS[row.ok]


def diagnosis_text(found: Diagnosis, screen: Screen = PIPE) -> str:
    """Render each question with its answer, the evidence below it, then the next commands."""
    questions = max((len(row.question) for row in found.rows), default=0)
    lines = [line for row in found.rows for line in _lines(row, questions, screen)]
    # A command is never wrapped, so that it can be copied.
    following = [f"  {printable(command)}" for command in found.next]
    following = ["", painted("next:", "heading", screen.color), *following] if following else []
    return "\n".join([*wrapped("", printable(str(found.path)), screen, mark="heading"), "", *lines, *following])


def _lines(row: Finding, width: int, screen: Screen) -> Iterator[str]:
    first = f"{_word(row):4} {printable(row.question).ljust(width)}  "
    mark: Mark = "heading" if _word(row) == WORDS[None] else mark_of(_word(row))
    yield from wrapped(first, clip_middle(printable(row.answer), MAX_LINE), screen, label=mark)
    yield from wrapped("     ", clip_middle(printable(row.evidence), MAX_LINE), screen, mark="dim")


def diagnosis_html(found: Diagnosis) -> str:
    """Render each question with its answer, and the next commands, as a page."""
    page = Page(DICTS)
    page.line(str(found.path))
    rows = [(row.question, _word(row), row.answer, row.evidence) for row in found.rows]
    page.table(plural(len(rows), "question"), COLUMNS, rows, opened=True)
    if found.next:
        page.line("next:")
        page.lines(found.next)
    return page.html()
