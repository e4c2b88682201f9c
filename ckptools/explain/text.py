"""Pages of problem codes as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptools.display.record_json import to_json
from ckptools.display.tables import PIPE, Screen, wrapped
from ckptools.explain.record import Explanation
from ckptools.model.problems import Forbids
from ckptools.model.records import to_dict

MAX_WIDTH = 100
"""Columns of a page, on a screen that has more and in a pipe."""

EFFECTS: dict[Forbids, str] = {
    "nothing": "consolidate writes all the same",
    "complete output": "consolidate refuses without --allow-missing",
    "any output": "consolidate refuses",
}
"""What a code means for `consolidate`."""


def pages_text(pages: Sequence[Explanation], screen: Screen = PIPE) -> str:
    """The pages, with an empty line between two."""
    return "\n\n".join("\n".join(_lines(page, screen)) for page in pages)


def list_text(pages: Iterable[Explanation]) -> str:
    """A line for each code, and how to see its page."""
    lines = [f"{page.code}  {page.severity:7}  {page.meaning}" for page in pages]
    return "\n".join([*lines, "", "ckptools explain CK101 says what causes it, and what to do"])


def pages_json(pages: Iterable[Explanation]) -> str:
    """One object with a record per page (`ckptools/explain/1`)."""
    return to_json({"schema": "ckptools/explain/1", "codes": [to_dict(page) for page in pages]}, indent=2)


def effect_of(page: Explanation) -> str:
    """The usual severity of a code, and what `consolidate` does where it is found."""
    return f"{page.severity}; {EFFECTS[page.forbids]}"


def _lines(page: Explanation, screen: Screen) -> Iterator[str]:
    narrow = screen._replace(width=min(screen.width or MAX_WIDTH, MAX_WIDTH))
    yield from wrapped(f"{page.code}: ", page.meaning, narrow)
    yield from wrapped("", f"({effect_of(page)})", narrow)
    yield ""
    yield from wrapped("", page.means, narrow)
    yield from ("", "What causes it")
    for cause in page.causes:
        yield from wrapped("  - ", cause, narrow)
    yield from ("", "What to do")
    for step in [*([f"In short: {page.remedy}."] if page.remedy else []), *page.to_do]:
        yield from wrapped("  - ", step, narrow)
