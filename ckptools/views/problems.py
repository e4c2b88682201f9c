"""Problems as lines of text; the same problem of many ranks or tensors is one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckptools.model.problems import Code, Problem, Severity
from ckptools.text import and_others, clip_middle, plural, printable, spans

MAX_LINE = 500
"""Characters of a message; names from files have any number."""


class Folded(NamedTuple):
    """One line about one or more problems.

    Attributes:
        code: their code.
        severity: theirs.
        where: ranks or tensors, such as `ranks 1..255`; empty when it is about the whole.
        message: the message; of several, the first one's and how many there are.
    """

    code: str
    severity: Severity
    where: str
    message: str


def fold(problems: Iterable[Problem]) -> list[Folded]:
    """Problems in the order of their first appearance; those that differ in numbers and names alone become one."""
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.code, problem.severity, _alike(problem)), []).append(problem)
    return [_folded(group) for group in groups.values()]


def _alike(problem: Problem) -> str:
    """What makes two problems alike: everything for those about no rank and no tensor, else all but the numbers."""
    about = problem.rank is not None or problem.tensor is not None
    return re.sub(r"\d+", "#", problem.message) if about else problem.message


def _folded(group: Sequence[Problem]) -> Folded:
    first = group[0]
    more = and_others(len(group) - 1) if len({p.message for p in group}) > 1 else ""
    return Folded(first.code, first.severity, _where(group), clip_middle(printable(first.message), MAX_LINE) + more)


def _where(group: Sequence[Problem]) -> str:
    ranks = {p.rank for p in group if p.rank is not None}
    tensors = list(dict.fromkeys(p.tensor for p in group if p.tensor is not None))
    words = [f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"] if ranks else []
    if tensors:
        kind = "other value" if group[0].kind in (Code.VALUE_LOST, Code.MIXED_SAVES, Code.LEFT_OUT) else "other tensor"
        more = f" and {plural(len(tensors) - 1, kind)}" if len(tensors) > 1 else ""
        words.append(clip_middle(printable(tensors[0]), 60) + more)
    return ", ".join(words)


def error_lines(problems: Iterable[Problem]) -> list[str]:
    """A line for each problem; those that say the same word for word, of several tensors or ranks, share one."""
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.code, problem.severity, problem.message), []).append(problem)
    return [str(g[0]) if len(g) == 1 else "  ".join([g[0].code, _where(g), g[0].message]) for g in groups.values()]
