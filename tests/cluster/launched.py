"""ckptools on several ranks, as torchrun and srun start them; here all on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.training.started import PATIENCE, free_job, free_port

TORCHRUN = Path(sys.executable).with_name("torchrun")

CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_", "TORCHELASTIC"))
}


def torchrun(*words: object, tasks: Sequence[int], rdzv: str = "static") -> list[str]:
    """Run `torchrun ... WORDS` on several nodes with so many tasks each; return the stdout of each.

    The nodes have numbers, or number themselves where `rdzv`, the way in which they meet, is `c10d`.

    Raises:
        AssertionError: one failed.
    """
    port, started = free_port(), []
    for node, nproc in enumerate(tasks):
        own = ["--nnodes", len(tasks), "--nproc-per-node", nproc]
        if rdzv == "static":
            meet = ["--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port]
        else:
            meet = ["--rdzv-backend", rdzv, "--rdzv-id", "a", "--rdzv-endpoint", f"127.0.0.1:{port}"]
            meet += ["--local-addr", "127.0.0.1"]
        started.append(_started([str(TORCHRUN), *map(str, (*own, *meet, *words))], {"OMP_NUM_THREADS": "1"}))
    done = [process.communicate(timeout=PATIENCE) for process in started]
    assert [process.returncode for process in started] == [0] * len(tasks), done
    return [out for out, _ in done]


def srun(
    *words: object, hosts: str = "localhost", tasks: Sequence[int] = (2,), cyclic: bool = False, **variables: object
) -> list[subprocess.Popen[str]]:
    """Start `ckptools WORDS` in the tasks of a step of SLURM, by the variables that srun sets; see srun(1).

    Args:
        words: after `ckptools`.
        hosts: of the step, in SLURM's short form; all are this machine.
        tasks: of each host.
        cyclic: deal the tasks out to the hosts in turn, instead of filling one after the other.
        variables: others.
    """
    places = [(node, local) for node, count in enumerate(tasks) for local in range(count)]
    if cyclic:
        places.sort(key=lambda place: place[::-1])
    common = {
        "SLURM_JOB_ID": free_job(), "SLURM_STEP_ID": 0, "SLURM_NTASKS": len(places), "SLURM_NPROCS": len(places),
        "SLURM_STEP_NUM_TASKS": len(places), "SLURM_JOB_NODELIST": hosts, "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks)), "SLURM_DISTRIBUTION": "cyclic" if cyclic else "block",
        # where srun itself runs, which may be a machine that nodes do not reach
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1", "SLURM_SRUN_COMM_HOST": "192.0.2.1", **variables,
    }  # fmt: skip
    command = [sys.executable, "-m", "ckptools", *map(str, words)]
    own = [{"SLURM_PROCID": n, "SLURM_NODEID": node, "SLURM_LOCALID": local} for n, (node, local) in enumerate(places)]
    return [_started(command, common | numbers) for numbers in own]


def _started(command: Sequence[str], variables: dict[str, object]) -> subprocess.Popen[str]:
    environment = CLEAN | {name: str(value) for name, value in variables.items()}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment
    )


def ended(started: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each, once all have ended."""
    said = [process.communicate(timeout=PATIENCE) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]
