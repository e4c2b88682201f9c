"""Find this process's rank in the variables of torchrun or of SLURM's srun, and set the variables that torch needs.

torch asks for four variables (its `env://` way of initialization): RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Training scripts also use LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK, the rank of the node. torchrun sets them all. For
a task of srun ckptools derives them from SLURM's variables. A user who starts ranks in another way sets torch's four
variables.
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

# The variables that state each fact; the first that is set counts. The step's variable comes before the job's: a step
# may have fewer tasks than its job.
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
"""The variables of torchrun and SLURM that are read. MASTER_ADDR and MASTER_PORT are read besides."""

# From this number on, SLURM numbers job steps that srun did not start, such as the batch script.
_FIRST_SPECIAL_STEP = 2**32 - 16

# The first host of a list; a host may contain numbers in brackets: `rack[1-2]n[01-02],login`.
_FIRST_HOST = re.compile(r"((?:[^,\[\]\s]|\[\d[\d,-]*\])+)(?:,|$)")
_TASK_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Setting:
    """The value of a variable, and the variable or option that it comes from."""

    value: str
    source: str


@dataclass
class ProcessInfo:
    """This process as a rank: its launcher, its SLURM job, and the values of torch's variables.

    Attributes:
        starter: the launcher that started it as a rank, TORCHRUN or SRUN; None if no launcher did.
        job: the name of the variable with the number of its SLURM job; None outside of a job.
        facts: the variables whose values are known, under torch's names.
    """

    starter: str | None
    job: str | None
    facts: dict[str, Setting] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[str, ...]:
        """The variables that torch needs and whose values are not known."""
        return tuple(name for name in NEEDED if name not in self.facts)

    def number(self, name: str) -> int | None:
        """Return the value of a variable as a number; None if it is not known."""
        return int(self.facts[name].value) if name in self.facts else None

    def export(self, variables: MutableMapping[str, str]) -> None:
        """Set the variables that torch and training scripts read."""
        variables.update({name: fact.value for name, fact in self.facts.items()})


def starter_of(variables: Variables) -> str | None:
    """The launcher that started this process as a rank, TORCHRUN or SRUN; None if no launcher did."""
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return TORCHRUN  # torchrun may itself run inside srun
    # A batch script has SLURM_PROCID=0 too, but srun did not start it.
    return SRUN if "SLURM_PROCID" in variables and _srun_step(variables) is not None else None


def _srun_step(variables: Variables) -> int | None:
    """The number of this job step if srun started it, else None; several steps of a job may run at the same time."""
    step = variables.get(_first(variables, _STEP) or "", "")
    return int(step) if step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP else None


def _first(variables: Variables, names: tuple[str, ...]) -> str | None:
    """Return the first of these variables that is set and not empty; None if there is no such variable."""
    return next((name for name in names if variables.get(name)), None)


def derive(variables: Variables, given: Mapping[str, Setting] | None = None) -> ProcessInfo:
    """Derive torch's variables for this process; `given` values, such as MASTER_ADDR from an option, go first.

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
        # The counts may be those of the job, and a step may have fewer nodes than its job.
        if sum(counts) == world_size and node < len(counts):
            facts.setdefault("LOCAL_WORLD_SIZE", Setting(str(counts[node]), f"node {node} in {source}"))
    _add_master(place, variables)
    return place


def _add_master(place: ProcessInfo, variables: Variables) -> None:
    """Add the address where ranks meet: the first host of the job, and a port computed from the job and step numbers.

    PyTorch Lightning computes the port from the job's last digits too: two jobs on one node seldom take the same port.
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
    """The first host of a list in SLURM's form: `node07` of `node[07-09],login`; see `scontrol show hostnames`."""
    found = _FIRST_HOST.match(text)
    if not found:
        raise UsageError(None, f"{name}: {text!r} is no list of hosts")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[1])


def _task_counts(name: str, text: str) -> list[int]:
    """The number of tasks on each node, from SLURM's short form: `2(x3),1` means 2, 2, 2, 1."""
    found = [_TASK_COUNT.fullmatch(part) for part in text.split(",")]
    if None in found:
        raise UsageError(None, f"{name}: {text!r} is no list of tasks per node")
    return [int(part[1]) for part in found if part for _ in range(int(part[2] or 1))]


def missing_variables(names: Iterable[str]) -> str:
    """The message that variables are missing from the environment, and how the user can set them."""
    listed = ", ".join(names)
    text = f"{listed} missing from the environment; let torchrun or srun start the ranks, or set it"
    return f"{text}: ckptools create --explain-env says what was found"


def restarts() -> int:
    """How often torch's elastic launcher, started by ckptools or as torchrun, has started all ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def calm_torch() -> None:
    """Give torch one thread and silence its C++ log, in this process and its children; before torch is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch raises every error that it logs; the log only adds a stack of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def use_loopback() -> None:
    """Let gloo use the loopback interface if all ranks are here: the host's name may not resolve, or be blocked."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback and is_loopback(os.environ.get("MASTER_ADDR", "localhost")):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def is_loopback(address: str) -> bool:
    """Whether an address is the loopback address of this machine: then all ranks are on this machine."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(address) if ":" not in address else address).is_loopback
    except (OSError, ValueError):
        return False
