"""What `doctor` found as text: a line per question, and its evidence below."""

from __future__ import annotations

from collections.abc import Iterator

from ckptools.model.diagnosis import Diagnosis, Finding
from ckptools.text import clip_middle, printable
from ckptools.views.problems import MAX_LINE
from ckptools.views.tables import PIPE, Screen, wrapped

WORDS = {True: "ok", False: "BAD", None: "-"}


def diagnosis_text(found: Diagnosis, screen: Screen = PIPE) -> str:
    """Each question with its answer, and below it what says so; then what to type next."""
    questions = max((len(row.question) for row in found.rows), default=0)
    lines = [line for row in found.rows for line in _lines(row, questions, screen)]
    # A command is to be copied, so that it is never wrapped.
    following = ["", "next:", *(f"  {printable(command)}" for command in found.next)] if found.next else []
    return "\n".join([*wrapped("", printable(str(found.path)), screen), "", *lines, *following])


def _lines(row: Finding, width: int, screen: Screen) -> Iterator[str]:
    first = f"{WORDS[row.ok]:3}  {printable(row.question).ljust(width)}  "
    yield from wrapped(first, clip_middle(printable(row.answer), MAX_LINE), screen)
    yield from wrapped("     ", clip_middle(printable(row.evidence), MAX_LINE), screen)
