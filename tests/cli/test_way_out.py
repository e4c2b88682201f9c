"""What inspect, verify and doctor propose for a broken checkpoint: the newest whole one, or the files to copy again."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.doctor import way_out
from tests.fake_world import write_sharded


def said(*arguments: object) -> str:
    """The commands that are proposed, on either stream."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    lines = (done.stdout + done.stderr).splitlines()
    return "\n".join(line for line in lines if line.strip().startswith(("next: ", "ckptools ")))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of two ranks each; a rank file of the newest is missing."""
    for step in (2, 4):
        write_sharded(tmp_path / f"step-{step}", 2, range(2), parameters=2)
    next((tmp_path / "step-4").glob("*rank1.pt")).unlink()
    return tmp_path


@pytest.mark.parametrize("command", ["inspect", "verify", "doctor"])
def test_the_newest_whole_step_is_written_instead(run, command):
    assert f"ckptools consolidate {run}/step-2" in said(command, run / "step-4")


@pytest.mark.parametrize("command", ["inspect", "verify", "doctor"])
def test_the_files_to_copy_again_are_listed_where_no_step_is_whole(run, command):
    next((run / "step-2").glob("*rank1.pt")).unlink()
    assert f"ckptools verify {run}/step-4 --to-fetch" in said(command, run / "step-4")


def test_a_whole_checkpoint_is_written_itself(run):
    assert f"next: ckptools consolidate {run}/step-2 -o" in said("inspect", run / "step-2")
    assert said("verify", run / "step-2") == ""


def test_a_folder_of_many_files_is_searched_by_doctor_alone(run):
    for number in range(way_out.MOST_ENTRIES):
        (run / f"{number}.log").touch()
    newest = run / "step-4"
    assert "step-2" not in said("inspect", newest) + said("verify", newest)
    assert f"ckptools consolidate {run}/step-2" in said("doctor", newest)


def test_bytes_that_only_verify_deep_reads_lead_to_a_list_that_reads_them(run):
    file = next((run / "step-2").glob("*rank1.pt"))
    data = bytearray(file.read_bytes())
    data[data.index(b"\0\0\x80?" * 2)] ^= 1
    file.write_bytes(bytes(data))
    assert f"ckptools verify {run}/step-2 --deep --to-fetch" in said("verify", run / "step-2", "--deep")
    assert said("verify", run / "step-2") == ""
