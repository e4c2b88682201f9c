"""Backends and devices: what this machine has, what a run takes of it, and why not the others.

A backend carries the collectives between the ranks: gloo works everywhere, NCCL between GPUs only and with one rank
per GPU, MPI where torch was built with it. Each rank takes the GPU of its local rank, its number on its own node.
Everything here but `this_machine` and `own_device` decides from plain values, so that every answer can be tested
where there is no GPU. Source: torch.distributed's table of backends, and what NCCL says of a GPU that it is given
twice ("Duplicate GPU detected").
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptools.cluster.variables import STARTERS
from ckptools.errors import UsageError
from ckptools.training.option_checks import check_word
from ckptools.training.options import BACKENDS, DEVICES, BackendOptions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Hardware:
    """The hardware of a machine, and what torch was built with.

    Attributes:
        gpus: that are visible.
        under_mpi: whether mpirun started this process.
    """

    torch_version: str
    gpus: int = 0
    cuda: bool = False
    gloo: bool = True
    nccl: bool = False
    mpi: bool = False
    under_mpi: bool = False


@dataclass(frozen=True)
class Chosen:
    """The backend and device that a run takes.

    Attributes:
        gpus: visible on this node; 0 for a run on the CPU.
        remark: one line on what was not taken and why, where that may surprise; else empty.
    """

    backend: str
    device: str
    gpus: int = 0
    remark: str = ""

    @property
    def group(self) -> str:
        """The backend for `init_process_group`: with NCCL, tensors in memory of the CPU go over gloo."""
        return "cpu:gloo,cuda:nccl" if self.backend == "nccl" else self.backend

    @property
    def device_in_words(self) -> str:
        """`CPU`, `1 GPU shared`, `GPU by local rank`."""
        if self.device == "cpu":
            return "CPU"
        return f"{self.gpus} GPU shared" if self.gpus == 1 and self.backend != "nccl" else "GPU by local rank"


def this_machine() -> Hardware:
    """Ask torch, which this imports, what is here."""
    import torch
    import torch.distributed as dist

    return Hardware(
        torch_version=str(torch.__version__),
        gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        cuda=torch.backends.cuda.is_built(),
        gloo=dist.is_gloo_available(),
        nccl=dist.is_nccl_available(),
        mpi=dist.is_mpi_available(),
        under_mpi=any(name in os.environ for starter in STARTERS if starter.mpi for name in starter.rank),
    )


def absence(backend: str, machine: Hardware) -> str:
    """Why a machine cannot use a backend; empty when it can."""
    if backend == "nccl" and not machine.nccl:
        return f"torch {machine.torch_version} was built without {'NCCL' if machine.cuda else 'CUDA'}"
    if backend == "nccl" and not machine.gpus:
        return "no GPU is visible; it moves tensors between GPUs only"
    if backend == "mpi" and not machine.mpi:
        return f"torch {machine.torch_version} was built without MPI; only a torch built from source can have it"
    if backend == "mpi" and not machine.under_mpi:
        return "mpirun did not start this process: mpirun -n 4 ckptools create OUT --backend mpi"
    if backend == "gloo" and not machine.gloo:
        return f"torch {machine.torch_version} was built without gloo"
    return ""


def choose(options: BackendOptions, local_world_size: int, machine: Hardware) -> Chosen:
    """Choose for the ranks of one node.

    Raises:
        UsageError: an unknown word, or what was asked for is not to be had here.
    """
    check_word("backend", options.backend, ("auto", *BACKENDS))
    check_word("device", options.device, ("auto", *DEVICES))
    why_not = absence(options.backend, machine)
    if why_not:
        raise UsageError(None, f"--backend {options.backend}: {why_not}; ckptools create --backends lists what is here")
    device = _device(options, machine)
    crowded = f"{local_world_size} ranks on this node and {machine.gpus} GPU{'s' if machine.gpus > 1 else ''}"
    shared = device == "cuda" and local_world_size > machine.gpus
    if options.backend == "nccl" and (device == "cpu" or shared):
        why = f"{crowded}, and it takes one rank per GPU" if shared else "it moves tensors of GPUs, not of --device cpu"
        raise UsageError(None, f"--backend nccl: {why}; --backend gloo takes any")
    wanted = "nccl" if device == "cuda" and not shared and machine.nccl else "gloo"
    backend = wanted if options.backend == "auto" else options.backend
    remark = f"{crowded}: NCCL takes one rank per GPU, so they share over gloo" if shared and backend == "gloo" else ""
    return Chosen(backend, device, machine.gpus if device == "cuda" else 0, remark)


def _device(options: BackendOptions, machine: Hardware) -> str:
    if options.device == "cuda" and not machine.gpus:
        why = "no GPU is visible" if machine.cuda else f"torch {machine.torch_version} was built without CUDA"
        raise UsageError(None, f"--device cuda: {why}; --device cpu needs none")
    if options.device != "auto":
        return options.device
    # MPI may or may not take tensors of GPUs; its CPU side always works.
    return "cuda" if machine.gpus and options.backend != "mpi" else "cpu"


def rows(machine: Hardware) -> list[tuple[str, str, str]]:
    """The rows of `--backends`: each backend, `yes` or `no`, and what it is for or why it is not here."""
    gpus = f"{machine.gpus} GPU{'' if machine.gpus == 1 else 's'}"
    good_for = {
        "gloo": "CPU, at any number of ranks" + ("; GPUs too, through the CPU" if machine.gpus else ""),
        "nccl": f"{gpus}, one rank each",
        "mpi": "the ranks that mpirun starts",
    }
    missing = {name: absence(name, machine) for name in BACKENDS}
    return [(name, "no" if missing[name] else "yes", missing[name] or good_for[name]) for name in BACKENDS]


def default_in_words(machine: Hardware) -> str:
    """Describe the default of a run: `with nothing said: gloo, CPU`."""
    chosen = choose(BackendOptions(), 1, machine)
    if chosen.device == "cpu":
        return "with nothing said: gloo, CPU"
    fitting = f"{chosen.backend}, GPU by local rank"
    return f"with nothing said: {fitting}; gloo when a node has more ranks than its {machine.gpus}"


def chosen_here(options: BackendOptions, world_size: int | None = None) -> Chosen:
    """Choose on this machine; `world_size` counts where no launcher has set how many ranks a node has."""
    count = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE")
    return choose(options, int(count or world_size or 1), this_machine())


def own_device(chosen: Chosen) -> torch.device:
    """Return this rank's device, by its local rank, and make it the current one, as FSDP and NCCL expect."""
    import torch

    if chosen.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % chosen.gpus)
    torch.cuda.set_device(device)
    return device
