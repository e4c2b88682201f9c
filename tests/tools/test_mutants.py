"""Faults change what is decided and not what is said, and each meets the tests that run its line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import coverage
import pytest

from tools.mutants.__main__ import Fault, Verdict, chosen, drawn, failing, report
from tools.mutants.covering import RESULTS, ROOT, SETTINGS, Recording, _function_at, _moved, _statement_at

WORDS = '''"""A text."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from a import b
Sizes = tuple[int, ...]
def f(a: dict[str, int] | None) -> str | None:
    """Another text."""
    raise ValueError("no such key")
class C:
    def __repr__(self) -> str:
        return str(1 + 2)
'''


def faults_by_line(source: str) -> Any:
    """Import libcst only where a test runs, not where it is collected."""
    from tools.mutants import faults

    return faults.faults_by_line(source)


def made(line: str) -> set[str]:
    """A line of a function with each of its faults."""
    texts = [
        make() for kinds in faults_by_line(f"def f(a, b):\n    {line}\n").values() for k in kinds.values() for make in k
    ]
    for text in texts:
        compile(text, "f", "exec")
    return {text.splitlines()[1].strip() for text in texts}


def test_texts_annotations_and_reprs_are_left_alone():
    assert dict(faults_by_line(WORDS)) == {}


def test_a_guard_loses_each_clause_and_is_never_and_always_taken():
    assert made("if a and b: return 'x'") >= {
        "if a: return 'x'", "if b: return 'x'", "if False: return 'x'", "if True: return 'x'", "if a or b: return 'x'"
    }  # fmt: skip


def test_a_text_is_changed_where_it_is_looked_up_or_compared_only():
    assert made("return a.get('step')") & {"return a.get('XXstepXX')"}
    assert made("return a == 'step'") & {"return a == 'XXstepXX'"}
    assert not any("XX" in line for line in made("return a.say('step')"))


@pytest.mark.slow
def test_one_seed_draws_the_same_faults_on_different_lines():
    files = [Path("ckptools/model/rank_vote.py"), Path("ckptools/option.py")]
    first = drawn(files, 9, seed=5)
    assert first == drawn(files, 9, seed=5) != drawn(files, 9, seed=6)
    assert len({(fault.file, fault.line) for fault in first}) == 9


def test_the_lines_that_a_test_runs_are_recorded_in_the_processes_that_it_starts_too(tmp_path):
    (tmp_path / "adds.py").write_text("def one():\n    return 1\ndef two():\n    return 2\n")
    (tmp_path / "test_it.py").write_text(
        "import subprocess, sys, adds\n"
        "def test_one(): adds.one()\n"
        "def test_two(): subprocess.run([sys.executable, '-c', 'import adds; adds.two()'], check=True)\n"
    )
    (tmp_path / "settings").write_text(SETTINGS.format(folder=tmp_path, package="adds"))
    environment = {"COVERAGE_PROCESS_START": tmp_path / "settings", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-m", "pytest", "-p", "tools.mutants.covering", "-p", "no:cacheprovider", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **environment, RESULTS: tmp_path / "t"}, check=True)
    data = coverage.Coverage(data_file=tmp_path / "coverage", config_file=False)
    data.combine([str(tmp_path)])
    ran = data.get_data().contexts_by_lineno(str(tmp_path / "adds.py"))
    assert (ran[2], ran[4]) == (["test_it.py::test_one"], ["test_it.py::test_two"])
    assert set(json.loads((tmp_path / "t").read_text())) == {"test_it.py::test_one", "test_it.py::test_two"}


def test_a_line_is_found_again_after_the_file_has_changed():
    assert _moved(["a", "b", "c"], ["new", "a", "c", "other"]) == {2: 1, 3: 3}


def test_the_head_of_a_statement_and_the_function_around_it_are_found():
    text = "def f(a):\n    if (a and\n            b):\n        return (\n            1\n        )\n"
    assert (_statement_at(text, 3), _statement_at(text, 5)) == (range(2, 4), range(4, 7))
    assert (_function_at(text, 5), _function_at(text, 1)) == (range(2, 7), range(0))


def test_each_test_function_is_tried_once_before_another_of_its_cases(monkeypatch):
    seconds = {"t::a[1]": 1.0, "t::a[2]": 2.0, "t::b": 30.0, "t::c": 40.0}
    monkeypatch.setattr(Recording, "tests_of", lambda *_: set(seconds))
    monkeypatch.setattr("tools.mutants.__main__.SECONDS", 60.0)
    fault = Fault(Path("ckptools/text.py"), 1, "", "")
    assert chosen(fault, [Recording(Path(), seconds)]) == ({"t::a[1]": 1.0, "t::b": 30.0}, 4)


def test_all_that_fail_are_named_where_they_are_asked_for(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "test_it.py").write_text("def test_a(): assert 0\ndef test_b(): pass\ndef test_c(): assert 0")
    tests = {f"test_it.py::test_{letter}": 0.0 for letter in "abc"}
    assert failing(tmp_path / "tree", tests, all_of_them=True) == ["test_it.py::test_a", "test_it.py::test_c"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def test_a(): pass", None),
        ("def test_a(): assert 0", "test_it.py::test_a"),
        ("import time\ndef test_a(): time.sleep(600)", "test_it.py::test_a"),
        ("import nothing_such", "test_it.py cannot be imported"),
    ],
)
def test_what_fails_or_hangs_is_named(tmp_path, monkeypatch, text, found):
    monkeypatch.setattr("tools.mutants.__main__.ONE_TEST", 2)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "test_it.py").write_text(text)
    assert failing(tmp_path / "tree", {"test_it.py::test_a": 0.0}) == ([found] if found else [])


def test_less_than_85_percent_fails(capsys):
    fault = Fault(Path("ckptools/text.py"), 1, "", (ROOT / "ckptools/text.py").read_text())
    noticed, survived = Verdict(fault, True, "", 0.0), Verdict(fault, False, "", 0.0)
    assert report([noticed] * 17 + [survived] * 3) == 0
    assert report([noticed] * 16 + [survived] * 3) == 1
    assert "16 noticed    3 survived   84%" in capsys.readouterr().out
