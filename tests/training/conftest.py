"""Real runs, each made once for all processes that run tests: starting ranks takes seconds."""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ckptools.training.options import CreateOptions, ModelSize
from ckptools.training.output import Created
from tests.training.forked import create_forked, run_ranks
from tests.training.matrix import train_and_save
from tests.training.rank_files import ckptools
from tests.training.started import PATIENCE
from tests.versions import torch_that_trains

Made = TypeVar("Made")
NO_DROPOUT = ModelSize(dropout=0.0)
FSDP1 = ("--strategy", "fsdp1", "--seed", "7", "--optimizer", "DecoupledAdamW", "--scheduler", "lambda")


@dataclass(frozen=True)
class Command:
    """A finished command and the folder that it wrote."""

    out: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs that all processes of this session share; xdist gives each a folder beside the others."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "runs"
    shared.mkdir(exist_ok=True)
    return shared


def once(out: Path, make: Callable[[Path], Made]) -> Made:
    """What `make(out)` answers in the process that comes first; others wait until it is done, and get the same."""
    answer = out.with_name(f"{out.name}.pickle")
    with out.with_name(f"{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answer.exists():
            answer.write_bytes(pickle.dumps(make(out)))
        made: Made = pickle.loads(answer.read_bytes())
        return made


def trained(out: Path, strategy: str, **options: Any) -> Created:
    torch_that_trains(strategy)
    return once(out, lambda out: create_forked(CreateOptions(out, strategy, **options)))


def training(name: str, strategy: str, **options: Any) -> Any:
    """A fixture: the run of this name in the shared folder."""
    return pytest.fixture(scope="session")(lambda folder: trained(folder / name, strategy, **options))


# What a single process learns: the measure for ranks that share all of their data.
one_rank = training("one", "ddp", world_size=1, layout="dcp", full=True, size=NO_DROPOUT)
tp = training("tp", "tp", world_size=2, full=True, size=NO_DROPOUT)
pipeline = training("pipeline", "pipeline", world_size=3, full=True, size=NO_DROPOUT)
moe = training("moe", "moe", world_size=2, full=True)
fsdp2_tp = training("fsdp2-tp", "fsdp2-tp", world_size=4, full=True)
hsdp_tp = training("hsdp-tp", "hsdp-tp", world_size=8, steps=2, full=True)
fsdp2 = training("fsdp2", "fsdp2", world_size=2, full=True)
ddp = training("ddp", "ddp", world_size=2, full=True)
snapshot = training("snapshot", "ddp", world_size=2, steps=2, layout="snapshot")
verl = training("verl", "fsdp1", world_size=2, steps=2, layout="verl")
dcp = training("dcp", "fsdp2", world_size=2, steps=2, layout="dcp")
dcp_of_three = training("dcp_of_three", "fsdp1", world_size=3, steps=2, layout="dcp")
verl_of_three = training("verl_of_three", "fsdp2", world_size=3, steps=2, layout="verl")


@pytest.fixture(scope="session")
def fsdp1(folder: Path) -> Command:
    """Three ranks of FSDP1, started by the command line."""

    def make(out: Path) -> Command:
        done = ckptools("create", out, "--world-size", 3, "--full", *FSDP1)
        assert done.returncode == 0, done.stderr
        return Command(out, done.stdout, done.stderr)

    return once(folder / "fsdp1", make)


@pytest.fixture(scope="session")
def torchrun(folder: Path) -> Command:
    """The same run inside an outer torchrun."""

    def make(out: Path) -> Command:
        start = ("torch.distributed.run", "--standalone", "--nproc_per_node", "3", "-m", "ckptools")
        command = [sys.executable, "-m", *start, "create", str(out), *FSDP1]
        # torchrun leaves its log folder behind; here that is swept with the rest.
        environment = os.environ | {"TMPDIR": str(folder)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
        assert done.returncode == 0, done.stderr
        return Command(out, done.stdout, done.stderr)

    return once(folder / "torchrun", make)


def train_once(out: Path, strategy: str, *layouts: str) -> Path:
    """Train with two ranks and save in several layouts; returns a folder with one for each, and `full.pt`."""
    torch_that_trains(strategy)

    def make(out: Path) -> Path:
        run_ranks(2, train_and_save, CreateOptions(out, strategy, steps=2), layouts)
        return out

    return once(out, make)


@pytest.fixture(scope="session")
def trainers_ddp(folder: Path) -> Path:
    """DDP in the layouts of the trainers."""
    return train_once(folder / "trainers-ddp", "ddp", "accelerate", "lightning", "fabric")


@pytest.fixture(scope="session")
def trainers_fsdp2(folder: Path) -> Path:
    """FSDP2 in the layouts of the trainers."""
    return train_once(folder / "trainers-fsdp2", "fsdp2", "composer-dcp", "accelerate", "lightning", "fabric")


@pytest.fixture(scope="session")
def torch_layouts(folder: Path) -> Path:
    """FSDP2 in the layouts that torch's own writers make, each as it is and with the options that it has."""
    return train_once(
        folder / "torch-layouts",
        "fsdp2",
        "dcp",
        "torchtitan",
        "olmo",
        "huggingface",
        'several=dcp:{"files_per_rank": "several"}',
        'async=dcp:{"async_save": true}',
        'safetensors=dcp:{"items": "safetensors"}',
        'async-titan=torchtitan:{"async_save": true, "files_per_rank": "several"}',
        'cut=huggingface:{"max_shard_size": "200KB"}',
        'joined=huggingface:{"save_distributed": true, "max_shard_size": "200KB"}',
        'shards=huggingface:{"save_distributed": true, "consolidated": false}',
    )
