"""What `verify` found: each check with its result, and what all of them together say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckptools.model.problems import Problem
from ckptools.model.records import displayed
from ckptools.model.rows import Rows
from ckptools.model.verdict import Verdict
from ckptools.text import clip_middle, plural

Result = Literal["ok", "FAIL", "warn", "skip"]


@displayed
@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what was looked at, in a few words.
        result: `skip` when there was nothing to look at, or it was not asked for; `detail` says which.
        detail: how much was looked at, or why nothing was; the problems are not repeated in it.
        problems: what is wrong.
    """

    name: str
    result: Result
    detail: str
    problems: tuple[Problem, ...] = ()

    def _told(self) -> str:
        found = f", {plural(len(self.problems), 'problem')}" if self.problems else ""
        return f"{self.name}: {self.result}{found}, {self.detail}"


@displayed
@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        path: what was verified.
        checks: each check's result, in a fixed order.
        verdict: what they come down to.
        ignored: how many problems were left out because their code was to be ignored.
        bytes_read: bytes of tensors that were read for checksums and values.
        seconds: wall time, opening included.
    """

    path: Path
    checks: Rows[Check]
    verdict: Verdict
    ignored: int = 0
    bytes_read: int = 0
    seconds: float = 0.0

    @property
    def problems(self) -> Rows[Problem]:
        """Everything that is wrong, in the order of the checks."""
        return Rows(p for check in self.checks for p in check.problems)

    @property
    def ok(self) -> bool:
        """Whether no check failed; warnings do not count."""
        return not any(check.result == "FAIL" for check in self.checks)

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per check, with its problems, such as pandas takes."""
        return self.checks.to_dicts()

    def _told(self) -> str:
        failed, warned = (sum(c.result == result for c in self.checks) for result in ("FAIL", "warn"))
        found = f"{failed} of {plural(len(self.checks), 'check')} failed" if failed else "no check failed"
        warnings = f", {plural(warned, 'warning')}" if warned else ""
        return f"{clip_middle(self.path.name, 60)}: {found}{warnings}"
