"""The record of `doctor`: an answer to each of the first questions, and the next commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptools.model.records import Rows, displayed
from ckptools.model.verdict import Verdict
from ckptools.text import clip_middle, few

WHOLE, VALUES, NEWEST, FACTS, LOADS, IN_STEP = (
    "whole?",
    "bytes and values right?",
    "newest whole here?",
    "do step, name and world size agree?",
    "does it load?",
    "optimizer and scheduler in step?",
)
"""The questions, in their order; the second is asked where every byte is read."""


@displayed
@dataclass(frozen=True)
class Finding:
    """The answer to one question, with its evidence.

    Attributes:
        ok: False where something is wrong; None where that is unknown, was not asked, or is doubtful.
        doubtful: whether there are warnings and no error.
    """

    question: str
    ok: bool | None
    answer: str
    evidence: str
    doubtful: bool = False

    def _summary(self) -> str:
        return f"{self.question} {self.answer}"


@displayed
@dataclass(frozen=True)
class Diagnosis:
    """The state of a checkpoint, question by question.

    Attributes:
        ok: whether no answer is bad.
        readable: whether it could be opened.
        verdict: on the checkpoint; None if it could not be opened.
        next: the next commands, at most three.
        seconds: wall time.
    """

    path: Path
    ok: bool
    readable: bool
    verdict: Verdict | None
    rows: Rows[Finding]
    next: tuple[str, ...] = ()
    seconds: float = 0.0

    def _summary(self) -> str:
        wrong = [row.question for row in self.rows if row.ok is False]
        doubtful = [row.question for row in self.rows if row.doubtful]
        words = f"worth a look: {few(doubtful)}" if doubtful else "nothing wrong was found"
        words = f"BAD: {few(wrong)}" if wrong else words
        return f"{clip_middle(str(self.path), 60)}: {words}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per question, for `pandas.DataFrame` and the like."""
        return self.rows.to_dicts()
