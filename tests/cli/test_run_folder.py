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
from tests.cli.test_json_schemas import problems


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
    broken = f"NOT WHOLE and newer: ep0-ba6-rank0.pt; all of them: ckptools ls {folder}"
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


# -- the checkpoint of a step --------------------------------------------------------------------------------------


def refused(folder: Path, step: int, *options: object) -> str:
    done = run("inspect", folder, "--step", step, *options)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    return done.stderr


@pytest.mark.parametrize(
    "words", [["inspect"], ["verify"], ["tree"], ["stats"], ["show", "step"], ["doctor"]], ids=lambda words: words[0]
)
def test_the_checkpoint_of_a_step_is_opened(folder, words):
    done = run(words[0], folder, *words[1:], "--step", 2, "--json")
    assert json.loads(done.stdout)["path"] == str(folder / "ep0-ba2-rank0.pt")
    assert "newest whole" not in done.stderr


def test_the_checkpoint_of_a_step_is_consolidated_and_compared_and_opened_in_a_shell(folder, tmp_path):
    out = tmp_path / "out.pt"
    assert run("consolidate", folder, "--step", 2, "-o", out, "--only", "model").exit_code == 0
    assert torch.load(out)["w"].tolist() == [2.0] * 3
    assert json.loads(run("diff", folder, folder, "--step", 4, "--json").stdout)["a"]["step"] == 4
    assert run("match", folder, "--step", 4, "--to", out).exit_code == 0
    assert "step 2" in run("shell", folder, "--step", 2, "-c", "ck").stdout


def test_a_step_opens_a_broken_checkpoint_too_and_names_what_is_wrong(folder):
    done = run("inspect", folder, "--step", 6)
    assert done.exit_code == 1 and "NOT WHOLE: rank 1 cut short or damaged" in done.stdout


def test_a_step_opens_what_a_tracker_does_not_name(folder):
    (folder / "last_checkpoint").write_text("ep0-ba4-rank0.pt")
    assert "ep0-ba4-rank0.pt" in run("inspect", folder, "--json").stdout
    assert json.loads(run("inspect", folder, "--step", 2, "--json").stdout)["path"].endswith("ep0-ba2-rank0.pt")


def test_a_step_that_is_not_there_is_refused_with_the_steps_that_are(folder):
    assert refused(folder, 5) == f"error: {folder}: none of 3 checkpoints is of step 5: there are 2, 4, 6\n"


def test_checkpoints_whose_step_nobody_knows_are_named_beside_the_steps_that_are_there(folder):
    (folder / "model.pt").write_bytes((folder / "ep0-ba2-rank0.pt").read_bytes()[:300])
    said = "none of 4 checkpoints is of step 5: there are 2, 4, 6; no step is known of model.pt"
    assert refused(folder, 5) == f"error: {folder}: {said}\n"


def test_two_checkpoints_of_a_step_are_named(folder):
    for rank in range(2):
        shutil.copy(folder / f"ep0-ba4-rank{rank}.pt", folder / f"critic-ep0-ba4-rank{rank}.pt")
    said = refused(folder, 4)
    assert "2 checkpoints are of step 4: " in said and "critic-ep0-ba4-rank0.pt" in said and "name the one" in said


def test_a_name_that_contradicts_the_contents_is_not_taken_for_the_step(folder):
    for rank in range(2):
        (folder / f"ep0-ba2-rank{rank}.pt").rename(folder / f"ep0-ba5-rank{rank}.pt")
    assert "ep0-ba5-rank0.pt has it in its name, and states step 2" in refused(folder, 5)


def test_an_unreadable_checkpoint_of_a_step_is_opened_and_its_error_told(folder):
    for rank in range(2):
        os.truncate(folder / f"ep0-ba6-rank{rank}.pt", 500)
    done = run("inspect", folder, "--step", 6)
    assert done.exit_code == 3 and "ep0-ba6-rank0.pt: is cut short" in done.stderr


def test_a_path_of_one_checkpoint_must_be_of_the_step(folder):
    file = folder / "ep0-ba4-rank1.pt"
    assert run("inspect", file, "--step", 4).exit_code == 0
    assert refused(file, 6) == f"error: {file}: is of step 4, not of step 6\n"


def test_a_folder_that_is_one_checkpoint_must_be_of_the_step(folder):
    for step in (2, 6):
        for rank in range(2):
            (folder / f"ep0-ba{step}-rank{rank}.pt").unlink()
    assert run("inspect", folder, "--step", 4).exit_code == 0
    assert "is of step 4, not of step 2" in refused(folder, 2)


def test_a_checkpoint_without_a_step_is_of_none(tmp_path):
    torch.save({"model": {"w": torch.ones(3)}}, tmp_path / "model.pt")
    assert "states no step, so that nothing proves that it is of step 3" in refused(tmp_path / "model.pt", 3)


