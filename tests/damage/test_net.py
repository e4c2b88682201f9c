"""What every command answers of a fixture, sound and damaged, is what its golden file says (`python -m tools.net`).

This is the matrix of fixtures, damages and codes. Tests of a format are about what no fixture has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.truth import one_of_each_form
from tools.net.__main__ import EVERY, GOLDEN, SHOWN, Case, compare, difference, facts, fixtures

FIRST = {known.label for known in one_of_each_form(EVERY)[1::12]}
"""Fixtures of every run of the tests; `make net`, which CI runs too, looks at all."""

CASE = min(fixtures(), key=lambda case: (GOLDEN / f"{case.name}.txt").stat().st_size)


def _param(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=() if case.name in FIRST else pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def alike_on_every_machine() -> Iterator[None]:
    """What `prepare` sets for a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        patch.setenv("COLUMNS", "100")
        time.tzset()
        mask = os.umask(0o022)
        yield
        os.umask(mask)
    time.tzset()


@pytest.mark.parametrize("case", [_param(case) for case in fixtures()])
def test_a_fixture_is_as_its_golden_file_says(case):
    assert difference(GOLDEN / f"{case.name}.txt", facts(case))[:SHOWN] == []


@pytest.mark.slow
def test_a_number_that_changes_is_noticed(tmp_path, capsys):
    golden = (GOLDEN / f"{CASE.name}.txt").read_text()
    (tmp_path / f"{CASE.name}.txt").write_text(golden.replace("to pt sha256 all.pt ", "to pt sha256 all.pt 1"))
    assert not compare([CASE], tmp_path, write=False)
    assert "+to pt sha256 all.pt " in capsys.readouterr().out


def test_every_fixture_has_a_golden_file():
    assert {case.name for case in fixtures()} == {path.stem for path in GOLDEN.glob("*.txt")}
