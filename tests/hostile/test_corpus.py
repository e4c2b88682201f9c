"""The hostile corpus through the commands: nothing runs, nothing outside is opened, nothing hangs, nothing lies."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.cases import CASES, REFUSED

pytestmark = pytest.mark.slow

SECONDS = 20
"""Of a processor that may be shared, which makes what takes 5 take 10; what is not bounded takes minutes."""

MEMORY_KIB = 1 << 20
PARTS = 2
FINE = {0: "done", 1: "problems found", 3: "unreadable", 4: "refused"}
"""Exit codes that a hostile input may have; 2 would blame the caller, 70 is a bug."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the driver tells of every case; two processes, for two cores."""
    roots = [tmp_path_factory.mktemp("corpus") for _ in range(PARTS)]
    with ThreadPoolExecutor(PARTS) as pool:
        parts = list(pool.map(_part, roots, range(PARTS)))
    cases = {name: results for part in parts for name, results in part["cases"].items()}
    return {"cases": cases, "ran": any(part["ran"] for part in parts)}


def _part(root: Path, index: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.hostile.driver", str(root), str(index), str(PARTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parent.parent.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


ANSWERS_ANYWAY = ("json", "doctor", "ls")
"""What says on stdout too that something cannot be opened: an object, or a table that has it as a row."""


STANDS_ANYWAY = ("report.html",)
"""What is written whatever is wrong, for it says what is."""


def test_every_case_was_run(told):
    assert told["cases"].keys() == CASES.keys()


def test_there_are_at_least_400_cases():
    assert len(CASES) >= 400


def test_nothing_that_any_case_names_was_imported_or_run(told):
    assert not told["ran"]


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_read_or_refused_in_the_way_that_every_command_promises(name, told):
    for command, result in told["cases"][name].items():
        assert result["code"] in FINE, (command, result["stderr"])
        assert result["opened"] == result["started"] == [], command
        assert result["seconds"] < SECONDS and result["memory_kib"] < MEMORY_KIB, command
        lines = [*result["stdout"].splitlines(), *result["stderr"].splitlines()]
        assert all(line.isprintable() for line in lines), (command, lines)
        if result["code"] in (3, 4):
            assert result["stderr"].startswith("error: "), command
            assert command in ANSWERS_ANYWAY or result["stdout"] == "", command
            assert result["stderr"].count("\nerror: ") == 0 and "Traceback" not in result["stderr"]
        if result["code"] != 0:
            assert [n for n in result["written"] if n not in STANDS_ANYWAY and not n.endswith(".json")] == [], command


def test_json_is_strict_whatever_the_file_says(told):
    found = [results["json"] for results in told["cases"].values() if "json" in results]
    shown = [json.loads(r["stdout"], parse_constant=pytest.fail) for r in found if r["code"] in (0, 1)]
    assert len(shown) > 100 and all(report["schema"] for report in shown)


def test_what_cannot_be_opened_is_not_whole_in_json_either(told):
    found = [results["json"] for results in told["cases"].values() if "json" in results]
    refused = [(json.loads(r["stdout"], parse_constant=pytest.fail), r["code"]) for r in found if r["code"] in (3, 4)]
    assert len(refused) > 100
    assert all(not report["whole"] and report["exit_code"] == code for report, code in refused)


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_itself_is_never_written(name, told):
    codes = {command: told["cases"][name][command]["code"] for command in ("consolidate", "safetensors")}
    assert 0 not in codes.values(), codes
