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
    """The answer to one question, with its evidence; `ok` is None if it is unknown, or was not asked."""

    question: str
    ok: bool | None
    answer: str
    evidence: str

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
        return f"{clip_middle(str(self.path), 60)}: {f'BAD: {few(wrong)}' if wrong else 'nothing wrong was found'}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per question, for `pandas.DataFrame` and the like."""
        return self.rows.to_dicts()
