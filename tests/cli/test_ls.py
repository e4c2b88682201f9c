"""`ckptools ls`: what is printed, on which stream, and with which exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.ls.record import CheckpointRow, LeftOverRow, RunFolder, TrackerRow
from ckptools.model.records import Rows
from tests.truth import FIXTURES

DCP = FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt"


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["ls", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints of the same step: of the second a file is missing, and `latest` names it."""
    for name in ("a-step", "b-step"):
        shutil.copytree(DCP, tmp_path / name)
    next((tmp_path / "b-step").glob("__1_*.distcp")).unlink()
    (tmp_path / "latest").write_text("b-step\n")
    return tmp_path


def test_it_says_which_is_the_newest_whole_one_and_what_is_wrong_with_the_others(folder):
    code, stdout, stderr = run(str(folder))
    lines = stdout.splitlines()
    assert code == 1 and lines[0] == f"2 checkpoints in {folder}; newest whole: step 5, a-step"
    row = {line.split()[-1] if "points" not in line else "b-step": line for line in lines[4:6]}
    assert any("  whole  " in line and "a-step" in line and "<- newest whole" in line for line in lines[4:6]), row
    assert any("  NOT WHOLE  " in line and "b-step" in line and "latest points here" in line for line in lines[4:6])
    assert "step 5, b-step: CK001" in stdout and "tracker latest: CK016 names b-step, which is not whole" in stdout
    assert f"next: ckptools inspect {folder}/a-step" in stderr and "every rank of step 5 was read" in stderr


def test_all_whole_is_code_0_and_a_folder_without_any_code_3(folder, tmp_path):
    shutil.rmtree(folder / "b-step")
    (folder / "latest").unlink()
    assert run(str(folder))[0] == 0
    (tmp_path / "empty").mkdir()
    code, stdout, stderr = run(str(tmp_path / "empty"))
    assert (code, stdout, stderr.count("\n")) == (3, "", 1) and "no checkpoint" in stderr


def test_nothing_that_can_be_opened_is_code_3_and_still_an_answer(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"PK\3\4 and no more")
    code, stdout, _ = run(str(tmp_path), "--json")
    answer = json.loads(stdout)
    assert (code, answer["ok"], answer["newest_whole"]) == (3, False, None)
    assert answer["rows"][0]["verdict"] == "NOT WHOLE: cannot be opened" and answer["rows"][0]["why"]


@pytest.mark.slow
def test_rows_are_sorted_and_limited_as_everywhere(folder):
    _, stdout, _ = run(str(folder), "--sort", "name", "--jsonl")
    assert [json.loads(line)["name"] for line in stdout.splitlines()] == ["a-step", "b-step"]
    _, stdout, _ = run(str(folder), "--sort", "-name", "--limit", "1")
    assert "b-step" in stdout and "1 more (--limit 0: all of them)" in stdout
    assert json.loads(run(str(folder), "--limit", "1", "--json")[1])["checkpoints"] == 2
    code, _, stderr = run(str(folder), "--sort", "colour")
    assert code == 2 and "there is no such column" in stderr


@pytest.mark.parametrize("word", ["--only-this-file", "--ranks=x{rank}.pt"])
def test_what_goes_with_one_checkpoint_is_refused(word, folder):
    code, _, stderr = run(str(folder), word)
    assert code == 2 and "goes with one checkpoint" in stderr
    assert word.partition("=")[0] not in run("--help-all")[1] and "--salvage" in run("--help-all")[1]


def test_a_folder_of_several_of_one_step_leads_here(folder):
    shutil.copytree(DCP, folder / "step-7")
    (folder / "latest").unlink()
    (folder / "b-step").rename(folder / "step-6")
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert result.exit_code == 2 and f"ckptools ls {folder}" in result.stderr


def made(name: str) -> RunFolder:
    why = f"CK001  rank 1  no file {name} " + "and a long story " * 20
    row = CheckpointRow(name, name, "dcp", 5, False, 3, 4, 3, 10, False, f"1 {name}", why, ("CK001",), "inspect", None)
    tracker = TrackerRow(name, None, None, "error", f"CK016 names {name}")
    left = LeftOverRow(name, 5, "2026-11-20T01:42:07Z")
    return RunFolder(Path(name), False, Rows([row] * 50), 50, None, "step", Rows([tracker]), Rows([left]), (name,))


def test_ranks_of_one_file_of_several_and_of_none_that_opens_are_told_apart(folder):
    torch.save({"model": {"w": torch.ones(2)}, "step": 4}, folder / "one.pt")
    (folder / "two.pt").write_bytes(b"PK\3\4 and no more")
    (folder / "old.tmp").write_bytes(bytes(2048))
    lines = run(str(folder))[1].splitlines()
    expected = {"one.pt": " one file ", "two.pt": " 1 file ", "a-step": " 3/3 ", "b-step": " 2/3 "}
    for name, cell in expected.items():
        assert cell in next(line for line in lines[3:8] if name in line), name
    assert any("CK008 left over from a write, or still being written: old.tmp (2.0 KiB, " in line for line in lines)


@pytest.mark.slow
def test_it_says_whether_checksums_were_compared(folder):
    assert "every rank of step 5 was read;" in run(str(folder))[2]
    assert "every rank of step 5 was read and compared with its checksums;" in run(str(folder), "--deep")[2]
