"""Who this process is, from the variables that launchers and schedulers set.

torch asks for four variables (its `env://` way of initialization): RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Training scripts also use LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK, the rank of the node, as torchrun names them.
What starts processes otherwise has names of its own; two tables below say which they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field

from ckptools.errors import UsageError
from ckptools.training.launchers import host_lists
from ckptools.training.launchers.options import DEFAULT_PORT

Variables = Mapping[str, str]

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Numbers of the job steps that are no step of srun: the batch script's, an interactive shell's and so on.
_FIRST_SPECIAL_STEP = 2**32 - 16


def _has_torch_rank(variables: Variables) -> bool:
    return "RANK" in variables or "WORLD_SIZE" in variables


def _is_in_srun(variables: Variables) -> bool:
    """Tell srun's tasks from the batch script, which has SLURM_PROCID=0 too but is no step of its own."""
    step = variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID", ""))
    return "SLURM_PROCID" in variables and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _has_local_pmi_rank(variables: Variables) -> bool:
    """Tell mpiexec from `srun --mpi=pmi2`, which sets PMI_RANK too; SLURM's own variables say more there."""
    return "PMI_RANK" in variables and (not _is_in_srun(variables) or any(name in variables for name in _PMI_LOCAL))


def _is_in_pbsdsh(variables: Variables) -> bool:
    """Tell what pbsdsh started from the job script, which is task 1 on node 0."""
    own = (variables.get("PBS_TASKNUM", "1"), variables.get("PBS_NODENUM", "0"))
    return "PBS_NODEFILE" in variables and own != ("1", "0")


