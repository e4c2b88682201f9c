"""A run in which a test was skipped for a reason that nobody listed fails; so does one that hangs, or is empty."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST_FIRST

ROOT = Path(__file__).parent.parent


@pytest.fixture
def finished(tmp_path):
    """Run a test file of its own with this suite's configuration and `tests/conftest.py`."""

    def run(text: str, *before: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(f"import pytest, time\n{text}")
        options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, "-p", "tests.conftest", str(tmp_path / "test_it.py")]
        return subprocess.run([*before, *command], capture_output=True, text=True, timeout=100, cwd=ROOT)

    return run


def test_a_reason_that_is_not_listed_fails_the_run(finished):
    done = finished("def test_a(): pytest.skip('no time')\ndef test_b(): pass\n")
    assert done.returncode == 1 and "skipped 1: no time (FAILED" in done.stdout


def test_a_listed_reason_is_counted_and_passes(finished):
    done = finished("@pytest.mark.skipif(True, reason='no lzma here')\ndef test_a(): pass\n")
    assert done.returncode == 0 and "skipped 1: no lzma here (listed)" in done.stdout


def test_a_module_that_skips_itself_fails_the_run(finished):
    assert finished("pytest.skip('no lzma here', allow_module_level=True)\n").returncode != 0


def test_a_test_without_cases_fails_the_run(finished):
    done = finished("@pytest.mark.parametrize('x', [])\ndef test_a(x): pass\n")
    assert done.returncode != 0 and "test_a" in done.stdout


def test_a_hang_is_a_failure(finished):
    done = finished("@pytest.mark.timeout(0.2)\ndef test_a(): time.sleep(60)\n")
    assert done.returncode == 1 and "Timeout" in done.stdout


def test_ctrl_c_reaches_what_tests_start_where_a_shell_in_the_background_ignores_it(finished):
    sent = "def test_a(): import os, signal; pytest.raises(KeyboardInterrupt, os.kill, os.getpid(), signal.SIGINT)\n"
    assert finished(sent, "sh", "-c", "trap '' INT && exec \"$@\"", "sh").returncode == 0


def test_every_test_has_a_time_limit(pytestconfig):
    assert 0 < float(pytestconfig.getini("timeout")) <= 600


def test_the_files_that_begin_first_are_there() -> None:
    assert [name for name in LONGEST_FIRST if not (ROOT / name).is_file()] == []
