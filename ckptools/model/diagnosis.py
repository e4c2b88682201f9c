"""What `doctor` found: an answer to each of the first questions, and what to type next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptools.model.records import displayed
from ckptools.model.rows import Rows
from ckptools.model.verdict import Verdict
from ckptools.text import clip_middle, few


@displayed
@dataclass(frozen=True)
class Finding:
    """The answer to one question.

    Attributes:
        question: what people ask: `whole?`.
        ok: whether the answer is the one that is hoped for; None where it is not known, or was not asked.
        answer: it in a few words.
        evidence: what says so.
    """

    question: str
    ok: bool | None
    answer: str
    evidence: str

    def _told(self) -> str:
        return f"{self.question} {self.answer}"


@displayed
@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a checkpoint, or that nothing is.

    Attributes:
        path: what was looked at.
        ok: whether no answer is a bad one.
        readable: whether it could be opened.
        verdict: on the checkpoint; None where it could not be opened.
        rows: an answer to each question.
        next: commands to type next, at most three.
        seconds: wall time.
    """

    path: Path
    ok: bool
    readable: bool
    verdict: Verdict | None
    rows: Rows[Finding]
    next: tuple[str, ...] = ()
    seconds: float = 0.0

    def _told(self) -> str:
        wrong = [row.question for row in self.rows if row.ok is False]
        return f"{clip_middle(str(self.path), 60)}: {f'BAD: {few(wrong)}' if wrong else 'nothing wrong was found'}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per question, such as pandas takes."""
        return self.rows.to_dicts()
