"""A rank that dies takes nothing with it: all begin again with the last whole checkpoint, to the same end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.errors import ReadError
from ckptools.training import output, resuming
from tests.training.dying import die_at
from tests.training.forked import ckptools_forked
from tests.training.rank_files import ckptools
from tests.training.test_command import leftovers
from tests.versions import torch_that_trains
from tools.demo import same, tensors

SMALL = ("--world-size", 2, "--vocab", 31, "--width", 20, "--layers", 1, "--context", 7, "--batch", 128)
ROOT = Path(__file__).parents[2]
RUN = (*SMALL, "--steps", 6, "--full", "--save-every", 2)


def create(out: Path, *options: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return ckptools("create", out, *RUN, *options, env=os.environ | environment)


def create_forked(
    out: Path, *options: object, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    return ckptools_forked(2, "create", out, *RUN, *options, before=before)


def same_end(out: Path, other: Path) -> bool:
    """Whether two runs had the same losses, and have the same bits in model and optimizer."""
    one, two = (dict(tensors(torch.load(folder / "full.pt"))) for folder in (out, other))
    known = output.read_losses(max(out.rglob("losses.csv"), key=lambda path: len(path.read_text())), 6)
    return (
        len(known) == 6
        and known == output.read_losses(other / "losses.csv", 6)
        and one.keys() == two.keys()
        and all(same(one[name], two[name]) for name in one)
    )


@pytest.fixture(scope="session")
def undisturbed(folder: Path) -> Path:
    torch_that_trains("fsdp2")
    done = create_forked(folder / "undisturbed", "--strategy", "fsdp2")
    assert done.returncode == 0, done.stderr
    return folder / "undisturbed"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["elastic", "spawn"])
def test_the_end_is_the_same_as_without_the_death_of_a_rank(launcher: str, undisturbed: Path, tmp_path: Path) -> None:
    dying = ("--kill", "1:5", "--max-restarts", 1, "--launcher", launcher)
    done = create(tmp_path / "run", "--strategy", "fsdp2", *dying)
    assert done.returncode == 0, done.stderr
    assert "rank 1 is killed\n" in done.stdout
    assert f"resumed from {tmp_path}/run/ep1-ba4-rank0.pt: step 4, epoch 1, sample 0\n" in done.stdout
    assert same_end(tmp_path / "run", undisturbed)
    assert leftovers(str(tmp_path)) == []


@pytest.fixture
def run(undisturbed: Path, tmp_path: Path) -> Path:
    """The checkpoints of steps 2 and 4, as a run left them that died then."""
    (tmp_path / "run").mkdir()
    for path in [*undisturbed.glob("*-ba2-*"), *undisturbed.glob("*-ba4-*"), undisturbed / "losses.csv"]:
        shutil.copy(path, tmp_path / "run")
    return tmp_path / "run"


def chosen(folder: Path) -> tuple[str, list[str]]:
    """The step of the checkpoint to go on from, and what was said."""
    said: list[str] = []
    found = resuming.newest_whole(resuming.found_at(folder), said.append)
    return found.name if found else "", said


def test_the_newest_whole_one_is_taken(run: Path) -> None:
    assert chosen(run) == ("ep1-ba4-rank0.pt", [])


def test_the_full_state_of_a_run_is_none_to_go_on_from(run: Path, undisturbed: Path) -> None:
    shutil.copy(undisturbed / "full.pt", run)
    assert chosen(run) == ("ep1-ba4-rank0.pt", [])
    for path in run.glob("*-rank*.pt"):
        path.unlink()
    with pytest.raises(ReadError, match="holds no checkpoint"):
        chosen(run)


def test_a_checkpoint_behind_a_link_is_one_of_the_users_own(run: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "step-4").symlink_to(run)
    assert chosen(tmp_path / "links")[0] == "ep1-ba4-rank0.pt"


def test_what_holds_no_model_is_passed_over_and_said(run: Path) -> None:
    for path in run.glob("*-ba4-*"):
        torch.save({"state": {"optimizers": {}}, "step": 4, "position": torch.zeros(2)}, path)
    step, (said,) = chosen(run)
    assert step == "ep0-ba2-rank0.pt"
    assert said.startswith(f"skipped {run}/ep1-ba4-rank0.pt: ")


def flip(path: Path) -> None:
    """Flip a bit in the middle, where tensors are."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: os.truncate(path, path.stat().st_size // 2), "CK002 rank 1 cut short or damaged"),
        (Path.unlink, "CK001 rank 1 missing"),
        (flip, "CK004 rank 1 damaged (bad CRC-32)"),
    ],
    ids=["cut", "missing", "a wrong bit"],
)
def test_a_broken_one_is_passed_over_and_said(damage: Callable[[Path], None], says: str, run: Path) -> None:
    damage(run / "ep1-ba4-rank1.pt")
    step, (said,) = chosen(run)
    assert step == "ep0-ba2-rank0.pt"
    assert said.startswith("skipped ")
    assert says in said


