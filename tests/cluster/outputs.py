"""What each rank of a job runs: python -m tests.cluster.outputs SOURCE FOLDER writes outputs of every kind there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ckptools
from ckptools.cluster.environment import derive
from ckptools.cluster.ranks import joined
from ckptools.cluster.waiting import say_nothing

OUTPUTS = {
    "all.pt": {"check": True},
    "one.safetensors": {"manifest": True},
    "many.safetensors": {"max_shard_size": 5000, "dtype": "bfloat16"},
    "all.dcp": {"max_shard_size": 20_000, "check": True},
}


def write(source: Path, folder: Path) -> None:
    for name, options in OUTPUTS.items():
        ckptools.consolidate(source, folder / name, **options)


if __name__ == "__main__":
    with joined(derive(os.environ), "outputs", say_nothing):
        write(Path(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)
