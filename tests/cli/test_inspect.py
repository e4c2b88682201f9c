from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from ckptools.cli import app
from tests.truth import FIXTURES

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
RANK_0 = COMPOSER / "ep0-ba5-rank0.pt"


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


def process(*args: object, **more: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "ckptools", "inspect", *map(str, args)]
    return subprocess.run(command, capture_output=True, timeout=60, **more)


# -- real checkpoints --------------------------------------------------------------------------------------------


# -- whole or not ------------------------------------------------------------------------------------------------


# -- options -----------------------------------------------------------------------------------------------------


def test_a_section_can_be_named():
    assert "Timestamp.batch            5" not in run(RANK_0, "--section", "model")[1]
    assert "timestamp.Timestamp.batch            5" in run(RANK_0, "--section", "timestamp")[1]


def test_random_states_are_listed_and_who_holds_them_against_each_other_is_said():
    out = run(RANK_0, "--section", "rng")[1]
    assert re.search(r"\b0\.python\.1 +625 integers, crc [0-9a-f]{8}$", out, re.M)
    assert "0.numpy.2" in out and out.splitlines()[-1] == "which ranks have states of their own: ckptools show PATH rng"


def test_a_section_that_is_not_there_is_a_usage_error_that_lists_them():
    code, out, err = run(RANK_0, "--section", "modle")
    assert (code, out) == (2, "")
    assert "has no section 'modle'; it has model, optimizer" in err


def test_trust_is_refused_where_there_is_nothing_to_trust():
    code, _, err = run(RANK_0, "--trust")
    assert (code, "--engine torch" in err) == (2, True)


# -- hostile files -----------------------------------------------------------------------------------------------


# -- as a process ------------------------------------------------------------------------------------------------


def test_a_stream_that_knows_only_ascii_is_no_problem(tmp_path):
    path = tmp_path / "h\u00e9.pt"
    torch.save({"model": {"w": torch.ones(2)}, "\u6f22": {"\ud800": 1}, "step": 4}, path)
    done = process(path, env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin"})
    assert done.returncode == 0, done.stderr
    assert b"\\u6f22" in done.stdout and b"\\ud800" in done.stdout
    assert b"h\\xe9.pt" in done.stderr


def test_rules_that_cannot_be_read_are_an_error_where_none_are_needed_too(tmp_path):
    code, stdout, stderr = run(RANK_0, "--rules", tmp_path / "rules.json")
    assert (code, stdout, stderr.count("\n")) == (3, "", 1) and "rules.json: no such file" in stderr
    (tmp_path / "rules.json").write_text('{"*.weight": 1}')
    code, stdout, stderr = run(RANK_0, "--rules", tmp_path / "rules.json")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1) and "rules.json" in stderr


def test_a_save_without_the_file_that_is_written_last_has_not_ended_or_died(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt", tmp_path / "step-5"))
    (folder / ".metadata").unlink()
    for file in folder.iterdir():
        os.utime(file, (0, 0))  # a clone just made has files just written
    text = "which DCP writes last: the save has not ended, or it died, or the file was not copied"
    code, _, error = run(folder)
    assert code == 3 and error.rstrip().endswith(text)
    os.utime(folder / "__0_0.distcp")
    error = run(folder)[2]
    assert re.search(rf"{text}; last written \d+ s ago: it may not be finished$", error.rstrip())
