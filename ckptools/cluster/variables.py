"""The variables in which launchers state a rank's place, and schedulers the hosts of a job: two tables of them."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Variables = Mapping[str, str]

# Hosts are separated by commas, and so are the numbers inside brackets.
_HOST = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_LIST = re.compile(rf"{_HOST.pattern}(?:,{_HOST.pattern})*")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


# -- lists as schedulers write them -----------------------------------------------------------------------------------


def expand_hosts(text: str) -> list[str]:
    """Expand SLURM's short form: `node[01-03,07],login` names five hosts.

    The form is that of `scontrol show hostnames`; numbers keep their leading zeros, and a name may have several
    brackets.

    Raises:
        ValueError: the text is no such list.
    """
    if not _LIST.fullmatch(text):
        raise ValueError(f"{text!r} is no list of hosts")
    return [host for name in _HOST.findall(text) for host in _expand_name(name)]


def _expand_name(name: str) -> Iterator[str]:
    # Every second piece is what stood between brackets.
    pieces = re.split(r"\[([^\]]*)\]", name)
    choices = [list(_numbers(piece)) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1))


def expand_counts(text: str) -> list[int]:
    """Expand SLURM's tasks per node: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        ValueError: the text is no such list.
    """
    found = [_COUNT.fullmatch(part) for part in text.split(",")]
    if None in found:
        raise ValueError(f"{text!r} is no list of tasks per node")
    return [int(part[1]) for part in found if part for _ in range(int(part[2] or 1))]


def read_node_file(name: str) -> list[str]:
    """Read the file that PBS_NODEFILE names: a host per line, once for each process that it is to have.

    Raises:
        ValueError: it cannot be read, or is empty.
    """
    try:
        hosts = Path(name).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name!r} cannot be read: {error}") from error
    if not hosts:
        raise ValueError(f"{name!r} is empty")
    return hosts


# -- tables -----------------------------------------------------------------------------------------------------------


# Numbers of the job steps that are no step of srun: the batch script's, an interactive shell's and so on.
_FIRST_SPECIAL_STEP = 2**32 - 16


def _is_in_srun(variables: Variables) -> bool:
    """Whether this is a task of srun: not the batch script, which has SLURM_PROCID=0 too but is no step of its own."""
    return "SLURM_PROCID" in variables and srun_step(variables) is not None


def srun_step(variables: Variables) -> int | None:
    """The number of the step that srun started, of those of a job, which may run at the same time."""
    step = variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID", ""))
    return int(step) if step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP else None


def _is_in_blocks(variables: Variables) -> bool:
    """Whether srun fills one node after the other. Source: srun(1), `--distribution`, `SLURM_DISTRIBUTION`."""
    return variables.get("SLURM_DISTRIBUTION", "block").partition(":")[0] == "block"


def _has_local_pmi_rank(variables: Variables) -> bool:
    """Whether mpiexec started it: not `srun --mpi=pmi2`, which sets PMI_RANK too, beside SLURM's better variables."""
    return "PMI_RANK" in variables and (not _is_in_srun(variables) or any(name in variables for name in _PMI_LOCAL))


def _is_in_pbsdsh(variables: Variables) -> bool:
    """Whether pbsdsh started it: not the job script, which is task 1 on node 0."""
    own = (variables.get("PBS_TASKNUM", "1"), variables.get("PBS_NODENUM", "0"))
    return "PBS_NODEFILE" in variables and own != ("1", "0")


@dataclass(frozen=True)
class Starter:
    """A launcher of ranks and the variables in which it states each one's place; of several names the first set counts.

    Attributes:
        in_blocks: whether the ranks of a node follow each other.
        mpi: whether it is one of MPI's, which torch's backend of that name needs.
    """

    name: str
    applies: Callable[[Variables], bool]
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    in_blocks: Callable[[Variables], bool] = lambda _: True
    mpi: bool = False


_PMI_LOCAL = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID")

# The first that applies counts: torchrun may run inside srun, and mpirun inside a SLURM or PBS job.
# OMPI_COMM_WORLD_NODE_RANK is left out: it is a rank within the node, over all jobs there, not the rank of the node.
STARTERS = (
    Starter(
        "torchrun",
        lambda variables: "RANK" in variables or "WORLD_SIZE" in variables,
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK",),
    ),
    Starter(
        "mpirun of Open MPI",
        lambda variables: "OMPI_COMM_WORLD_RANK" in variables,
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        mpi=True,
    ),
    Starter(
        "mpiexec of MPICH, Intel MPI or PALS",
        _has_local_pmi_rank,
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=_PMI_LOCAL,
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        node_rank=("PALS_NODEID",),
        mpi=True,
    ),
    Starter(
        "srun of SLURM",
        _is_in_srun,
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        in_blocks=_is_in_blocks,
    ),
    Starter(
        "pbsdsh of PBS",
        _is_in_pbsdsh,
        rank=("PBS_VNODENUM", "PBS_NODENUM"),
        world_size=(),
    ),
)


def starter_of(variables: Variables) -> Starter | None:
    """What started this process as a rank; None where nothing did."""
    return next((starter for starter in STARTERS if starter.applies(variables)), None)


@dataclass(frozen=True)
class Allocation:
    """A scheduler, and the variables that say which hosts a job has.

    Attributes:
        job: has the number of the job.
        hosts: has the hosts, in the order of their node ranks.
        read: makes hosts of it; a host that is to have several processes may be there several times.
        tasks: has the number of processes on each host, where `hosts` does not say it.
        step: of several that the job may run at the same time, the number of the one that this process is in.
    """

    name: str
    job: tuple[str, ...]
    hosts: tuple[str, ...]
    read: Callable[[str], list[str]]
    tasks: tuple[str, ...] = ()
    step: Callable[[Variables], int | None] = lambda _: None


ALLOCATIONS = (
    Allocation(
        "SLURM",
        job=("SLURM_JOB_ID", "SLURM_JOBID"),
        hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        read=expand_hosts,
        tasks=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        step=srun_step,
    ),
    Allocation("PBS", job=("PBS_JOBID",), hosts=("PBS_NODEFILE",), read=read_node_file),
)


def restarts() -> int:
    """The number of times that torch's elastic launcher, ours or an outer torchrun, has started all ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
