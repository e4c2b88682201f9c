"""`explain`: say what a problem code means, what causes it, and what to do; the texts are in `problems.md`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ckptools.display.record_json import to_json
from ckptools.display.screen import PIPE, Mark, Screen, in_roles, painted
from ckptools.display.tables import wrapped
from ckptools.errors import UsageError
from ckptools.model.problems import Code, Forbids, Severity, remedy_of
from ckptools.model.records import displayed, grouped, to_dict
from ckptools.text import few

# -- the record of `explain`: the page of one problem code, read from `problems.md` ------------------------------------


PAGES = Path(__file__).with_name("problems.md")
"""The texts of all codes: Markdown with a section for each code."""

SUBJECTS = {
    "0": "files and saves",
    "1": "tensors and their layout",
    "2": "values, optimizer and counters",
    "3": "classes that a file names",
}
"""The subject of codes, by the first digit of their number."""


@displayed
@dataclass(frozen=True, slots=True)
class Explanation:
    """The page of one problem code.

    Attributes:
        code: such as `CK101`.
        subject: of the code and of others with the same first digit: what they are about, in a few words.
        meaning: of the code, in a few words.
        severity: the usual one.
        forbids: output that `consolidate` refuses to write because of an error with this code.
        means: the fault, in a few sentences.
        causes: possible causes, a sentence or two each.
        remedy: the way out in one line, as printed below a problem; "" if none is known.
        to_do: the remedy, step by step.
    """

    code: str
    subject: str
    meaning: str
    severity: Severity
    forbids: Forbids
    means: str
    causes: tuple[str, ...]
    remedy: str
    to_do: tuple[str, ...]

    def _summary(self) -> str:
        return f"{self.code} {self.meaning}"


def explanation(name: str) -> Explanation:
    """Return the page of a code, named in upper or lower case, with or without letters: `CK101`, `ck101`, `101`.

    Raises:
        UsageError: no such code exists.
    """
    wanted = name.strip().upper()
    wanted = wanted if wanted.startswith("CK") else f"CK{wanted}"
    for page in explanations():
        if page.code == wanted:
            return page
    near = [page.code for page in explanations() if page.code[:3] == wanted[:3]]
    known = f"; near it are {few(near, 30)}" if near else ""
    raise UsageError(None, f"{name[:40]!r} is no problem code{known}; `ckptools explain` lists all")


@cache
def explanations() -> tuple[Explanation, ...]:
    """Return the pages of all codes, in the order of their numbers."""
    kinds = {kind.code: kind for kind in Code}
    return tuple(_page(kinds[code], text) for code, text in sections_of(PAGES.read_text("utf-8")) if code in kinds)


def sections_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield each code with its Markdown section, heading included."""
    for section in re.split(r"^(?=## CK)", text, flags=re.MULTILINE)[1:]:
        yield section[3:8], section


def _page(kind: Code, section: str) -> Explanation:
    _, means, causes, to_do = re.split(r"^##.*$", section, flags=re.MULTILINE)
    return Explanation(
        kind.code,
        SUBJECTS[kind.code[2]],
        kind.meaning,
        kind.severity,
        kind.forbids,
        " ".join(means.split()),
        _items(causes),
        remedy_of(kind, ()),
        _items(to_do),
    )


def _items(text: str) -> tuple[str, ...]:
    return tuple(" ".join(item.split()) for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:])


# -- pages of problem codes as text and JSON ---------------------------------------------------------------------------


MAX_WIDTH = 100
"""Width of a page in columns, in a pipe and on wider screens."""

EFFECTS: dict[Forbids, str] = {
    "nothing": "consolidate writes all the same",
    "complete output": "consolidate refuses without --allow-missing",
    "any output": "consolidate refuses",
}
"""Effect of an error with the code on `consolidate`."""

MARKS: dict[Severity, Mark] = {"error": "bad", "warning": "warn", "note": "dim"}
"""Colour of a code, by its usual severity."""


def pages_text(pages: Sequence[Explanation], screen: Screen = PIPE) -> str:
    """Render pages with an empty line between two."""
    return "\n\n".join("\n".join(_lines(page, screen)) for page in pages)


def list_text(pages: Iterable[Explanation], screen: Screen = PIPE) -> str:
    """List all codes by subject, a line each, and say how to see the page of a code."""
    lines: list[str] = []
    for subject, about in grouped(pages, lambda page: page.subject).items():
        lines.append(painted(subject, "heading", screen.color))
        for page in about:
            code = f"  {page.code}  {page.severity:7}  "
            lines += wrapped(code, page.meaning, screen, label=MARKS[page.severity])
        lines.append("")
    return "\n".join([*lines, in_roles("ckptools explain CK101 says what causes it, and what to do", screen.color)])


def pages_json(pages: Iterable[Explanation]) -> str:
    """Render pages as one JSON object (`ckptools/explain/1`)."""
    return to_json({"schema": "ckptools/explain/1", "codes": [to_dict(page) for page in pages]}, indent=2)


def effect_of(page: Explanation) -> str:
    """State the usual severity of a code, and what `consolidate` does on such a problem."""
    return f"{page.severity}; {EFFECTS[page.forbids]}"


def _lines(page: Explanation, screen: Screen) -> Iterator[str]:
    narrow = screen._replace(width=min(screen.width or MAX_WIDTH, MAX_WIDTH))
    yield from wrapped(f"{page.code}: ", page.meaning, narrow, label=MARKS[page.severity], mark="heading")
    yield from _in_roles("", f"({effect_of(page)})", narrow)
    yield ""
    yield from _in_roles("", page.means, narrow)
    yield from ("", painted("What causes it", "heading", screen.color))
    for cause in page.causes:
        yield from _in_roles("  - ", cause, narrow)
    yield from ("", painted("What to do", "heading", screen.color))
    for step in [*([f"In short: {page.remedy}."] if page.remedy else []), *page.to_do]:
        yield from _in_roles("  - ", step, narrow)


def _in_roles(first: str, text: str, screen: Screen) -> Iterator[str]:
    for line in wrapped(first, text, screen):
        yield in_roles(line, screen.color)
