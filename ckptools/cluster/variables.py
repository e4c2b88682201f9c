"""Two tables: the variables by which each launcher tells a rank who it is, and each scheduler what a job was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptools.cluster import host_lists

Variables = Mapping[str, str]

# Numbers of the job steps that are no step of srun: the batch script's, an interactive shell's and so on.
_FIRST_SPECIAL_STEP = 2**32 - 16


def _has_torch_rank(variables: Variables) -> bool:
    return "RANK" in variables or "WORLD_SIZE" in variables


def _is_in_srun(variables: Variables) -> bool:
    """Tell srun's tasks from the batch script, which has SLURM_PROCID=0 too but is no step of its own."""
    return "SLURM_PROCID" in variables and srun_step(variables) is not None


def srun_step(variables: Variables) -> int | None:
    """The number of the step that srun started, of those of a job, which may run at the same time."""
    step = variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID", ""))
    return int(step) if step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP else None


def _is_in_blocks(variables: Variables) -> bool:
    """Whether srun fills one node after the other. Source: srun(1), `--distribution`, `SLURM_DISTRIBUTION`."""
    return variables.get("SLURM_DISTRIBUTION", "block").partition(":")[0] == "block"


def _has_local_pmi_rank(variables: Variables) -> bool:
    """Tell mpiexec from `srun --mpi=pmi2`, which sets PMI_RANK too; SLURM's own variables say more there."""
    return "PMI_RANK" in variables and (not _is_in_srun(variables) or any(name in variables for name in _PMI_LOCAL))


def _is_in_pbsdsh(variables: Variables) -> bool:
    """Tell what pbsdsh started from the job script, which is task 1 on node 0."""
    own = (variables.get("PBS_TASKNUM", "1"), variables.get("PBS_NODENUM", "0"))
    return "PBS_NODEFILE" in variables and own != ("1", "0")


@dataclass(frozen=True)
class Starter:
    """What starts ranks, and the variables by which it tells each who it is; of several names the first set counts.

    Attributes:
        in_blocks: whether the ranks of a node follow each other.
    """

    name: str
    applies: Callable[[Variables], bool]
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    in_blocks: Callable[[Variables], bool] = lambda _: True


_PMI_LOCAL = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID")

# The first that applies counts: torchrun may run inside srun, and mpirun inside a SLURM or PBS job.
# OMPI_COMM_WORLD_NODE_RANK is left out: it is a rank within the node, over all jobs there, not the rank of the node.
STARTERS = (
    Starter(
        "torchrun",
        _has_torch_rank,
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
    ),
    Starter(
        "mpiexec of MPICH, Intel MPI or PALS",
        _has_local_pmi_rank,
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=_PMI_LOCAL,
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        node_rank=("PALS_NODEID",),
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
        read=host_lists.expand,
        tasks=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        step=srun_step,
    ),
    Allocation("PBS", job=("PBS_JOBID",), hosts=("PBS_NODEFILE",), read=host_lists.read_node_file),
)
