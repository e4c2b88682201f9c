"""The record of `verify` as text, as JSON and as HTML: its verdict, and a row for each check and kind of problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptools.display.lines import fold
from ckptools.display.record_json import to_json
from ckptools.display.tables import PIPE, Column, Screen, table
from ckptools.model.records import to_dict
from ckptools.text import plural, size
from ckptools.verify.record import Check, Verification

if TYPE_CHECKING:
    from ckptools.display.page import Page

COLUMNS = (Column("check"), Column("result", verdict=True), Column("detail"))


def verification_text(found: Verification, screen: Screen = PIPE) -> str:
    """Render a table with a row for each check and each kind of problem, and the verdict below it."""
    rows = [row for check in found.checks for row in check_rows(check)]
    return "\n".join([*table(COLUMNS, rows, Screen(screen.width, None)), found.verdict.headline, summary(found)])


def check_rows(check: Check) -> Iterator[tuple[str, str, str]]:
    """The detail of a check without problems, else its problems."""
    folded = fold(check.problems)
    if not folded:
        yield check.name, check.result, check.detail
    for n, problem in enumerate(folded):
        words = (problem.code, problem.where, problem.message)
        yield check.name if n == 0 else "", check.result if n == 0 else "", "  ".join(w for w in words if w)


def summary(found: Verification) -> str:
    """Numbers of failed checks, warnings and ignored problems, and the cost."""
    failed = sum(c.result == "FAIL" for c in found.checks)
    warned = sum(c.result == "warn" for c in found.checks)
    parts = [f"{plural(failed, 'check')} failed" if failed else "no check failed"]
    parts += [plural(warned, "warning")] if warned else []
    parts += [f"{plural(found.ignored, 'problem')} ignored"] if found.ignored else []
    return f"{', '.join(parts)}; {size(found.bytes_read)} read for checksums and values, {found.seconds:.2f} s"


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
    """Render the verdict, and a row for each check and each kind of problem."""
    from ckptools.display.page import DICTS, Page

    page = Page(DICTS)
    page.line(str(found.path))
    page.line(summary(found), "good" if found.ok else "bad")
    check_table(page, "", found.checks, opened=True)
    return page.html()


def check_table(page: Page, title: str, checks: Sequence[Check], opened: bool) -> None:
    """Add a table with a row for each check and each kind of problem."""
    cells = [row for check in checks for row in check_rows(check)]
    page.table(title or plural(len(checks), "check"), COLUMNS, cells, opened=opened)
