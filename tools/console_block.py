"""A console block of a guide as HTML: commands apart from what they print, and this with its colours.

A guide holds plain text. Its colours follow from its words, as on a terminal: `ckptools.display.screen` knows which
words are verdicts, and each problem code has a severity. A line that is wider than the page goes on below the column in
which its last cell begins; a table is scrolled by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from ckptools.display.screen import Mark, mark_of
from ckptools.model.problems import Code

VERDICTS = frozenset({"result", "whole", "status", "verdict", "severity", "what", "same?", "state"})
"""Titles of columns whose words are verdicts."""

RULE = re.compile(r"-{2,}(  -+)*")
"""The line below the titles of a table."""

BRANCH = re.compile(r"(│   |    )*[├└]─")
"""The beginning of a line of a tree."""

SIGNED = re.compile(r"(BAD|ok|warn|-)( {1,4})(?=\S)")
"""An answer of `doctor`, behind its sign."""

PROPOSED = re.compile(r"( +|next: +|→ +| +→ +)(ckptools [a-z]+)\b")
"""The beginning of a line with a command to type next."""

OPTION = re.compile(r"(?<!\S)--?\w[\w-]*")
"""An option, which a browser would break at its hyphens."""

GAP = 2
"""Spaces between two columns of a table."""

MOST_HANG = 32
"""Characters; a line that is broken goes on no further to the right, so that a narrow window has room for it."""

SEVERITIES: dict[str, Mark] = {kind.code: "bad" if kind.severity == "error" else "warn" for kind in Code}


def block(source: str, language: str, css_class: str, options: Any, md: Any, **_: Any) -> str:
    """Render a block, as a custom fence of pymdownx.superfences."""
    lines = source.rstrip("\n").split("\n")
    return f'<div class="{css_class} highlight"><pre><code>{"".join(_rendered(lines))}</code></pre></div>'


def _rendered(lines: Sequence[str]) -> Iterator[str]:
    n, goes_on = 0, False
    while n < len(lines):
        line = lines[n]
        if goes_on or line.startswith("$ "):
            goes_on = line.endswith("\\")
            command = _text(line.removeprefix("$ "))
            prompt = '<span class="prompt">$ </span>' if line.startswith("$ ") else ""
            yield f'<span class="line command">{prompt}{command}</span>\n'
            n += 1
            continue
        end = _end_of_table(lines, n)
        if end > n:
            yield f'<span class="table">{"".join(_table(lines[n:end]))}</span>\n'
        else:
            yield _line(line)
        n = max(end, n + 1)


def _end_of_table(lines: Sequence[str], first: int) -> int:
    """The number of the line behind a table or a tree that begins at a line; that line itself if none begins there."""
    ruled = first + 1 < len(lines) and RULE.fullmatch(lines[first + 1].strip())
    tree = first + 1 < len(lines) and (BRANCH.match(lines[first]) or BRANCH.match(lines[first + 1]))
    starts = [found.start() for found in re.finditer("-+", lines[first + 1])][1:] if ruled else []
    end = first
    while (ruled or tree) and end < len(lines) and lines[end] and not lines[end].startswith("$ "):
        if any(lines[end][start - GAP : start].strip() for start in starts):
            break
        if tree and not ruled and end > first and not BRANCH.match(lines[end]) and lines[end] != "…":
            break
        end += 1
    return end


def _table(lines: Sequence[str]) -> Iterator[str]:
    """The lines of a table, with the verdicts in it, or of a tree."""
    if len(lines) < 2 or not RULE.fullmatch(lines[1].strip()):
        yield from map(_line, lines)
        return
    starts = [found.start() for found in re.finditer("-+", lines[1])]
    spans = [*pairwise(starts), (starts[-1], None)]
    titles = [lines[0][start:end].strip() for start, end in spans]
    yield _line(_painted(lines[0], "heading"), ready=True)
    yield _line(_painted(lines[1], "dim"), ready=True)
    for line in lines[2:]:
        before = escape(line[: starts[0]])
        cells = [line[start:end] for start, end in spans]
        marks = [mark_of(cell.strip()) if title in VERDICTS else "" for title, cell in zip(titles, cells, strict=True)]
        painted = [_painted(cell, mark) if mark else _coded(cell) for cell, mark in zip(cells, marks, strict=True)]
        yield _line(before + "".join(painted), ready=True)


def _line(text: str, ready: bool = False) -> str:
    """A line of what was printed; `ready` HTML, or text that is still to be coloured."""
    if ready:
        return f'<span class="line">{text}</span>\n'
    hang = min(max((found.end() for found in re.finditer(r"(?:^|\S) {2,}(?=\S)", text)), default=0), MOST_HANG)
    style = f' style="--hang:{hang}"' if hang else ""
    return f'<span class="line"{style}>{_coloured(text) or "&#8203;"}</span>\n'


def _coloured(text: str) -> str:
    """A line outside of tables: a headline, an answer, an error, or any other."""
    if text == "…":
        return _painted(text, "dim")
    if signed := SIGNED.match(text):
        mark = mark_of(signed[1]) or "heading"
        return _painted(signed[1], mark) + escape(signed[2]) + _cells(text[signed.end() :], mark)
    if found := re.match(r"(error|warning)(?=: )", text):
        return _painted(found[0], mark_of(found[0])) + _coded(text[found.end() :])
    if found := PROPOSED.match(text):
        return f'{escape(found[1])}<span class="typed">{found[2]}</span>{_coded(text[found.end() :])}'
    mark = mark_of(text)
    return _painted(text, mark) if mark else _coded(text)


def _cells(text: str, mark: Mark) -> str:
    """A label, and what stands behind two spaces."""
    label, gap, rest = re.fullmatch(r"(.*?)(  +|$)(.*)", text).groups()  # type: ignore[union-attr]
    return _painted(label, mark) + gap + _coded(rest)


def _coded(text: str) -> str:
    """A text with the problem codes in it coloured by their severity."""
    codes = re.split(r"(\bCK\d{3}\b)", text)
    return "".join(_painted(one, SEVERITIES.get(one, "")) for one in codes)


def _painted(text: str, mark: Mark) -> str:
    return f'<span class="{mark}">{_text(text)}</span>' if mark else _text(text)


def _text(text: str) -> str:
    return OPTION.sub(lambda found: f'<span class="option">{found[0]}</span>', escape(text))
