"""The environment of this process: who it is by the variables of torchrun or of SLURM's srun, and what torch needs.

torch asks for four variables (its `env://` way of initialization): RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Training scripts also use LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK, the rank of the node. torchrun sets them all. For
a task of srun they follow from SLURM's variables. Whoever starts ranks otherwise sets torch's four variables.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field

from ckptools.errors import UsageError

Variables = Mapping[str, str]

DEFAULT_PORT = 29500
"""The port that torch's own launcher takes by default."""

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

TORCHRUN = "torchrun"
SRUN = "srun of SLURM"

# The variables that state each fact; of several, the first that is set counts. A step may be smaller than its job.
_NUMBERS: dict[str, dict[str, tuple[str, ...]]] = {
    TORCHRUN: {name: (name,) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")},
    SRUN: {
        "RANK": ("SLURM_PROCID",),
        "WORLD_SIZE": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "LOCAL_RANK": ("SLURM_LOCALID",),
        "GROUP_RANK": ("SLURM_NODEID",),
    },
}
_JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")

READ = (
    *(name for numbers in _NUMBERS.values() for names in numbers.values() for name in names),
    *(*_JOB, *_HOSTS, *_TASKS, *_STEP),
)
"""The variables that say who a process is, but for MASTER_ADDR and MASTER_PORT."""

# Numbers of the job steps that are no step of srun: the batch script's, an interactive shell's and so on.
_FIRST_SPECIAL_STEP = 2**32 - 16

# The first host of a list, which brackets with numbers may be part of: `rack[1-2]n[01-02],login`.
_FIRST_HOST = re.compile(r"((?:[^,\[\]\s]|\[\d[\d,-]*\])+)(?:,|$)")
_TASK_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Setting:
    """A value and where it comes from."""

    value: str
    source: str


@dataclass
class ProcessInfo:
    """The facts about this process.

    Attributes:
        starter: what started it as a rank: TORCHRUN, or SRUN; None: nothing did.
        job: the variable that has the number of the SLURM job that it runs in; None: it runs in none.
        facts: by torch's names of the variables.
    """

    starter: str | None
    job: str | None
    facts: dict[str, Setting] = field(default_factory=dict)

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


def starter_of(variables: Variables) -> str | None:
    """What started this process as a rank, TORCHRUN or SRUN; None where nothing did."""
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return TORCHRUN  # which may run inside srun
    # A batch script has SLURM_PROCID=0 too, but is no step of srun.
    return SRUN if "SLURM_PROCID" in variables and _srun_step(variables) is not None else None


def _srun_step(variables: Variables) -> int | None:
    """The number of the step that srun started, of the steps of a job, which may run at the same time."""
    step = variables.get(_first(variables, _STEP) or "", "")
    return int(step) if step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP else None


def _first(variables: Variables, names: tuple[str, ...]) -> str | None:
    """Return the first of these names that is set, and not to nothing."""
    return next((name for name in names if variables.get(name)), None)


def derive(variables: Variables, given: Mapping[str, Setting] | None = None) -> ProcessInfo:
    """Say who this process is; `given` is what the caller knows better, such as MASTER_ADDR from an option.

    Raises:
        UsageError: a variable has a value that makes no sense.
    """
    place = ProcessInfo(starter_of(variables), _first(variables, _JOB))
    facts = place.facts
    for fact, names in _NUMBERS.get(place.starter or "", {}).items():
        if source := _first(variables, names):
            if not variables[source].isdecimal():
                raise UsageError(None, f"{source} is {variables[source]!r}, must be a number of 0 or more")
            facts[fact] = Setting(variables[source], source)
    facts.update(given or {})
    rank, world_size, node = map(place.number, ("RANK", "WORLD_SIZE", "GROUP_RANK"))
    if rank is not None and world_size is not None and rank >= world_size:
        text = f"but a world of {world_size} has ranks 0 to {world_size - 1}"
        raise UsageError(None, f"{facts['RANK'].source} is {rank}, {text}")
    if place.starter == SRUN and node is not None and (source := _first(variables, _TASKS)):
        counts = _task_counts(source, variables[source])
        # A step may have fewer nodes than the job whose counts these are.
        if sum(counts) == world_size and node < len(counts):
            facts.setdefault("LOCAL_WORLD_SIZE", Setting(str(counts[node]), f"node {node} in {source}"))
    _add_master(place, variables)
    return place


def _add_master(place: ProcessInfo, variables: Variables) -> None:
    """Add where the ranks meet: at the first host of the job, at a port that follows from the numbers of job and step.

    PyTorch Lightning makes the port of the job's last digits too, so that two jobs on one node seldom collide.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if variables.get(name):
            place.facts.setdefault(name, Setting(variables[name], name))
    if place.job:
        if source := _first(variables, _HOSTS):
            host = _first_host(source, variables[source])
            place.facts.setdefault("MASTER_ADDR", Setting(host, f"first host of {source}"))
        digits, step = "".join(filter(str.isdecimal, variables[place.job]))[-4:], _srun_step(variables) or 0
        source = f"15000 + last digits of {place.job}" + (" + number of the step" if step else "")
        place.facts.setdefault("MASTER_PORT", Setting(str(15000 + (int(digits or 0) + step) % 10000), source))
    port = place.facts.get("MASTER_PORT")
    if port and not (port.value.isdecimal() and 0 < int(port.value) < 2**16):
        raise UsageError(None, f"{port.source} is {port.value!r}, must be a port from 1 to 65535")


def _first_host(name: str, text: str) -> str:
    """The first host of SLURM's short form: `node07` of `node[07-09],login`. See `scontrol show hostnames`."""
    found = _FIRST_HOST.match(text)
    if not found:
        raise UsageError(None, f"{name}: {text!r} is no list of hosts")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[1])


def _task_counts(name: str, text: str) -> list[int]:
    """The tasks of each node, of SLURM's short form: `2(x3),1` is 2, 2, 2, 1."""
    found = [_TASK_COUNT.fullmatch(part) for part in text.split(",")]
    if None in found:
        raise UsageError(None, f"{name}: {text!r} is no list of tasks per node")
    return [int(part[1]) for part in found if part for _ in range(int(part[2] or 1))]


def missing_variables(names: Iterable[str]) -> str:
    """Say that variables are missing from the environment, and what to do."""
    listed = ", ".join(names)
    text = f"{listed} missing from the environment; let torchrun or srun start the ranks, or set it"
    return f"{text}: ckptools create --explain-env says what was found"


def restarts() -> int:
    """The number of times that torch's elastic launcher, ours or an outer torchrun, has started all ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


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
