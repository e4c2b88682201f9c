"""The record that `verify` returns: the result of each check, and the verdict on the checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ckptools.display.page import PagedRecord, ScreenPage
from ckptools.display.record_json import to_json
from ckptools.display.tables import Column
from ckptools.model.incidents import causes_of, consequences_of, plural_of, without_consequences
from ckptools.model.problems import BY_DEEP, Problem
from ckptools.model.records import Looked, Rows, displayed, to_dict
from ckptools.model.verdict import Verdict
from ckptools.text import clip_middle, plural, size

Result = Literal["ok", "FAIL", "warn", "partly", "not judged"]

TITLES = {
    "files": "files are complete",
    "one save": "files are of one save",
    "layout": "shards cover each tensor",
    "ranks agree on layout": "ranks agree on layout",
    "finite values": "no NaN or infinity",
    "values in range": "no odd values",
    "values in line": "no odd layers",
    "copies equal": "copies are equal",
    "optimizer covers params": "parameters have state",
    "step counters": "step counters agree",
    "lr: scheduler = groups": "learning rates agree",
    "rng": "distinct random states",
}
"""What a check shows if it is `ok`, in plain words for people, by its name; the names in JSON stay as they are."""


@displayed
@dataclass(frozen=True)
class Check:
    """The result of one check, and how much of the checkpoint it looked at.

    Attributes:
        name: short name for programs; `title` says the same in plain words.
        result: `ok` if the check looked at everything; `partly` if it found nothing wrong in the part that it looked
            at; `not judged` if there was nothing to look at, or the user did not ask for it.
        detail: how much the check looked at, and why not at the rest; without the problems.
        looked_at: number of files, tensors, zip entries or counters that the check looked at; `detail` says which.
        of: number of them in the checkpoint; 0 if the user did not ask for the check, or there are none.
    """

    name: str
    result: Result
    detail: str
    problems: tuple[Problem, ...] = ()
    looked_at: int = 0
    of: int = 0

    @property
    def title(self) -> str:
        """What the check shows if it is `ok`, in plain words: `learning rates agree`."""
        return TITLES.get(self.name, self.name)

    @property
    def not_ok(self) -> str:
        """Reason why the check is not `ok` although nothing is wrong: `not judged: no tensors`; empty otherwise."""
        return f"{self.result}: {self.detail}" if self.result in ("partly", "not judged") else ""

    def _summary(self) -> str:
        if self.not_ok:
            return f"{self.title}: {self.not_ok}"
        found = f", {plural(len(self.problems), 'problem')}" if self.problems else ""
        return f"{self.title}: {self.result}{found}, {self.detail}"


def judged(name: str, problems: Iterable[Problem], detail: str, *, looked_at: int, of: int, rest: str = "") -> Check:
    """Make a check; its result follows from its problems, and from how much it looked at.

    Args:
        name: of its row.
        problems: faults that it found.
        detail: how much it looked at, in words.
        looked_at: number of files, tensors, zip entries or counters that it looked at.
        of: number of them in the checkpoint.
        rest: why it did not look at all of them.
    """
    found, looked = tuple(problems), Looked(looked_at, of, rest)
    parts = [detail, looked.words] if looked_at else [rest or detail]
    return Check(name, _result(found, looked), "; ".join(filter(None, parts)), found, looked_at, of)


def _result(problems: Sequence[Problem], looked: Looked) -> Result:
    severities = {p.severity for p in problems}
    if "error" in severities:
        return "FAIL"
    return "warn" if "warning" in severities else looked.result


def not_judged(name: str, why: str, of: int = 0) -> Check:
    """Make a check that looked at nothing, and say why; `of` counts the files or tensors it would have looked at."""
    return Check(name, "not judged", why, of=of)


def counted_doubts(checks: Iterable[Check]) -> list[str]:
    """Count the checks that warn or did not look at everything, by result: `2 warnings`, `5 not judged`."""
    counts = Counter(check.result for check in checks)
    warned = [plural(counts["warn"], "warning")] if counts["warn"] else []
    results: tuple[Result, ...] = ("partly", "not judged")
    return warned + [f"{counts[result]} {result}" for result in results if counts[result]]


def without(check: Check, codes: Container[str]) -> Check:
    """Remove problems with ignored codes; a check that had such problems is never `ok`."""
    left = tuple(p for p in check.problems if p.code not in codes)
    gone = len(check.problems) - len(left)
    if not gone:
        return check
    result = _result(left, Looked(check.looked_at, check.of))
    detail = "; ".join(filter(None, [f"{plural(gone, 'problem')} ignored", check.detail]))
    return replace(check, result="partly" if result == "ok" else result, detail=detail, problems=left)


@displayed
@dataclass(frozen=True)
class Verification(PagedRecord):
    """The results of all checks.

    Attributes:
        checks: in a fixed order.
        ignored: number of problems left out because the user ignores their code.
        to_fetch: files to copy again from where the checkpoint was saved, relative to the folder that holds all of its
            files.
        bytes_read: bytes of tensors read for checksums and values.
        seconds: wall time, including the time to open the checkpoint.
    """

    path: Path
    checks: Rows[Check]
    verdict: Verdict
    ignored: int = 0
    to_fetch: tuple[str, ...] = ()
    bytes_read: int = 0
    seconds: float = 0.0

    @property
    def problems(self) -> Rows[Problem]:
        """All problems, check by check."""
        return Rows(p for check in self.checks for p in check.problems)

    @property
    def ok(self) -> bool:
        """True if no check failed; warnings do not count."""
        return not any(check.result == "FAIL" for check in self.checks)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a plain dict per check, with its problems, for `pandas.DataFrame`."""
        return self.checks.to_dicts()

    def _fill(self, page: ScreenPage) -> None:
        found = list(causes_of(self.problems))
        if any(check.name.startswith("checksums") and check.result in ("ok", "FAIL") for check in self.checks):
            # `verify --deep` has read every copy, so its page does not propose to run it.
            found = [one._replace(remedy=one.remedy.replace(BY_DEEP, "")) for one in found]
        page.verdict(self.verdict)
        page.incidents(found, consequences_of(self.problems))
        page.gap()
        page.table(plural(len(self.checks), "check"), COLUMNS, check_rows(self.checks), opened=True)
        page.line(summary(self), "dim")

    def _summary(self) -> str:
        failed = sum(c.result == "FAIL" for c in self.checks)
        found = f"{failed} of {plural(len(self.checks), 'check')} failed" if failed else "no check failed"
        return f"{clip_middle(self.path.name, 60)}: {', '.join([found, *counted_doubts(self.checks)])}"


