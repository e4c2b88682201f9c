"""A command that is given a run's folder opens its newest whole checkpoint and says so, or asks which one is meant."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from ckptools.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three steps of two ranks, written one after the other; rank 1 of the newest is cut short."""
    for step in (2, 4, 6):
        for rank in range(2):
            path = tmp_path / f"ep0-ba{step}-rank{rank}.pt"
            torch.save({"model": {"w": torch.full((3,), float(step))}, "step": step, "seed": rank}, path)
            os.utime(path, (1.7e9 + step, 1.7e9 + step))
    os.truncate(tmp_path / "ep0-ba6-rank1.pt", 500)
    return tmp_path


@pytest.mark.parametrize("command", ["inspect", "verify", "tree", "stats"])
def test_the_newest_whole_one_is_opened_and_named(folder, command):
    done = run(command, folder)
    said = "of 3 checkpoints the newest whole one is opened: step 4, ep0-ba4-rank0.pt"
    broken = f"NOT WHOLE and newer: ep0-ba6-rank0.pt; ckptools ls {folder} lists them"
    assert done.exit_code == 0 and f"{said}; {broken}\n" in done.stderr
    assert json.loads(run(command, folder, "--json").stdout)["path"] == str(folder / "ep0-ba4-rank0.pt")


def test_it_is_consolidated_too(folder, tmp_path):
    (tmp_path / "out").mkdir()
    assert run("consolidate", folder, "-o", tmp_path / "out" / "m.pt", "--only", "model").exit_code == 0
    assert torch.load(tmp_path / "out" / "m.pt")["w"].tolist() == [4.0] * 3


def asked(folder: Path, *options: str) -> bool:
    done = run("inspect", folder, *options)
    return done.exit_code == 2 and f"ckptools ls {folder}" in done.stderr and not done.stdout


def test_the_user_is_asked_where_two_have_one_step(folder):
    for rank in range(2):
        shutil.copy(folder / f"ep0-ba4-rank{rank}.pt", folder / f"critic-ep0-ba4-rank{rank}.pt")
    assert asked(folder)


def test_the_user_is_asked_where_times_tell_another_order(folder):
    for rank in range(2):
        os.utime(folder / f"ep0-ba4-rank{rank}.pt", (1.6e9, 1.6e9))
    assert asked(folder)


def test_the_user_is_asked_where_a_name_tells_another_step(folder):
    for rank in range(2):
        (folder / f"ep0-ba2-rank{rank}.pt").rename(folder / f"ep0-ba5-rank{rank}.pt")
    assert asked(folder)


def test_the_user_is_asked_where_none_is_whole(folder):
    for step in (2, 4):
        os.truncate(folder / f"ep0-ba{step}-rank1.pt", 500)
    assert asked(folder)


def test_the_user_is_asked_where_options_are_for_one_checkpoint(folder):
    assert asked(folder, "--only-this-file")


def test_one_rank_file_is_not_taken_for_whole_where_other_steps_have_more(folder):
    (folder / "ep0-ba6-rank1.pt").unlink()
    assert "step 4, ep0-ba4-rank0.pt" in run("inspect", folder).stderr
    assert "not proven whole: one rank file; another checkpoint has 2 ranks" in run("ls", folder, "--json").stdout