def test_an_empty_folder_has_no_step(tmp_path):
    done = run("inspect", tmp_path, "--step", 3)
    assert done.exit_code == 3 and "no checkpoint that ckptools knows in this folder" in done.stderr


@pytest.mark.parametrize("command", ["ls", "watch"])
def test_a_command_about_a_whole_run_takes_no_step(folder, command):
    done = run(command, folder, "--step", 2)
    assert done.exit_code == 2 and "--step goes with one checkpoint" in done.stderr


def test_a_browser_opens_the_step_and_refuses_another(folder):
    from ckptools.cli.commands.browse import _of_step
    from ckptools.cli.options import OpeningOptions
    from ckptools.errors import UsageError

    assert _of_step(str(folder), OpeningOptions(step=2)) == str(folder / "ep0-ba2-rank0.pt")
    assert _of_step(str(folder), OpeningOptions()) == str(folder)
    with pytest.raises(UsageError, match="is of step 4, not of step 2"):
        _of_step(str(folder / "ep0-ba4-rank0.pt"), OpeningOptions(step=2))


# -- every checkpoint ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_every_checkpoint_has_a_block_in_the_order_of_steps_and_the_worst_is_the_exit_code(folder, command):
    done = run(command, folder, "--all")
    blocks = [block.splitlines() for block in done.stdout.split("\n\n")]
    named = [f"step {step}, ep0-ba{step}-rank0.pt" for step in (2, 4, 6)]
    assert done.exit_code == 1 and [block[0] for block in blocks[:3]] == named
    assert blocks[0][1] == blocks[1][1] == "whole: all 2 rank files are here, all read"
    assert blocks[2][1] == "NOT WHOLE: rank 1 cut short or damaged" and "  rank 1  CK002  " in blocks[2][3]
    assert blocks[3] == [f"3 checkpoints in {folder}: 2 whole, 1 not whole"]


def test_every_checkpoint_that_is_sound_is_exit_code_0(folder):
    for rank in range(2):
        (folder / f"ep0-ba6-rank{rank}.pt").unlink()
    done = run("inspect", folder, "--all")
    assert done.exit_code == 0 and done.stdout.endswith(f"2 checkpoints in {folder}: 2 whole\n")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_every_checkpoint_is_a_json_object_on_a_line(folder, command):
    for rank in range(2):
        os.truncate(folder / f"ep0-ba6-rank{rank}.pt", 500)
    done = run(command, folder, "--all", "--json")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["path"] for answer in answers] == [str(folder / f"ep0-ba{step}-rank0.pt") for step in (2, 4, 6)]
    assert [problems(command, answer) for answer in answers] == [[], [], []]
    assert done.exit_code == answers[2]["exit_code"] == 3 and "1 cannot be opened" in done.stderr


def test_every_checkpoint_is_verified_as_deep_as_it_is_alone(folder):
    for rank in range(2):  # both copies alike, so that only their checksums tell
        damaged = folder / f"ep0-ba4-rank{rank}.pt"
        content = bytearray(damaged.read_bytes())
        content[content.index(torch.full((3,), 4.0).numpy().tobytes())] ^= 8
        damaged.write_bytes(content)
    assert "2 whole, 1 not whole" in run("verify", folder, "--all").stdout
    assert "CK004" in run("verify", folder, "--all", "--deep").stdout


def test_one_rank_file_is_not_called_whole_among_checkpoints_of_two_ranks(folder):
    (folder / "ep0-ba2-rank1.pt").unlink()
    done = run("inspect", folder, "--all")
    assert "step 2, ep0-ba2-rank0.pt\nnot proven whole: one rank file; another checkpoint has 2 ranks\n" in done.stdout
    assert "1 not proven whole, 1 whole, 1 not whole" in done.stdout
    assert json.loads(run("inspect", folder, "--all", "--json").stdout.splitlines()[0])["whole"] is None


def test_what_an_interrupted_write_left_is_named_below_every_checkpoint(folder):
    (folder / "ep0-ba8-rank0.pt.tmp").write_bytes(b"PK")
    said = run("inspect", folder, "--all").stdout
    assert "; left over from a write, or still being written: ep0-ba8-rank0.pt.tmp" in said


@pytest.mark.parametrize("option", ["--step=2", "--only-this-file", "--section=model", "--table-format=tsv", "another"])
def test_every_checkpoint_goes_with_no_option_for_one(folder, option):
    done = run("inspect", folder, "--all", option)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_every_checkpoint_of_a_file_or_an_empty_folder_is_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "is a file; the checkpoints around it: " in run("inspect", folder / "ep0-ba2-rank0.pt", "--all").stderr
    assert run("verify", tmp_path / "empty", "--all").exit_code == 3
