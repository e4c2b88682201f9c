"""The record of `verify` as text, as JSON and as HTML: its verdict, the causes behind it, and a row for each check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from ckptools.display.lines import cause_lines
from ckptools.display.palette import HEADLINES, MARKS
from ckptools.display.record_json import to_json
from ckptools.display.tables import PIPE, Column, Screen, table, wrapped
from ckptools.model.causes import causes_of, consequences_of, plural_of, without_consequences
from ckptools.model.problems import Problem
from ckptools.model.records import to_dict
from ckptools.model.remedies import AFTER_DEEP, WHICH_COPY
from ckptools.text import plural, size
from ckptools.verify.record import Check, Verification, counted_doubts

if TYPE_CHECKING:
    from ckptools.display.page import Page

COLUMNS = (Column("check"), Column("result", "verdict"), Column("detail"))


def verification_text(found: Verification, screen: Screen = PIPE) -> str:
    """Render the verdict, the causes behind the problems, a row for each check, and the cost."""
    found_causes = list(causes_of(found.problems))
    if any(check.name.startswith("checksums") and check.result in ("ok", "FAIL") for check in found.checks):
        # Who has just read every copy is not told to do it.
        found_causes = [one._replace(remedy=one.remedy.replace(WHICH_COPY, AFTER_DEEP)) for one in found_causes]
    causes = cause_lines(found_causes, consequences_of(found.problems), screen, screen.rows)
    checks = table(COLUMNS, check_rows(found.checks), screen._replace(rows=None))
    head = wrapped("", found.verdict.headline, screen, mark=HEADLINES[found.verdict.level])
    return "\n".join([*head, *causes, "", *checks, *wrapped("", summary(found), screen, mark="dim")])


def check_rows(checks: Sequence[Check]) -> list[tuple[str, str, str]]:
    """Each check with the causes that it found in a few words, or else how much was checked."""
    problems = [problem for check in checks for problem in check.problems]
    causes = set(without_consequences(problems))
    return [(check.name, check.result, _found_by(check, causes) or check.detail) for check in checks]


def _found_by(check: Check, causes: Set[Problem]) -> str:
    """The causes that a check found, by the codes that stand above it, and what follows from others' in full."""
    own = [p for p in check.problems if p in causes]
    following = Counter(p.kind for p in dict.fromkeys(check.problems) if p not in causes)
    codes = dict.fromkeys(cause.code for cause in causes_of(own))
    words = [f"{', '.join(codes)} above"] if codes else []
    words += [f"{cause.code} {cause.text}" for cause in causes_of(own, ("note",))]
    words += [f"{kind.code} {plural_of(count, kind)}, as files are lost" for kind, count in following.items()]
    return "; ".join(words)


def summary(found: Verification) -> str:
    """Numbers of failed checks, warnings and ignored problems, and the cost."""
    failed = sum(c.result == "FAIL" for c in found.checks)
    parts = [f"{plural(failed, 'check')} failed" if failed else "no check failed"]
    parts += counted_doubts(found.checks)
    parts += [f"{plural(found.ignored, 'problem')} ignored"] if found.ignored else []
    read = f"{size(found.bytes_read)} read" if found.bytes_read else "nothing read"
    return f"{', '.join(parts)}; {read} for checksums and values, {found.seconds:.2f} s"


def verification_json(found: Verification) -> str:
    """Render the record as one JSON object."""
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
        "bytes_read": found.bytes_read,
        "seconds": round(found.seconds, 3),
    }
    return to_json(data, indent=2)


def verification_html(found: Verification) -> str:
    """Render the verdict, the causes behind the problems, and a row for each check."""
    from ckptools.display.page import DICTS, Page
    from ckptools.display.record_html import problem_table

    page = Page(DICTS)
    page.line(str(found.path))
    page.line(found.verdict.headline, MARKS[found.verdict.level])
    problem_table(page, found.problems)
    check_table(page, "", found.checks, opened=True)
    page.line(summary(found), "dim")
    return page.html()


def check_table(page: Page, title: str, checks: Sequence[Check], opened: bool) -> None:
    """Add a table with a row for each check."""
    page.table(title or plural(len(checks), "check"), COLUMNS, check_rows(checks), opened=opened)
