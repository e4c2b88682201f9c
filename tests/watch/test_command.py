"""`ckptools watch` on the command line: events, exit codes, commands, figures, and a clean end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.ls.record import CheckpointRow, change_line
from tests.schemas import SCHEMAS
from tests.watch.runs import flip, save

ROW = CheckpointRow("a", "a", "dcp", 5, True, 3, 3, 3, 10, True, "whole", "", (), "inspect", "2026-11-20T01:42:07Z")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(tmp_path / "run", 2)
    return tmp_path / "run"


def command(run: Path, *words: object) -> list[str]:
    state = [] if "--state" in words else ["--state", str(run.parent / "state.json")]
    return [sys.executable, "-m", "ckptools", "watch", str(run), *state, *map(str, words)]


def once(run: Path, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    full = command(run, "--once", "--deep", *words)
    return subprocess.run(full, capture_output=True, text=True, timeout=120, env=os.environ | env)


def events(done: subprocess.CompletedProcess[str]) -> list[tuple[str, int | None]]:
    return [(row["event"], row["step"]) for row in map(json.loads, done.stdout.splitlines())]


class Watch:
    """A watch that runs, and the events that it prints."""

    def __init__(self, run: Path, *words: str) -> None:
        full = command(run, "--every", "0.1", "--jsonl", "--deep", *words)
        self.process = subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # the test has ended, and closed it
            for line in self.process.stdout:
                self.lines.put(line)

    def next(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.lines.get(timeout=60))
        return found


@contextlib.contextmanager
def watching(run: Path, *words: str) -> Iterator[Watch]:
    """A watch that runs until the block ends."""
    watch = Watch(run, *words)
    try:
        yield watch
    finally:
        watch.process.kill()
        watch.process.communicate()


@pytest.mark.slow
def test_what_appears_is_proven_or_a_problem_and_an_interrupt_is_the_end(run):
    with watching(run, "--settle", "0") as watch:
        seen = [watch.next()]
        flip(save(run.parent / "aside", 4)).rename(run / "step-4.pt")
        while seen[-1]["event"] != "problem":
            seen.append(watch.next())
        (run / "step-4.pt").unlink()
        seen.append(watch.next())
        told = [(one["event"], one["step"]) for one in seen if one["event"] != "being written"]
        assert told == [("proven", 2), ("problem", 4), ("gone", None)]
        schema = json.loads(SCHEMAS["watch"].read_text())
        row = Draft202012Validator({"$ref": "#/$defs/row", "$defs": schema["$defs"]})
        assert [error.message for one in seen for error in row.iter_errors(one)] == []
        watch.process.send_signal(signal.SIGINT)
        assert watch.process.wait(timeout=60) == 1


@pytest.mark.slow
def test_an_interrupt_without_a_problem_is_code_0(run):
    with watching(run) as watch:
        assert watch.next()["event"] == "proven"
        watch.process.send_signal(signal.SIGINT)
        assert watch.process.wait(timeout=60) == 0


@pytest.mark.slow
def test_a_folder_that_goes_is_told_once_and_watched_when_it_is_back(run):
    with watching(run) as watch:
        watch.next()
        run.rename(run.with_name("aside"))
        assert watch.next()["event"] == "unreachable"
        run.with_name("aside").rename(run)
        save(run, 4)
        assert (watch.next()["event"], run.name) == ("proven", "run")


@pytest.mark.slow
def test_it_ends_when_nobody_reads_it_any_more(run):
    read, write = os.pipe()
    with subprocess.Popen(command(run, "--every", "0.1"), stdout=write, stderr=subprocess.DEVNULL) as process:
        os.close(write)
        os.close(read)
        assert process.wait(timeout=60) == 0


@pytest.mark.slow
def test_once_ends_with_what_is_here_and_tells_nothing_twice(run):
    first, second = once(run, "--jsonl"), once(run, "--jsonl")
    assert (first.returncode, events(first), second.returncode, second.stdout) == (0, [("proven", 2)], 0, "")
    flip(save(run, 4))
    third, fourth = once(run, "--jsonl"), once(run)
    assert (third.returncode, events(third)) == (1, [("problem", 4)])
    assert fourth.returncode == 1 and "1 problem: step-4.pt" in fourth.stdout


@pytest.mark.slow
def test_once_waits_for_what_is_written_at_that_moment(run):
    save(run, 4, old=False)
    done = once(run, "--jsonl", "--settle", "1")
    assert (done.returncode, events(done)[-1]) == (0, ("proven", 4))


def test_a_folder_that_is_not_there_is_code_3(tmp_path):
    done = once(tmp_path / "nowhere")
    assert (done.returncode, done.stdout, done.stderr.count("error:")) == (3, "", 1)


@pytest.mark.slow
def test_a_folder_that_is_not_there_yet_is_waited_for_and_said_once(tmp_path):
    later = tmp_path / "later"
    with watching(later, "--settle", "0") as watch:
        assert watch.process.stderr is not None
        assert watch.process.stderr.readline() == f"waits for {later}, which is not there yet; Ctrl-C ends\n"
        time.sleep(0.5)  # several looks
        save(later, 2)
        assert watch.next()["event"] in ("proven", "being written")
        watch.process.send_signal(signal.SIGINT)
        assert watch.process.wait(timeout=60) == 0
        assert "waits for" not in watch.process.stderr.read()


@pytest.mark.slow
def test_an_interrupt_while_the_folder_is_waited_for_is_code_0(tmp_path):
    with watching(tmp_path / "never") as watch:
        assert watch.process.stderr is not None and watch.process.stderr.readline().startswith("waits for ")
        watch.process.send_signal(signal.SIGINT)
        assert watch.process.wait(timeout=60) == 0
        assert watch.process.stderr.read() == "" and not (tmp_path / "never").exists()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at first", "later"])
def test_a_path_that_is_a_file_is_an_error_and_not_waited_for(tmp_path, when):
    path = tmp_path / "run.pt"
    if when == "at first":
        path.touch()
    with watching(path) as watch:
        assert watch.process.stderr is not None
        if when == "later":
            assert watch.process.stderr.readline().startswith("waits for ")
            path.touch()
        assert watch.process.wait(timeout=60) == 2
        assert "is a file; the checkpoints around it" in watch.process.stderr.read()


def test_one_object_needs_once(run):
    done = subprocess.run(command(run, "--json"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--once" in done.stderr


@pytest.mark.slow
def test_options_that_fit_no_watch_are_refused_and_in_no_help(run):
    for words in (["--table-format", "tsv"], ["--ranks", "{rank}.pt"], ["--only-this-file"]):
        assert once(run, *words).returncode == 2
        assert words[0] not in CliRunner().invoke(app, ["watch", "--help-all"]).stdout


def test_a_state_inside_the_run_is_refused(run):
    done = once(run, "--state", run / "state.json")
    assert done.returncode == 2 and "outside" in done.stderr


@pytest.mark.slow
def test_a_second_watch_of_the_same_run_is_refused_and_may_have_a_state_of_its_own(run):
    with watching(run) as watch:
        watch.next()
        refused = once(run)
        assert refused.returncode == 4 and "another watch" in refused.stderr
        assert once(run, "--state", run.parent / "own.json").returncode == 0


@pytest.mark.slow
def test_a_command_gets_the_event_as_data_whatever_the_name_of_the_file(run, tmp_path):
    name = "step-4;touch pwned $(touch pwned) `touch pwned`.pt"
    flip(save(run, 4)).rename(run / name)
    script = tmp_path / "told.py"
    script.write_text(
        "import json, os, sys; json.dump([sys.argv[1:], os.environ['CKPTOOLS_PATH'], json.load(sys.stdin)['event']],"
        f"open({str(tmp_path / 'told.json')!r}, 'w'))"
    )
    full = command(run, "--once", "--deep", "--on-problem", f"{sys.executable} {script} 'two words'")
    assert subprocess.run(full, cwd=tmp_path, capture_output=True, timeout=60).returncode == 1
    assert json.loads((tmp_path / "told.json").read_text()) == [["two words"], str(run / name), "problem"]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.slow
def test_a_command_that_cannot_be_run_is_a_warning(run):
    flip(save(run, 4))
    done = once(run, "--on-problem", "no-such-program")
    assert done.returncode == 1 and "warning: --on-problem no-such-program: cannot be run" in done.stderr


@pytest.mark.slow
def test_figures_are_written_whole_and_name_the_newest_proven_step(run, tmp_path):
    flip(save(run, 4))
    once(run, "--prometheus", tmp_path / "x.prom", "--values")
    lines = dict(line.rsplit(" ", 1) for line in (tmp_path / "x.prom").read_text().splitlines() if line[0] != "#")
    label = f'{{run="{run}"}}'
    assert lines[f"ckptools_newest_proven_step{label}"] == "2" and lines[f"ckptools_newest_step{label}"] == "4"
    assert lines[f"ckptools_problems{label}"] == "1" and float(lines[f"ckptools_model_norm{label}"]) > 8


@pytest.mark.slow
def test_figures_that_cannot_be_written_are_a_warning(run, tmp_path):
    done = once(run, "--prometheus", tmp_path / "nowhere" / "x.prom")
    assert done.returncode == 0 and "warning: --prometheus" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_state_that_cannot_be_written_is_a_warning_and_everything_else_goes_on(run, tmp_path):
    (tmp_path / "no-folder").write_text("a file")
    done = once(run, "--jsonl", "--state", tmp_path / "no-folder" / "state.json")
    assert (done.returncode, events(done)) == (0, [("proven", 2)])
    assert "is not remembered" in done.stderr and "Traceback" not in done.stderr
    assert "remembers what was verified" not in done.stderr


@pytest.mark.slow
def test_a_watch_that_is_killed_leaves_a_state_that_is_whole_or_none(run):
    for step in range(4, 30, 2):
        save(run, step)
    state = run.parent / "state.json"
    for n in range(12):
        with subprocess.Popen(command(run, "--every", "0.05", "--deep"), stdout=subprocess.DEVNULL) as process:
            time.sleep(0.35 + 0.05 * n)
            process.kill()
        if state.exists():
            assert json.loads(state.read_text())["schema"] == "ckptools/watch-state/1"
            shutil.rmtree(run.parent / "copy", ignore_errors=True)
        assert CliRunner().invoke(app, command(run, "--once", "--deep")[3:]).exit_code == 0
        state.unlink()


def test_a_checkpoint_without_ranks_is_counted_in_files():
    from dataclasses import replace

    assert "  step 5  3/3 ranks  10 B  whole  a" in change_line("new", ROW)
    assert "  step 5  3 files  10 B  whole  a" in change_line("new", replace(ROW, ranks=0))
