"""Printing the answer of a command: as text, as one JSON object, or as a JSON object per row."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptools.cli.printing import show
from ckptools.cli.terminal import screen
from ckptools.errors import UsageError
from ckptools.option import option
from ckptools.text import encodable

if TYPE_CHECKING:
    from ckptools.model.rows import Rows
    from ckptools.views.tables import Screen


@dataclass(frozen=True)
class AnswerOptions:
    """In which form an answer is printed."""

    json: bool = option(False, "Print one JSON object for other programs.")
    jsonl: bool = option(False, "Print one JSON object per row, each on its line.")


AS_TEXT = AnswerOptions()


def show_answer(
    form: AnswerOptions,
    command: str,
    answer: Any,
    rows: Rows[Any],
    text: Callable[[Any, Screen], str],
) -> None:
    """Print an answer in the form that was asked for.

    Args:
        form: which one.
        command: name of the command, which is also that of its schema and of the words that have a colour.
        answer: a record.
        rows: those of its rows that `--jsonl` prints.
        text: the answer as text, cut to a screen.

    Raises:
        UsageError: two forms were asked for.
    """
    if form.json and form.jsonl:
        raise UsageError(None, "--json and --jsonl are two forms of one answer: give one of them")
    if not (form.json or form.jsonl):
        show(encodable(text(answer, screen()), sys.stdout.encoding), command)
        return
    from ckptools.views.answers import answer_json, json_lines

    if form.json:
        show(answer_json(command, answer))
    elif rows:
        show("\n".join(json_lines(rows)))
