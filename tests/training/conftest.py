"""Real runs, each made once for the whole session: starting ranks takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptools.training import Created, CreateOptions, ModelSize
from tests.training.forked import create_forked, run_ranks
from tests.training.matrix import train_and_save
from tests.training.rank_files import ckptools

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
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def one_rank(folder: Path) -> Created:
    """What a single process learns: the measure for ranks that share all of their data."""
    return create_forked(CreateOptions(folder / "one", "ddp", world_size=1, layout="dcp", full=True, size=NO_DROPOUT))


@pytest.fixture(scope="session")
def tp(folder: Path) -> Created:
    return create_forked(CreateOptions(folder / "tp", "tp", world_size=2, full=True, size=NO_DROPOUT))


@pytest.fixture(scope="session")
def pipeline(folder: Path) -> Created:
    return create_forked(CreateOptions(folder / "pipeline", "pipeline", world_size=3, full=True, size=NO_DROPOUT))


@pytest.fixture(scope="session")
def moe(folder: Path) -> Created:
    return create_forked(CreateOptions(folder / "moe", "moe", world_size=2, full=True))


@pytest.fixture(scope="session")
def fsdp2_tp(folder: Path) -> Created:
    return create_forked(CreateOptions(folder / "fsdp2-tp", "fsdp2-tp", world_size=4, full=True))


@pytest.fixture(scope="session")
def hsdp_tp(folder: Path) -> Created:
    return create_forked(CreateOptions(folder / "hsdp-tp", "hsdp-tp", world_size=8, steps=2, full=True))


@pytest.fixture(scope="session")
def fsdp1(folder: Path) -> Command:
    """Three ranks of FSDP1, started by the command line."""
    done = ckptools("create", folder / "fsdp1", "--world-size", 3, "--full", *FSDP1)
    assert done.returncode == 0, done.stderr
    return Command(folder / "fsdp1", done.stdout, done.stderr)


@pytest.fixture(scope="session")
def torchrun(folder: Path) -> Command:
    """The same run inside an outer torchrun."""
    start = ("torch.distributed.run", "--standalone", "--nproc_per_node", "3", "-m", "ckptools")
    command = [sys.executable, "-m", *start, "create", str(folder / "torchrun"), *FSDP1]
    # torchrun leaves its log folder behind; here that is swept with the rest.
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return Command(folder / "torchrun", done.stdout, done.stderr)


@pytest.fixture(scope="session")
def fsdp2(folder: Path) -> Created:
    return create_forked(CreateOptions(folder / "fsdp2", "fsdp2", world_size=2, full=True))


@pytest.fixture(scope="session")
def ddp(folder: Path) -> Created:
    return create_forked(CreateOptions(folder / "ddp", "ddp", world_size=2, full=True))


@pytest.fixture(scope="session")
def snapshot(folder: Path) -> Created:
    return create_forked(CreateOptions(folder / "snapshot", "ddp", world_size=2, steps=2, layout="snapshot"))


@pytest.fixture(scope="session")
def verl(folder: Path) -> Created:
    return create_forked(CreateOptions(folder / "verl", "fsdp1", world_size=2, steps=2, layout="verl"))


@pytest.fixture(scope="session")
def dcp(folder: Path) -> Created:
    return create_forked(CreateOptions(folder / "dcp", "fsdp2", world_size=2, steps=2, layout="dcp"))


def train_once(out: Path, strategy: str, *layouts: str) -> Path:
    """Train with two ranks and save in several layouts; returns a folder with one for each, and `full.pt`."""
    run_ranks(2, train_and_save, CreateOptions(out, strategy, steps=2), layouts)
    return out


@pytest.fixture(scope="session")
def trainers_ddp(folder: Path) -> Path:
    """DDP in the layouts of the trainers."""
    return train_once(folder / "trainers-ddp", "ddp", "accelerate", "lightning", "fabric")


@pytest.fixture(scope="session")
def trainers_fsdp2(folder: Path) -> Path:
    """FSDP2 in the layouts of the trainers."""
    return train_once(folder / "trainers-fsdp2", "fsdp2", "composer-dcp", "accelerate", "lightning", "fabric")


@pytest.fixture(scope="session")
def dcp_of_three(folder: Path) -> Created:
    return create_forked(CreateOptions(folder / "dcp_of_three", "fsdp1", world_size=3, steps=2, layout="dcp"))


@pytest.fixture(scope="session")
def verl_of_three(folder: Path) -> Created:
    return create_forked(CreateOptions(folder / "verl_of_three", "fsdp2", world_size=3, steps=2, layout="verl"))


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
