"""Results of checks: made from the problems that were found, and judged again without those to ignore."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ckptools.errors import CkptoolsError, DamagedError, NotWholeError, ReadError
from ckptools.formats.shared.file_status import KINDS
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.verification import Check, Result


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
    """The result of a check; where it meets a file that cannot be read, that is the problem that it found."""
    try:
        return check(ck)
    except (ReadError, NotWholeError) as error:
        return judged(name, [unreadable(error)], "")


def unreadable(error: CkptoolsError, rank: int | None = None, fqn: str | None = None) -> Problem:
    """A file, or a part of one, that could not be read while it was checked."""
    return Problem(_kind(error), str(error), rank, fqn)


def _kind(error: CkptoolsError) -> Code:
    if isinstance(error, NotWholeError):
        return Code.TENSOR_GAP
    if isinstance(error, DamagedError):
        return Code.BAD_CHECKSUM
    return KINDS[error.kind] if isinstance(error, ReadError) else Code.FILE_CUT


def ignore_codes(checks: Sequence[Check], codes: Iterable[str]) -> tuple[tuple[Check, ...], int]:
    """The checks judged without the problems of some codes, and how many problems were left out."""
    unwanted, kept, ignored = set(codes), [], 0
    for check in checks:
        problems = tuple(p for p in check.problems if p.code not in unwanted)
        ignored += len(check.problems) - len(problems)
        again = judged(check.name, problems, check.detail).result
        kept.append(check if len(problems) == len(check.problems) else replace(check, result=again, problems=problems))
    return tuple(kept), ignored
