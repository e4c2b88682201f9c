"""The first screen of a report: the verdict in its colour, six facts, the worst causes and the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ckptools.display.drawing import Picture
from ckptools.display.page import Page, safe
from ckptools.display.palette import MARKS
from ckptools.dtypes import short
from ckptools.explain.record import Explanation, explanation
from ckptools.inspect.record import Report
from ckptools.inspect.text import size_expected
from ckptools.model.causes import Cause, Consequence, causes_of, consequences_of
from ckptools.model.problems import Code, Problem
from ckptools.model.verdict import Verdict
from ckptools.text import count, moment, period, plural, size

MOST = 3
"""Causes on the first screen."""


def verdict_band(page: Page, verdict: Verdict, below: Sequence[str], commands: Sequence[str]) -> None:
    """Add the verdict in its colour, lines below it, and the commands to type next."""
    mark = MARKS[verdict.level]
    lines = "".join(f"<div>{safe(line)}</div>" for line in below)
    following = "".join(f"<div>next: <code>{safe(command)}</code></div>" for command in commands)
    page.drawing(f'<div class="band is-{mark}"><b class="{mark}">{safe(verdict.headline)}</b>{lines}{following}</div>')


def fact_tiles(page: Page, report: Report) -> None:
    """Add six facts: step, ranks, parameters, size, format, time."""
    made = "".join(
        f'<div class="tile"><span>{safe(name)}</span><b>{safe(value)}</b><i>{safe(more)}</i></div>'
        for name, value, more in tiles(report)
    )
    page.drawing(f'<div class="tiles">{made}</div>')


def tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    """Name, value and remark of each fact."""
    step, ranks = report.checkpoint.step, report.ranks
    agree = f"{plural(len(step.sources), 'source')} agree" if step.agree else "SOURCES DISAGREE"
    yield (
        "step",
        "-" if step.value is None else str(step.value),
        agree if len(step.sources) > 1 else ", ".join(step.sources),
    )
    here = f"{ranks.here} of {ranks.expected}" if ranks.expected else plural(ranks.files, "file")
    yield "ranks here", here, plural(ranks.files, "file") if ranks.expected else ""
    models = [section.size for section in report.sections if section.kind == "model"]
    dtypes = Counter[str]()
    for one in models:
        dtypes.update(one.dtypes)
    words = [short(d) for d, _ in dtypes.most_common(3)] + ["quantized"] * any(one.quantized for one in models)
    yield "parameters", count(sum(one.params for one in models)), ", ".join(words)
    yield "size", size(report.bytes_found), size_expected(report)
    first, _, more = report.saved_as.partition(", ")
    yield "format", first, more
    if report.saved:
        day, _, time = moment(report.saved[0]).partition(" ")
        yield "saved", time, day if report.saved[0] == report.saved[1] else period(*report.saved)
    else:
        yield "saved", "-", "no file times"


def cause_list(page: Page, problems: Sequence[Problem]) -> None:
    """Add the worst causes, what follows from lost files, and more causes, folded."""
    causes, following = causes_of(problems), consequences_of(problems)
    shown, others = causes[:MOST], causes[MOST:]
    made = "".join(map(_cause, shown)) + _following(problems, following)
    if others:
        rest = "".join(map(_cause, others))
        made += f"<details><summary>{plural(len(others), 'more cause')}</summary>{rest}</details>"
    title = page.heading(f"causes: {len(shown)} of {len(causes)}" if causes else "no problem was found")
    page.drawing(f"<section>{title}{made}</section>")


def _cause(cause: Cause) -> str:
    mark = "bad" if cause.severity == "error" else "warn"
    where = f"<b>{safe(cause.where)}</b> " if cause.where else ""
    remedy = f'<div class="do">{safe(cause.remedy)}</div>' if cause.remedy else ""
    code = f'<a class="{mark}" href="#{cause.code}">{cause.code}</a>'
    return f'<div class="cause">{code}{where}{safe(cause.what)}{remedy}</div>'


FIRST = 20
"""At most this many of what follows from a lost file are named."""


def _following(problems: Sequence[Problem], following: Sequence[Consequence]) -> str:
    """What follows from lost files, and from which causes; folded, the first of them by name."""
    made = ""
    for one in following:
        named = [p for p in dict.fromkeys(problems) if p.code == one.code][:FIRST]
        lines = "<br>".join(safe(" ".join(filter(None, (p.tensor, p.message)))) for p in named)
        left = one.problems - len(named)
        more = f"<br>{left:,} more are in the JSON of this page" if left > 0 else ""
        title = f"{one.text} ({' and '.join(one.causes)})"
        made += f"<details><summary>{safe(title)}</summary><code>{lines}</code>{more}</details>"
    return f'<div class="cause">{made}</div>' if made else ""


def ranks_picture(page: Page, picture: Picture) -> None:
    """Add the map of the ranks."""
    page.drawing(f"<section>{page.heading('ranks')}{picture.html()}</section>")


def code_list(page: Page, problems: Iterable[Problem]) -> None:
    """Add what the codes on the page mean and what to do, where their links lead."""
    kinds: dict[Code, None] = dict.fromkeys(problem.kind for problem in problems)
    if kinds:
        rows = "".join(_explained(explanation(kind.code)) for kind in kinds)
        page.drawing(f"<details open><summary>{page.heading('what the codes mean')}</summary>{rows}</details>")


def _explained(one: Explanation) -> str:
    """A code with what it means, what causes it and what to do, as `ckptools explain` has it."""
    parts = (("What causes it", one.causes), ("What to do", one.to_do))
    lists = "".join(f"<div>{title}:</div>{''.join(map(_step, items))}" for title, items in parts)
    title = f"<b>{one.code}</b> {safe(one.meaning)} <span class=dim>ckptools explain {one.code}</span>"
    return f'<div id="{one.code}" class="code">{title}<div>{safe(one.means)}</div>{lists}</div>'


def _step(text: str) -> str:
    return f'<div class="step">- {safe(text)}</div>'


def notes_of(problems: Sequence[Problem]) -> list[str]:
    """Notes, a line each."""
    return [f"{cause.code} {cause.where}: {cause.what}" for cause in causes_of(problems, ("note",))]
