"""The same run under every launcher: real processes, and the same bytes from all of them."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.multiprocessing.spawn import ProcessRaisedException

from ckptools.errors import CkptoolsError, UsageError
from ckptools.training import create
from ckptools.training.options import CreateOptions, LaunchOptions
from ckptools.training.worker import record_failure
from tests.training.conftest import Command
from tests.training.forked import create_forked, forkserver, run_ranks
from tests.training.started import FOREIGN, PATIENCE, finish, free_job, free_port, port_of, same, start

# Variables that each scheduler would set for three ranks on two nodes, as far as they differ by rank.
LOCAL = (0, 1, 0)
NODE = (0, 0, 1)


def slurm(rank: int, job: int, _: Path) -> dict[str, object]:
    own = {"SLURM_PROCID": rank, "SLURM_LOCALID": LOCAL[rank], "SLURM_NODEID": NODE[rank]}
    step = {"SLURM_STEP_ID": 0, "SLURM_NTASKS": 3, "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    # Both names are of this machine.
    return own | step | {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost,127.0.0.1"}


def by_hand(rank: int, job: int, _: Path) -> dict[str, object]:
    return {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": port_of(job)}


def argument(rank: int, job: int, _: Path) -> dict[str, object]:
    """The world size is an argument, and no variable."""
    return {"RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port_of(job)}


ASKED: dict[str, Any] = {"seed": 7, "optimizer": "DecoupledAdamW", "scheduler": "lambda"}
"""As `FSDP1` has it."""


Scheduler = Callable[[int, int, Path], dict[str, object]]


def be_a_rank_of(scheduler: Scheduler, job: int, folder: Path, options: CreateOptions) -> None:
    """Be a rank that a scheduler has started: its variables are all that this process has; leaves what it ends with."""
    rank = int(os.environ["RANK"])
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    os.environ.update({name: str(value) for name, value in scheduler(rank, job, folder).items()})
    code, said = 0, ""
    try:
        create(options)
    except CkptoolsError as error:
        code, said = error.exit_code, str(error)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        code = ended.code
    (folder / f"ended-{rank}.json").write_text(json.dumps([code, said]))


def scheduled(scheduler: Scheduler, count: int, folder: Path, options: CreateOptions) -> list[tuple[int, str]]:
    """The exit code of each rank and what it says, of ranks that tests fork."""
    run_ranks(count, be_a_rank_of, scheduler, free_job(), folder, options)
    return [tuple(json.loads((folder / f"ended-{rank}.json").read_text())) for rank in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [slurm, by_hand, argument])
def test_ranks_of_any_scheduler_write_the_same_bytes(scheduler: Scheduler, fsdp1: Command, tmp_path: Path) -> None:
    asked = LaunchOptions(world_size_from="argument") if scheduler is argument else LaunchOptions()
    options = CreateOptions(tmp_path / "run", "fsdp1", 3 if scheduler is argument else None, launch=asked, **ASKED)
    assert scheduled(scheduler, 3, tmp_path, options) == [(0, "")] * 3
    assert same(tmp_path / "run", fsdp1.out)


@pytest.mark.slow
def test_under_torchrun_the_bytes_are_the_same(torchrun: Command, fsdp1: Command) -> None:
    assert same(torchrun.out, fsdp1.out)


@pytest.mark.slow
def test_ranks_that_tests_fork_write_the_same_bytes(fsdp1: Command, tmp_path: Path) -> None:
    create_forked(CreateOptions(tmp_path / "run", "fsdp1", 3, **ASKED))
    assert same(tmp_path / "run", fsdp1.out)


def fail_if_first() -> None:
    if os.environ["RANK"] == "0":
        raise ValueError("the first has failed")
    time.sleep(1000)


def test_a_forked_rank_that_fails_is_told_and_none_is_left() -> None:
    before = multiprocessing.active_children()
    with pytest.raises(ProcessRaisedException, match="the first has failed"):
        run_ranks(2, fail_if_first)
    assert multiprocessing.active_children() == before


@pytest.mark.slow
def test_torch_distributed_launch_passes_a_local_rank(tmp_path: Path) -> None:
    launch = ("torch.distributed.launch", "--nproc-per-node", "1", "--master-port", str(free_port()))
    command = [sys.executable, "-m", *launch, "-m", "ckptools", "create", str(tmp_path / "run"), "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ep0-ba1-rank0.pt"]


@pytest.mark.parametrize("spelling", ["--local-rank=1", "--local_rank=1"])
@pytest.mark.parametrize("before", [True, False])
def test_a_local_rank_is_taken_in_both_spellings_and_places(spelling: str, before: bool) -> None:
    words = [spelling, "create"] if before else ["create", spelling]
    command = [sys.executable, "-m", "ckptools", *words, "--explain-env"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_world_size_in_neither_place_is_a_missing_variable(tmp_path: Path) -> None:
    where = {"RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    [(code, _, said)] = finish([start(tmp_path / "run", variables=where)])
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("error: WORLD_SIZE missing from the environment")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--world-size", 3), "--world-size is 3, but torchrun started 4 ranks"),
        (("--nnodes", 2), "--nnodes: torchrun has started the ranks already; leave it out"),
        (("--launcher", "spawn"), "--launcher: torchrun has started the ranks already"),
        (("--nproc-per-node", "2"), "--nproc-per-node: torchrun has started the ranks already"),
    ],
)
def test_what_an_outer_launcher_has_decided_is_not_asked_for_again(
    arguments: tuple[object, ...], says: str, tmp_path: Path
) -> None:
    where = {"RANK": 0, "WORLD_SIZE": 4, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    [(code, _, said)] = finish([start(tmp_path / "run", *arguments, variables=where)])
    assert (code, said.count("\n")) == (2, 1)
    assert says in said


@pytest.mark.slow
def test_ranks_say_that_another_never_came(tmp_path: Path) -> None:
    options = CreateOptions(tmp_path / "run", launch=LaunchOptions(timeout=10))
    ended = scheduled(slurm, 2, tmp_path, options)
    assert [code for code, _ in ended] == [3, 3]
    assert [said.partition(":")[0] for _, said in ended] == [f"rank {rank} did not meet the others" for rank in (0, 1)]
    assert not (tmp_path / "run").exists()


def seed_by_rank(options: CreateOptions) -> None:
    """Be a rank, the first of its node, whose options are not those of the others."""
    os.environ["LOCAL_RANK"] = "0"
    with pytest.raises(UsageError, match="--seed is 0 on rank 0, but 8 on rank 1; give all the same"):
        create(dataclasses.replace(options, seed=8 * int(os.environ["RANK"])))


def test_options_that_differ_are_refused_by_all(tmp_path: Path) -> None:
    run_ranks(2, seed_by_rank, CreateOptions(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_mistake_is_said_by_one_rank_for_all(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ep0-ba5-rank0.pt").touch()
    ended = scheduled(by_hand, 3, tmp_path, CreateOptions(tmp_path / "run", **ASKED))
    assert [code for code, _ in ended] == [4, 4, 4]
    assert "".join(said for _, said in ended).count("already holds a checkpoint") == 1


def die_while_failing(file: str) -> None:
    os.environ["TORCHELASTIC_ERROR_FILE"] = file
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    record_failure(ValueError("x" * 100_000))


def test_a_rank_that_dies_while_it_writes_why_it_failed_leaves_no_part_of_it(tmp_path: Path) -> None:
    file = str(tmp_path / "error.json")
    rank = forkserver().Process(target=die_while_failing, args=(file,))
    rank.start()
    rank.join()
    assert rank.exitcode == -signal.SIGXFSZ
    assert ProcessFailure(0, 1, rank.exitcode, file).signal_name() == "SIGXFSZ"
