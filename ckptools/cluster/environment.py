"""The environment of this process: who it is by the variables that launchers and schedulers set, and what torch needs.

torch asks for four variables (its `env://` way of initialization): RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Training scripts also use LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK, the rank of the node, as torchrun names them.
What starts processes otherwise has names of its own; two tables below say which they are.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ckptools.errors import UsageError

# -- the variables in which launchers state a rank's place, and schedulers the hosts of a job: two tables of them ------


Variables = Mapping[str, str]

# Hosts are separated by commas, and so are the numbers inside brackets.
_HOST = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_LIST = re.compile(rf"{_HOST.pattern}(?:,{_HOST.pattern})*")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


# -- lists as schedulers write them ------------------------------------------------------------------------------------


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


# -- tables ------------------------------------------------------------------------------------------------------------


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


# -- who this process is -----------------------------------------------------------------------------------------------


T = TypeVar("T")

DEFAULT_PORT = 29500
"""The port that torch's own launcher takes by default."""

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Setting:
    """A value and where it comes from."""

    value: str
    source: str


@dataclass
class ProcessInfo:
    """The facts about this process.

    Attributes:
        starter: what started it as a rank; None: nothing did.
        allocation: the job of a scheduler that it runs in.
        facts: by torch's names of the variables.
        hosts: of the job, each once, in the order of their node ranks; empty where no scheduler says so.
        counts: ranks of each node, by node rank, where those of a node follow each other; empty where that is not
            known, or they do not.
    """

    starter: Starter | None
    allocation: Allocation | None
    facts: dict[str, Setting] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """The variables that torch needs and nothing says."""
        return tuple(name for name in NEEDED if name not in self.facts)

    def number(self, name: str) -> int | None:
        """Return a fact as a number; None where it is not known."""
        return int(self.facts[name].value) if name in self.facts else None

    def export(self, variables: MutableMapping[str, str]) -> None:
        """Set the variables that torch and training scripts ask for."""
        variables.update({name: fact.value for name, fact in self.facts.items()})


def derive(variables: Variables, given: Mapping[str, Setting] | None = None) -> ProcessInfo:
    """Say who this process is; `given` is what the caller knows better, such as MASTER_ADDR from an option.

    Raises:
        UsageError: a variable has a value that makes no sense.
    """
    starter = starter_of(variables)
    allocation = next((each for each in ALLOCATIONS if _first(variables, each.job)), None)
    place = ProcessInfo(starter, allocation)
    if starter is not None:
        _take_numbers(place, starter, variables)
    hosts = _listed(variables, allocation.hosts, allocation.read) if allocation else []
    place.hosts = tuple(dict.fromkeys(hosts))
    slots = _slots(allocation, hosts, variables) if allocation else []
    place.facts.update(given or {})
    _complete_by_hosts(place, slots, variables)
    _complete_equal_nodes(place)
    if starter is not None and not starter.in_blocks(variables):
        place.counts = ()
    _complete_master(place, variables)
    rank, world_size = place.number("RANK"), place.number("WORLD_SIZE")
    if rank is not None and world_size is not None and rank >= world_size:
        source = place.facts["RANK"].source
        raise UsageError(None, f"{source} is {rank}, but a world of {world_size} has ranks 0 to {world_size - 1}")
    return place


def _first(variables: Variables, names: tuple[str, ...]) -> str | None:
    """Return the first of these names that is set, and not to nothing."""
    return next((name for name in names if variables.get(name)), None)


def _take_numbers(place: ProcessInfo, starter: Starter, variables: Variables) -> None:
    wanted = {
        "RANK": starter.rank,
        "WORLD_SIZE": starter.world_size,
        "LOCAL_RANK": starter.local_rank,
        "LOCAL_WORLD_SIZE": starter.local_world_size,
        "GROUP_RANK": starter.node_rank,
    }
    for fact, names in wanted.items():
        name = _first(variables, names)
        if name is not None:
            if not variables[name].isdecimal():
                raise UsageError(None, f"{name} is {variables[name]!r}, must be a number of 0 or more")
            place.facts[fact] = Setting(variables[name], name)


def _listed(variables: Variables, names: tuple[str, ...], read: Callable[[str], list[T]]) -> list[T]:
    """Read the list in the first of these variables that is set; empty where none is."""
    name = _first(variables, names)
    try:
        return [] if name is None else read(variables[name])
    except ValueError as error:
        raise UsageError(None, f"{name}: {error}") from error


def _slots(allocation: Allocation, hosts: list[str], variables: Variables) -> list[str]:
    """List the host of every rank, in their order; empty where nothing says how many ranks a host has."""
    if not allocation.tasks:
        return hosts
    counts = _listed(variables, allocation.tasks, expand_counts)
    # A step may have fewer nodes than the job whose counts these are.
    fitting = len(counts) == len(hosts)
    return [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)] if fitting else []


