"""What `verify` found, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ckptools.model.problems import Problem
from ckptools.model.records import to_dict
from ckptools.model.verification import Check, Verification
from ckptools.text import plural, size
from ckptools.views.problems import fold
from ckptools.views.tables import PIPE, Column, Screen, table

COLUMNS = (Column("check"), Column("result", verdict=True), Column("detail"))


def verification_text(found: Verification, screen: Screen = PIPE) -> str:
    """What was found, as text: a table with a row for each check and each kind of problem, and the verdict below it."""
    rows = [row for check in found.checks for row in check_rows(check)]
    return "\n".join([*table(COLUMNS, rows, Screen(screen.width, None)), found.verdict.headline, summary(found)])


def check_rows(check: Check) -> Iterator[tuple[str, str, str]]:
    """What was looked at where nothing is wrong; else what is wrong."""
    folded = fold(check.problems)
    if not folded:
        yield check.name, check.result, check.detail
    for n, problem in enumerate(folded):
        words = (problem.code, problem.where, problem.message)
        yield check.name if n == 0 else "", check.result if n == 0 else "", "  ".join(w for w in words if w)


def summary(found: Verification) -> str:
    """How many checks failed or warned, what was ignored, and what it cost."""
    failed = sum(c.result == "FAIL" for c in found.checks)
    warned = sum(c.result == "warn" for c in found.checks)
    parts = [f"{plural(failed, 'check')} failed" if failed else "no check failed"]
    parts += [plural(warned, "warning")] if warned else []
    parts += [f"{plural(found.ignored, 'problem')} ignored"] if found.ignored else []
    return f"{', '.join(parts)}; {size(found.bytes_read)} read for checksums and values, {found.seconds:.2f} s"


def verification_json(found: Verification) -> str:
    """What was found, as one JSON object."""
    data = {
        "schema": "ckptools/verify/1",
        "path": str(found.path),
        "ok": found.ok,
        "verdict": to_dict(found.verdict),
        "checks": [
            {"name": c.name, "result": c.result, "detail": c.detail, "problems": _problems(c.problems)}
            for c in found.checks
        ],
        "ignored": found.ignored,
        "bytes_read": found.bytes_read,
        "seconds": round(found.seconds, 3),
    }
    return json.dumps(data, indent=2, allow_nan=False)


def _problems(problems: Sequence[Problem]) -> list[dict[str, object]]:
    names = ("code", "severity", "rank", "tensor", "message")
    return [{name: getattr(p, name) for name in names} for p in problems]
