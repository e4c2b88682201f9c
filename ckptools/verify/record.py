"""The record of `verify`: each check with its result, and the verdict over all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckptools.model.problems import Problem
from ckptools.model.records import Rows, displayed
from ckptools.model.verdict import Verdict
from ckptools.text import clip_middle, plural

Result = Literal["ok", "FAIL", "warn", "skip"]


@displayed
@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        result: `skip` if there was nothing to check, or it was not asked for; `detail` says which.
        detail: how much was checked, or why nothing was; without the problems.
    """

    name: str
    result: Result
    detail: str
    problems: tuple[Problem, ...] = ()

    def _summary(self) -> str:
        found = f", {plural(len(self.problems), 'problem')}" if self.problems else ""
        return f"{self.name}: {self.result}{found}, {self.detail}"


def judged(name: str, problems: Iterable[Problem], detail: str) -> Check:
    """Make a check whose result follows from its problems."""
    found = tuple(problems)
    severities = {p.severity for p in found}
    result: Result = "FAIL" if "error" in severities else "warn" if "warning" in severities else "ok"
    return Check(name, result, detail, found)


def skipped(name: str, why: str) -> Check:
    """Make a check that had nothing to do, or was not asked for."""
    return Check(name, "skip", why)


@displayed
@dataclass(frozen=True)
class Verification:
    """The result of all checks.

    Attributes:
        checks: each check's result, in a fixed order.
        ignored: number of problems left out because their code was ignored.
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
        """All problems in the order of the checks."""
        return Rows(p for check in self.checks for p in check.problems)

    @property
    def ok(self) -> bool:
        """Whether no check failed; warnings do not count."""
        return not any(check.result == "FAIL" for check in self.checks)

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per check, with its problems, for `pandas.DataFrame` and the like."""
        return self.checks.to_dicts()

    def _summary(self) -> str:
        failed, warned = (sum(c.result == result for c in self.checks) for result in ("FAIL", "warn"))
        found = f"{failed} of {plural(len(self.checks), 'check')} failed" if failed else "no check failed"
        warnings = f", {plural(warned, 'warning')}" if warned else ""
        return f"{clip_middle(self.path.name, 60)}: {found}{warnings}"
