"""`ckptools create` as a program: what it says, what it refuses, what it leaves behind."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptools.cli import app
from tests.training.conftest import Command
from tests.training.rank_files import ckptools


def leftovers(text: str) -> list[str]:
    """Command lines of running processes that mention `text`."""
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return [line.decode() for line in lines if text.encode() in line]


def test_it_says_what_ran_and_what_was_saved(fsdp1: Command) -> None:
    first, *steps, last = fsdp1.stdout.splitlines()
    assert first == ("3 processes, gloo, CPU; 3-block transformer, 174 k parameters, fsdp1, DecoupledAdamW + lambda")
    assert len(steps) == 5
    assert last.startswith(f"saved {fsdp1.out}/ep0-ba5-rank{{0..2}}.pt, {fsdp1.out}/full.pt (")


def test_the_hint_is_all_that_goes_to_stderr(fsdp1: Command) -> None:
    assert fsdp1.stderr == f"try: ckptools inspect {fsdp1.out}/ep0-ba5-rank0.pt\n"


def test_nothing_but_the_checkpoint_is_in_the_folder(fsdp1: Command) -> None:
    ranks = {f"ep0-ba5-rank{rank}.pt" for rank in range(3)}
    assert {path.name for path in fsdp1.out.iterdir()} == {*ranks, "full.pt"}


@pytest.mark.slow
def test_inside_torchrun_rank_0_speaks_for_all(torchrun: Command) -> None:
    assert torchrun.stdout.count("saved ") == 1
    assert torchrun.stdout.count("step 5") == 1
    assert {path.name for path in torchrun.out.iterdir()} == {f"ep0-ba5-rank{rank}.pt" for rank in range(3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--strategy", "fsdp2", "--layout", "snapshot"), "choose from composer, verl, dcp"),
        (("--strategy", "fsdp3"), "--strategy fsdp3 is not known; choose from ddp, fsdp1, fsdp2"),
        (("--width", "7"), "--width 7 does not divide by --heads 5; try --width 10"),
        (("--world-size", "0"), "--world-size 0: must be at least 1"),
    ],
)
def test_what_does_not_fit_together_is_one_line(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = ckptools("create", tmp_path / "run", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_world_size_that_contradicts_torchrun_is_refused(tmp_path: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "4"}
    done = ckptools("create", tmp_path / "run", "--world-size", 3, env=environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "torchrun started 4 ranks" in done.stderr


def test_an_existing_checkpoint_is_not_overwritten(fsdp1: Command) -> None:
    done = CliRunner().invoke(app, ["create", str(fsdp1.out)])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (4, "", 1)
    assert "ep0-ba5-rank0.pt" in done.stderr
    assert "--force" in done.stderr


@pytest.mark.slow
def test_a_rank_that_cannot_write_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = ckptools("create", tmp_path / "run", "--world-size", 2, preexec_fn=small_files_only)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert done.stderr.startswith(f"error: {tmp_path / 'run'}: could not be written")
    assert not (tmp_path / "run").exists()
