"""What a check says, and what all of them together say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckptools.errors import CkptoolsError, NotWholeError, ReadError
from ckptools.model.problems import Problem

if TYPE_CHECKING:
    from ckptools.model.checkpoint import Checkpoint

Result = Literal["ok", "FAIL", "warn", "skip"]


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


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        path: what was verified.
        checks: each check's result, in a fixed order.
        ignored: how many problems were left out because their code was to be ignored.
        bytes_read: bytes of tensors that were read for checksums and values.
        seconds: wall time, opening included.
    """

    path: Path
    checks: tuple[Check, ...]
    ignored: int = 0
    bytes_read: int = 0
    seconds: float = 0.0

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Everything that is wrong, in the order of the checks."""
        return tuple(p for check in self.checks for p in check.problems)

    @property
    def ok(self) -> bool:
        """Whether no check failed; warnings do not count."""
        return not any(check.result == "FAIL" for check in self.checks)


def judged(name: str, problems: Iterable[Problem], detail: str) -> Check:
    """A check whose result follows from its problems."""
    found = tuple(problems)
    severities = {p.severity for p in found}
    result: Result = "FAIL" if "error" in severities else "warn" if "warning" in severities else "ok"
    return Check(name, result, detail, found)


def skipped(name: str, why: str) -> Check:
    """A check that had nothing to look at, or was not asked for."""
    return Check(name, "skip", why)


def attempt(name: str, check: Callable[[Checkpoint], Check], ck: Checkpoint) -> Check:
    """What a check says; where it meets something that cannot be read, that is what it found."""
    try:
        return check(ck)
    except (ReadError, NotWholeError) as error:
        return judged(name, [unreadable(error)], "")


def unreadable(error: CkptoolsError, rank: int | None = None, fqn: str | None = None) -> Problem:
    """A file, or a part of one, that could not be read while it was checked."""
    return Problem("CK002", "error", str(error), rank, fqn)


def without(checks: Sequence[Check], codes: Iterable[str]) -> tuple[tuple[Check, ...], int]:
    """The checks without the problems of some codes, judged again, and how many problems that left out."""
    unwanted, kept, ignored = set(codes), [], 0
    for check in checks:
        problems = tuple(p for p in check.problems if p.code not in unwanted)
        ignored += len(check.problems) - len(problems)
        again = judged(check.name, problems, check.detail).result
        kept.append(check if len(problems) == len(check.problems) else replace(check, result=again, problems=problems))
    return tuple(kept), ignored
