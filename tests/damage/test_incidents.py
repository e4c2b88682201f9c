"""Incidents of damaged checkpoints fit a terminal: a short headline, at most six lines a culprit, real commands."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest

import ckptools
from ckptools.cli.start import COMMANDS
from ckptools.display.screen import Screen
from ckptools.display.tables import incident_lines, verdict_lines
from ckptools.errors import CkptoolsError
from tests.damage.damages import Damage, damages
from tests.damage.test_matrix import place, suffered
from tests.truth import FIXTURES, WHOLE, Known, one_of_each_form

__all__ = ["place"]

pytestmark = pytest.mark.slow

TERMINAL = Screen(80, 24)

PAIRS = 6
"""Pairs of two damages of one fixture, drawn by its name."""


def broken(known: Known, folder: Path) -> Iterator[tuple[Damage, ...]]:
    """One damage of each kind, and pairs of damages of different files."""
    files = sorted({file.path.resolve() for file in ckptools.open(folder / known.path).files})
    kinds: dict[str, list[Damage]] = {}
    for damage in damages(folder, files):
        kinds.setdefault(damage.kind, []).append(damage)
    drawn = random.Random(known.name)
    one_of_each = [drawn.choice(alike) for alike in kinds.values()]
    pairs = [(a, b) for a, b in combinations(one_of_each, 2) if not {*a.what.split()} & {*b.what.split()}]
    yield from ((damage,) for damage in one_of_each)
    yield from drawn.sample(pairs, min(PAIRS, len(pairs)))


def misfits(verdict: ckptools.Verdict) -> Iterator[str]:
    """What of a verdict does not fit a terminal of 80 columns."""
    if len(verdict.headline) > 80:
        yield f"{len(verdict.headline)} characters: {verdict.headline}"
    lines = [line for one in verdict.incidents for line in incident_lines(one.causes, (), TERMINAL)]
    yield from (
        f"{len(line)} columns: {line}" for line in [*verdict_lines(verdict, TERMINAL), *lines] if len(line) > 80
    )
    for one in verdict.incidents:
        if len(card := incident_lines(one.causes, (), TERMINAL)) > 6:
            yield "\n".join(card)
        for command in re.findall(r"ckptools (\w+)", one.remedy):
            if command not in COMMANDS:
                yield f"no command {command}: {one.remedy}"


@pytest.mark.parametrize("known", one_of_each_form(WHOLE), ids=lambda known: known.label)
def test_what_is_wrong_fits_a_terminal(known: Known, place: Path) -> None:
    folder = place / "run"
    shutil.copytree(FIXTURES / known.name, folder, ignore=shutil.ignore_patterns("truth*", "HOW.md"))
    found: list[str] = []
    for together in broken(known, folder):
        with ExitStack() as stack:
            changed = [stack.enter_context(suffered(damage)) for damage in together]
            if not all(changed):
                continue
            try:
                verdict = ckptools.open(folder / known.path, all_ranks=True).verdict
            except CkptoolsError:  # it cannot be opened, which is one line
                continue
        found += [f"{' + '.join(map(str, together))}: {misfit}" for misfit in misfits(verdict)]
    assert found == []