def _complete_by_hosts(place: ProcessInfo, slots: list[str], variables: Variables) -> None:
    """Derive what the starter does not say from the hosts of all ranks."""
    if place.starter is None or place.allocation is None:
        return
    source = _first(variables, place.allocation.hosts) or ""
    if not place.starter.world_size:
        place.facts.setdefault("WORLD_SIZE", Setting(str(len(slots)), f"lines of {source}"))
    rank = place.number("RANK")
    if rank is not None and place.number("WORLD_SIZE") == len(slots) and rank < len(slots):
        place.counts = tuple(Counter(slots).values())
        node_rank = place.number("GROUP_RANK")
        # srun may deal ranks out to the nodes in turn; then it says the node, and the list has another order.
        host = slots[rank] if node_rank is None or node_rank >= len(place.hosts) else place.hosts[node_rank]
        place.facts.setdefault("GROUP_RANK", Setting(str(place.hosts.index(host)), f"host {host} in {source}"))
        place.facts.setdefault("LOCAL_RANK", Setting(str(slots[:rank].count(host)), f"earlier ranks on {host}"))
        place.facts.setdefault("LOCAL_WORLD_SIZE", Setting(str(Counter(slots)[host]), f"ranks on {host}"))


def _complete_equal_nodes(place: ProcessInfo) -> None:
    """Derive the same where all nodes have equally many ranks."""
    rank, here, world_size = (place.number(name) for name in ("RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if not place.counts and here and world_size and world_size % here == 0:
        place.counts = (here,) * (world_size // here)
    if rank is not None and here:
        place.facts.setdefault("GROUP_RANK", Setting(str(rank // here), "RANK // LOCAL_WORLD_SIZE"))
        place.facts.setdefault("LOCAL_RANK", Setting(str(rank % here), "RANK % LOCAL_WORLD_SIZE"))


def _complete_master(place: ProcessInfo, variables: Variables) -> None:
    """Derive where the ranks meet: at the first host of the job, at a port that follows from the job's number."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if variables.get(name):
            place.facts.setdefault(name, Setting(variables[name], name))
    if place.hosts and place.allocation:
        source = _first(variables, place.allocation.hosts)
        place.facts.setdefault("MASTER_ADDR", Setting(place.hosts[0], f"first host of {source}"))
    elif place.starter and place.number("WORLD_SIZE") == (place.number("LOCAL_WORLD_SIZE") or -1):
        place.facts.setdefault("MASTER_ADDR", Setting("127.0.0.1", "all ranks are on this node"))
    if place.allocation:
        job, step = _first(variables, place.allocation.job) or "", place.allocation.step(variables) or 0
        source = f"15000 + last digits of {job}" + (" + number of the step" if step else "")
        place.facts.setdefault("MASTER_PORT", Setting(str(job_port(variables[job], step)), source))
    elif place.starter and place.starter is not STARTERS[0]:
        place.facts.setdefault("MASTER_PORT", Setting(str(DEFAULT_PORT), "torch's default"))
    port = place.facts.get("MASTER_PORT")
    if port and not (port.value.isdecimal() and 0 < int(port.value) < 2**16):
        raise UsageError(None, f"{port.source} is {port.value!r}, must be a port from 1 to 65535")


def missing_variables(names: Iterable[str]) -> str:
    """Say that variables are missing from the environment, and what to do."""
    listed = ", ".join(names)
    text = f"{listed} missing from the environment; let torchrun, srun or mpirun start the ranks, or set it"
    return f"{text}: ckptools create --explain-env says what was found"


def job_port(job: str, step: int = 0) -> int:
    """Make a port that every rank of a job's step agrees on: 15000 and the last four digits of the job's number.

    PyTorch Lightning does the same, so that two jobs on one node seldom collide; nor do two steps of a job, whose
    numbers are added. PBS adds its server's name to the number (`1234.server`), and brackets for an array
    (`1234[7].server`).
    """
    digits = "".join(filter(str.isdecimal, job.partition(".")[0]))
    return 15000 + (int(digits[-4:] or 0) + step) % 10000


def calm_torch() -> None:
    """Prepare the environment of this process and its children before torch is imported: threads, C++ warnings."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What goes wrong there is raised too; the text that is logged has a stack of C++ frames with it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def use_loopback() -> None:
    """Let gloo stay on this machine where all ranks are: its name may lead nowhere, or behind a firewall."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback and is_loopback(os.environ.get("MASTER_ADDR", "localhost")):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def is_loopback(address: str) -> bool:
    """Whether an address is this machine's own: then all ranks are on it, and need no other network."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(address) if ":" not in address else address).is_loopback
    except (OSError, ValueError):
        return False
