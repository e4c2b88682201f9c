"""`ckptools ls --watch`: a line for each change, and a clean end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from ckptools.cli.commands.ls import changes
from ckptools.ls.record import CheckpointRow
from ckptools.ls.text import change_line
from tests.schemas import SCHEMAS
from tests.truth import FIXTURES

DCP = FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt"
ROW = CheckpointRow("a", "a", "dcp", 5, True, 3, 3, 3, 10, True, "whole", "", (), "inspect", "2026-11-20T01:42:07Z")


class Watch:
    """A watch that runs, and the changes that it prints."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "ckptools", "ls", str(folder), "--watch", "--every", "0.1", "--jsonl"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
def following(folder: Path) -> Iterator[Watch]:
    """A watch that runs until the block ends."""
    watch = Watch(folder)
    try:
        yield watch
    finally:
        watch.process.kill()
        watch.process.communicate()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Path, Watch]]:
    (tmp_path / "run").mkdir()
    shutil.copytree(DCP, tmp_path / "run" / "step-5")
    with following(tmp_path / "run") as watch:
        yield tmp_path / "run", watch


def test_what_appears_is_whole_and_goes_is_told_and_an_interrupt_is_its_end(watched, tmp_path):
    folder, watch = watched
    first = watch.next()
    assert (first["event"], first["name"], first["whole"], first["newest_whole"]) == ("new", "step-5", True, True)
    shutil.copytree(DCP, tmp_path / "aside")
    (tmp_path / "aside" / ".metadata").rename(tmp_path / "metadata")
    (tmp_path / "aside").rename(folder / "step-6")
    second = watch.next()
    assert (second["event"], second["name"], second["whole"]) == ("new", "step-6", False)
    (tmp_path / "metadata").rename(folder / "step-6" / ".metadata")
    third = watch.next()
    assert (third["event"], third["name"], third["whole"]) == ("changed", "step-6", True)
    shutil.rmtree(folder / "step-6")
    while (told := watch.next())["event"] != "gone":
        assert told["name"] in ("step-5", "step-6")
    assert told["name"] == "step-6"
    schema = json.loads(SCHEMAS["ls"].read_text())
    change = Draft202012Validator({"$ref": "#/$defs/change", "$defs": schema["$defs"]})
    assert [error.message for one in (first, second, third, told) for error in change.iter_errors(one)] == []
    watch.process.send_signal(signal.SIGINT)
    assert watch.process.wait(timeout=60) == 0
    assert watch.process.stderr is not None and watch.process.stderr.read() == ""


def test_a_learning_rate_that_is_nan_is_printed_as_null(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=math.nan)
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": optimizer.state_dict()}, tmp_path / "step-1.pt")
    with following(tmp_path) as watch:
        assert watch.next()["lr"] == [None]


def test_it_ends_when_nobody_reads_it_any_more(tmp_path):
    (tmp_path / "run").mkdir()
    read, write = os.pipe()
    command = [sys.executable, "-m", "ckptools", "ls", str(tmp_path / "run"), "--watch", "--every", "0.1"]
    with subprocess.Popen(command, stdout=write) as process:
        os.close(write)
        os.close(read)
        assert process.wait(timeout=60) == 0


def test_one_object_is_no_form_of_a_watch(tmp_path):
    command = [sys.executable, "-m", "ckptools", "ls", str(tmp_path), "--watch", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--jsonl" in done.stderr


def told(before: CheckpointRow | None, now: CheckpointRow | None) -> list[str]:
    rows = [{} if row is None else {row.name: row} for row in (before, now)]
    return [event for event, _ in changes(*rows)]


def test_each_change_is_told_once():
    growing = replace(ROW, whole=False, verdict="1 rank missing", being_written=True)
    assert told(None, ROW) == ["new"] and told(ROW, None) == ["gone"] and told(ROW, ROW) == []
    assert told(replace(growing, being_written=False), growing) == ["being written"]
    assert told(growing, growing) == [] and told(growing, ROW) == ["changed"]
    assert told(ROW, replace(ROW, newest_whole=True)) == ["newest whole"]
    assert told(ROW, replace(ROW, whole=False, verdict="1 rank missing")) == ["changed"]


def test_a_checkpoint_without_ranks_is_counted_in_files():
    assert "  step 5  3/3 ranks  10 B  whole  a" in change_line("new", ROW)
    assert "  step 5  3 files  10 B  whole  a" in change_line("new", replace(ROW, ranks=0))
