"""The environment of this process: who it is by the variables that launchers and schedulers set, and what torch needs.

torch asks for four variables (its `env://` way of initialization): RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Training scripts also use LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK, the rank of the node, as torchrun names them.
What starts processes otherwise has names of its own; two tables in `variables.py` say which they are.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TypeVar

from ckptools.cluster.variables import (
    ALLOCATIONS,
    STARTERS,
    Allocation,
    Starter,
    Variables,
    expand_counts,
    starter_of,
)
from ckptools.errors import UsageError

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