@dataclass(frozen=True)
class Starter:
    """What starts ranks, and the variables by which it tells each who it is; of several names the first set counts."""

    name: str
    applies: Callable[[Variables], bool]
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()


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
    """

    name: str
    job: tuple[str, ...]
    hosts: tuple[str, ...]
    read: Callable[[str], list[str]]
    tasks: tuple[str, ...] = ()


ALLOCATIONS = (
    Allocation(
        "SLURM",
        job=("SLURM_JOB_ID", "SLURM_JOBID"),
        hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        read=host_lists.expand,
        tasks=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
    Allocation("PBS", job=("PBS_JOBID",), hosts=("PBS_NODEFILE",), read=host_lists.read_node_file),
)


@dataclass(frozen=True)
class Fact:
    """A value and where it comes from."""

    value: str
    source: str


@dataclass
class Place:
    """What is known of this process.

    Attributes:
        starter: what started it as a rank; None: nothing did.
        allocation: the job of a scheduler that it runs in.
        facts: by torch's names of the variables.
        hosts: of the job, each once, in the order of their node ranks; empty where no scheduler says so.
        counts: ranks of each node, by node rank; empty where that is not known.
    """

    starter: Starter | None
    allocation: Allocation | None
    facts: dict[str, Fact] = field(default_factory=dict)
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


def derive(variables: Variables, given: Mapping[str, Fact] | None = None) -> Place:
    """Say who this process is.

    Args:
        variables: the environment.
        given: what the caller knows better, such as MASTER_ADDR from an option.

    Raises:
        UsageError: a variable has a value that makes no sense.
    """
    starter = next((starter for starter in STARTERS if starter.applies(variables)), None)
    allocation = next((each for each in ALLOCATIONS if _first(variables, each.job)), None)
    place = Place(starter, allocation)
    if starter is not None:
        _take_numbers(place, starter, variables)
    hosts = _hosts(allocation, variables) if allocation else []
    place.hosts = tuple(dict.fromkeys(hosts))
    slots = _slots(allocation, hosts, variables) if allocation else []
    place.facts.update(given or {})
    _complete_ranks(place, slots, variables)
    _complete_master(place, variables)
    _check_range(place)
    return place


def _first(variables: Variables, names: tuple[str, ...]) -> str | None:
    """Return the first of these names that is set, and not to nothing."""
    return next((name for name in names if variables.get(name)), None)


def _take_numbers(place: Place, starter: Starter, variables: Variables) -> None:
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
            place.facts[fact] = Fact(variables[name], name)


def _hosts(allocation: Allocation, variables: Variables) -> list[str]:
    name = _first(variables, allocation.hosts)
    try:
        return [] if name is None else allocation.read(variables[name])
    except ValueError as error:
        raise UsageError(None, f"{name}: {error}") from error


def _slots(allocation: Allocation, hosts: list[str], variables: Variables) -> list[str]:
    """List the host of every rank, in their order; empty where nothing says how many ranks a host has."""
    if not allocation.tasks:
        return hosts
    name = _first(variables, allocation.tasks)
    try:
        counts = [] if name is None else host_lists.expand_counts(variables[name])
    except ValueError as error:
        raise UsageError(None, f"{name}: {error}") from error
    # A step may have fewer nodes than the job whose counts these are.
    fitting = len(counts) == len(hosts)
    return [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)] if fitting else []


def _complete_ranks(place: Place, slots: list[str], variables: Variables) -> None:
    """Derive what the starter does not say from the hosts of all ranks, or from nodes that have equally many."""
    if place.starter is None or place.allocation is None:
        return _complete_equal_nodes(place)
    source = _first(variables, place.allocation.hosts) or ""
    if not place.starter.world_size:
        place.facts.setdefault("WORLD_SIZE", Fact(str(len(slots)), f"lines of {source}"))
    rank = place.number("RANK")
    if rank is not None and place.number("WORLD_SIZE") == len(slots) and rank < len(slots):
        place.counts = tuple(Counter(slots).values())
        node_rank = place.number("GROUP_RANK")
        # srun may deal ranks out to the nodes in turn; then it says the node, and the list has another order.
        host = slots[rank] if node_rank is None or node_rank >= len(place.hosts) else place.hosts[node_rank]
        place.facts.setdefault("GROUP_RANK", Fact(str(place.hosts.index(host)), f"host {host} in {source}"))
        place.facts.setdefault("LOCAL_RANK", Fact(str(slots[:rank].count(host)), f"earlier ranks on {host}"))
        place.facts.setdefault("LOCAL_WORLD_SIZE", Fact(str(Counter(slots)[host]), f"ranks on {host}"))
    return _complete_equal_nodes(place)


def _complete_equal_nodes(place: Place) -> None:
    rank, here, world_size = (place.number(name) for name in ("RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if not place.counts and here and world_size and world_size % here == 0:
        place.counts = (here,) * (world_size // here)
    if rank is not None and here:
        place.facts.setdefault("GROUP_RANK", Fact(str(rank // here), "RANK // LOCAL_WORLD_SIZE"))
        place.facts.setdefault("LOCAL_RANK", Fact(str(rank % here), "RANK % LOCAL_WORLD_SIZE"))


def _complete_master(place: Place, variables: Variables) -> None:
    """Derive where the ranks meet: at the first host of the job, at a port that follows from the job's number."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if variables.get(name):
            place.facts.setdefault(name, Fact(variables[name], name))
    if place.hosts and place.allocation:
        source = _first(variables, place.allocation.hosts)
        place.facts.setdefault("MASTER_ADDR", Fact(place.hosts[0], f"first host of {source}"))
    elif place.starter and place.number("WORLD_SIZE") == (place.number("LOCAL_WORLD_SIZE") or -1):
        place.facts.setdefault("MASTER_ADDR", Fact("127.0.0.1", "all ranks are on this node"))
    if place.allocation:
        job = _first(variables, place.allocation.job) or ""
        place.facts.setdefault("MASTER_PORT", Fact(str(job_port(variables[job])), f"15000 + last digits of {job}"))
    elif place.starter and place.starter is not STARTERS[0]:
        place.facts.setdefault("MASTER_PORT", Fact(str(DEFAULT_PORT), "torch's default"))
    port = place.facts.get("MASTER_PORT")
    if port and not (port.value.isdecimal() and 0 < int(port.value) < 2**16):
        raise UsageError(None, f"{port.source} is {port.value!r}, must be a port from 1 to 65535")


def missing_variables(names: Iterable[str]) -> str:
    """Say that variables are missing from the environment, and what to do."""
    listed = ", ".join(names)
    text = f"{listed} missing from the environment; let torchrun, srun or mpirun start the ranks, or set it"
    return f"{text}: ckptools create --explain-env says what was found"


def job_port(job: str) -> int:
    """Make a port that every rank of a job agrees on of the job's number: 15000 and its last four digits.

    PyTorch Lightning does the same, so that two jobs on one node seldom collide. PBS adds its server's name to the
    number (`1234.server`), and brackets for an array (`1234[7].server`).
    """
    digits = "".join(filter(str.isdecimal, job.partition(".")[0]))
    return 15000 + int(digits[-4:] or 0)


def _check_range(place: Place) -> None:
    rank, world_size = place.number("RANK"), place.number("WORLD_SIZE")
    if rank is not None and world_size is not None and rank >= world_size:
        source = place.facts["RANK"].source
        raise UsageError(None, f"{source} is {rank}, but a world of {world_size} has ranks 0 to {world_size - 1}")