# -- the parts of its page, and its JSON ------------------------------------------------------------------------------


COLUMNS = (Column("check"), Column("result", "verdict"), Column("detail"))


def check_rows(checks: Sequence[Check]) -> list[tuple[str, str, str]]:
    """Make a row for each check: its title, its result, and its problems in short or how much it looked at."""
    problems = [problem for check in checks for problem in check.problems]
    causes = set(without_consequences(problems))
    return [(check.title, check.result, _found_by(check, causes) or check.detail) for check in checks]


def _found_by(check: Check, causes: Set[Problem]) -> str:
    """List the problems of one check: codes explained above the table by code alone, the others with their text."""
    own = [p for p in check.problems if p in causes]
    following = Counter(p.kind for p in dict.fromkeys(check.problems) if p not in causes)
    codes = dict.fromkeys(cause.code for cause in causes_of(own))
    words = [f"{', '.join(codes)} above"] if codes else []
    words += [f"{cause.code} {cause.what}" for cause in causes_of(own, ("note",))]
    words += [f"{kind.code} {plural_of(count, kind)}, as files are lost" for kind, count in following.items()]
    return "; ".join(words)


def summary(found: Verification) -> str:
    """Count failed checks, warnings and ignored problems, and state bytes read and time."""
    failed = sum(c.result == "FAIL" for c in found.checks)
    parts = [f"{plural(failed, 'check')} failed" if failed else "no check failed"]
    parts += counted_doubts(found.checks)
    parts += [f"{plural(found.ignored, 'problem')} ignored"] if found.ignored else []
    read = f"{size(found.bytes_read)} read" if found.bytes_read else "nothing read"
    return f"{', '.join(parts)}; {read} for checksums and values, {found.seconds:.2f} s"


def verification_json(found: Verification, indent: int | None = 2) -> str:
    """Render the record as one JSON object (`ckptools/verify/1`), on one line without `indent`."""
    names = ("code", "severity", "rank", "tensor", "message")
    data = {
        "schema": "ckptools/verify/1",
        "path": str(found.path),
        "ok": found.ok,
        "verdict": to_dict(found.verdict),
        "checks": [
            {**to_dict(check), "problems": [{name: getattr(p, name) for name in names} for p in check.problems]}
            for check in found.checks
        ],
        "ignored": found.ignored,
        "to_fetch": found.to_fetch,
        "bytes_read": found.bytes_read,
        "seconds": round(found.seconds, 3),
    }
    return to_json(data, indent)