@pytest.mark.slow
def test_what_is_not_whole_is_not_gone_on_from(run: Path) -> None:
    for path in run.glob("*-rank1.pt"):
        path.unlink()
    done = create_forked(run, "--strategy", "fsdp2", "--resume", run)
    assert done.returncode == 4, done.stderr
    why = f"error: {run}/ep1-ba4-rank0.pt: is not whole, and no other checkpoint is there to go on from\n"
    assert (done.stderr.count(why), done.stdout.count("skipped ")) == (1, 2)


@pytest.mark.slow
def test_a_run_goes_on_in_its_own_folder(run: Path, undisturbed: Path) -> None:
    (run / "ep1-ba4-rank0.pt").unlink()
    done = create_forked(run, "--strategy", "fsdp2", "--resume", run)
    assert done.returncode == 0, done.stderr
    assert "skipped " in done.stdout
    assert f"resumed from {run}/ep0-ba2-rank0.pt: step 2, " in done.stdout
    assert same_end(run, undisturbed)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--kill", "1"), "--kill 1: expected RANK:STEP, such as 1:3"),
        (("--kill", "2:3"), "there is no rank 2 of 2"),
        (("--kill", "1:7"), "there is no step 7; --steps is 6"),
        (("--resume", "nowhere"), "nowhere: no such file or folder to go on from"),
        (("--save-every", 0), "--save-every 0: must be at least 1"),
        (("--max-restarts", -1), "--max-restarts -1: must be at least 0"),
    ],
)
def test_what_cannot_be_is_one_line(options: tuple[object, ...], says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["create", str(tmp_path / "run"), *map(str, (*RUN, *options))])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr
    assert not (tmp_path / "run").exists()


DYING = """
import os, signal, sys
from ckptools.training import output

moves = 0

def die_at(event, arguments):
    global moves
    moves += event == "os.rename"
    if event == "os.rename" and moves > {moves}:
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die_at)
output.finish(*map(output.Path, sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp1", "verl", "dcp"])
def test_a_set_that_was_moved_by_half_is_not_whole(layout: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    files = [path for path in request.getfixturevalue(layout).out.iterdir() if path.name != "full.pt"]
    for moves in range(1, len(files)):
        out, growing = tmp_path / str(moves), tmp_path / str(moves) / ".ckptools-1"
        growing.mkdir(parents=True)
        for path in files:
            shutil.copy(path, growing)
        done = subprocess.run(
            [sys.executable, "-c", DYING.format(moves=moves), str(growing), str(out)], capture_output=True, text=True
        )
        assert done.returncode == -9, done.stderr
        assert len([path for path in out.iterdir() if path.is_file()]) == moves
        with suppress(ReadError):  # which says that there is none
            assert chosen(out)[0] == ""


MOMENTS = [
    pytest.param("composer", 0, "os.rename", "rank0", 2, False, id="before the second is moved"),
    pytest.param("composer", 0, "os.rename", "rank1", 2, True, id="when the second is moved by half"),
    pytest.param("composer", 0, "open", "rank1", 2, False, id="before the second is on the disk"),
    pytest.param("dcp", 1, "open", "distcp", 2, False, id="while a rank begins to write"),
    pytest.param("dcp", 0, "os.rename", "step-4", 1, True, id="before a folder is moved"),
]
"""When a rank dies, and whether a run goes on to the end from there: once for each layout."""

NEWEST = {"composer": "ep0-ba2-rank0.pt", "dcp": "step-2"}
"""The checkpoint that is whole when the second is not."""


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "rank", "event", "name", "count", "goes_on"), MOMENTS)
def test_a_death_while_saving_leaves_nothing_that_looks_whole(
    layout: str, rank: int, event: str, name: str, count: int, goes_on: bool, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    asked = ("--strategy", "fsdp2", "--layout", layout)
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        create_forked(out, *asked, before=partial(die_at, rank, event, name, count))
    assert chosen(out)[0] == NEWEST[layout]
    if goes_on:
        done = create_forked(out, *asked, "--resume", out)
        assert done.returncode == 0, done.stderr
        assert ": step 2, " in done.stdout
        assert same_end(out, undisturbed)


@pytest.mark.slow
def test_a_launcher_says_in_one_line_that_a_rank_died_while_saving(tmp_path: Path) -> None:
    dying = f"from {die_at.__module__} import die_at; die_at(1, 'open', 'distcp', 2)"
    (tmp_path / "sitecustomize.py").write_text(dying)
    found = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = create(tmp_path / "run", "--strategy", "fsdp2", "--layout", "dcp", PYTHONPATH=found)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert "was killed by SIGKILL" in done.stderr
    assert chosen(tmp_path / "run")[0] == NEWEST["dcp"]
    assert leftovers(str(tmp_path)) == []
