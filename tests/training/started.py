"""Commands that run at the same time, as on several nodes or under a scheduler."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from tests.training.rank_files import load, local_tensors

# Seconds in which any of these runs ends on a machine that has much else to do.
PATIENCE = 240

# What launchers and schedulers set must come from the test alone.
FOREIGN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_",
    "SLURM_",
    "PBS_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "TORCHELASTIC",
)


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Tell whether a port can be had."""
    try:
        socket.create_server(("localhost", port)).close()
    except OSError:
        return False
    return True


def free_job() -> int:
    """A number of a job whose port nobody has now."""
    return next(job for job in random.sample(range(120000, 130000), 1000) if is_free(port_of(job)))


def port_of(job: int) -> int:
    """Where the ranks of a job's first step meet."""
    return 15000 + job % 10000


def start(*arguments: object, variables: Mapping[str, object] | None = None) -> subprocess.Popen[str]:
    """Start `ckptools create` with these arguments, and with these variables in its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    environment |= {name: str(value) for name, value in (variables or {}).items()}
    command = [sys.executable, "-m", "ckptools", "create", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment
    )


def finish(processes: Iterable[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait for all of them; returns exit code, stdout and stderr of each, this without its lines about waiting.

    On a busy machine every process may have to wait for the others.
    """
    ended = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
        kept = [line for line in err.splitlines(keepends=True) if not line.startswith("waiting for ")]
        ended.append((process.returncode, out, "".join(kept)))
    return ended


def children(pid: int) -> list[int]:
    """Processes that this one has started and that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It ended meanwhile.
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def contents(folder: Path) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Every tensor that the rank files of composer's layout hold, by file."""
    return {path.name: list(local_tensors(load(path))) for path in sorted(folder.glob("*-rank*.pt"))}


def same(one: Path, other: Path) -> bool:
    """Tell whether two folders hold the same ranks with the same tensors, bit for bit."""
    first, second = contents(one), contents(other)
    assert first
    return first.keys() == second.keys() and all(
        len(first[name]) == len(second[name])
        and all(
            left == right and a.dtype == b.dtype and torch.equal(a, b)
            for (left, a), (right, b) in zip(first[name], second[name], strict=True)
        )
        for name in first
    )
