"""Parts that several pages of `report` have: facts in tiles, incidents, the meaning of problem codes, the contents."""

from __future__ import annotations

from collections.abc import Iterable

from ckptools.display.html import Page, safe
from ckptools.explain import Explanation, explanation
from ckptools.model.incidents import Cause, Incident
from ckptools.model.problems import Code


def tiles_html(facts: Iterable[tuple[str, str, str]]) -> str:
    """Render a tile for each fact: its name, its value and a remark."""
    made = (
        f'<div class="tile"><span>{safe(name)}</span><b>{safe(value)}</b><i>{safe(more)}</i></div>'
        for name, value, more in facts
    )
    return f'<div class="tiles">{"".join(made)}</div>'


def incidents_html(incidents: Iterable[Incident]) -> str:
    """Render each incident with its culprit, the evidence of its causes and its remedy."""
    return "".join(map(_incident, incidents))


def _incident(one: Incident) -> str:
    culprit = f"<b>{safe(one.culprit)}</b>" if one.culprit else ""
    remedy = f'<div class="do">{safe(one.remedy)}</div>' if one.remedy else ""
    return f'<div class="cause">{culprit}{"".join(map(_evidence, one.causes))}{remedy}</div>'


def _evidence(cause: Cause) -> str:
    mark = "bad" if cause.severity == "error" else "warn"
    return f'<div><a class="{mark}" href="#{cause.code}">{cause.code}</a>{safe(cause.evidence)}</div>'


def add_meanings(page: Page, kinds: Iterable[Code], opened: bool) -> None:
    """Add a folded part in which each problem code is explained, once; nothing without codes."""
    rows = "".join(_explained(explanation(kind.code)) for kind in dict.fromkeys(kinds))
    if rows:
        title = page.heading("what the codes mean")
        page.drawing(f"<details{' open' if opened else ''}><summary>{title}</summary>{rows}</details>")


def _explained(one: Explanation) -> str:
    """Render a problem code with its meaning, its causes and its remedies, as `ckptools explain` does."""
    parts = (("What causes it", one.causes), ("What to do", one.to_do))
    lists = "".join(f"<div>{title}:</div>{''.join(map(_step, items))}" for title, items in parts)
    title = f"<b>{one.code}</b> {safe(one.meaning)} <span class=dim>ckptools explain {one.code}</span>"
    return f'<div id="{one.code}" class="code">{title}<div>{safe(one.means)}</div>{lists}</div>'


def _step(text: str) -> str:
    return f'<div class="step">- {safe(text)}</div>'


def contents_html(page: Page) -> str:
    """Render the line of contents: a link to each heading of a page."""
    links = "".join(f'<a href="#{name}">{safe(title)}</a>' for name, title in page.headings.items())
    return f'<nav aria-label="contents">{links}</nav>'
