"""The net holds: a fixture is as its golden file says, and a number that changes is noticed."""

from __future__ import annotations

import pytest

from tools.net.__main__ import GOLDEN, compare, fixtures

CASE = min(fixtures(), key=lambda case: (GOLDEN / f"{case.name}.txt").stat().st_size)


@pytest.mark.slow
def test_a_fixture_is_as_its_golden_file_says(capsys):
    assert compare([CASE], GOLDEN, write=False)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_number_that_changes_is_noticed(tmp_path, capsys):
    golden = (GOLDEN / f"{CASE.name}.txt").read_text()
    (tmp_path / f"{CASE.name}.txt").write_text(golden.replace("to pt sha256 all.pt ", "to pt sha256 all.pt 1"))
    assert not compare([CASE], tmp_path, write=False)
    assert "+to pt sha256 all.pt " in capsys.readouterr().out


def test_every_fixture_has_a_golden_file():
    assert {case.name for case in fixtures()} == {path.stem for path in GOLDEN.glob("*.txt")}
