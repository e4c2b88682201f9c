"""Backends and devices: which of them this machine has, which of them a run takes, and why not the others.

A backend carries the collectives between the ranks: gloo works everywhere, NCCL between GPUs only and with one rank per
GPU. Each rank takes the GPU of its local rank, its number on its own node. Importing this module does not import torch.

Source: torch.distributed's table of backends, and NCCL's "Duplicate GPU detected".
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptools.cluster.environment import restarts
from ckptools.errors import UsageError
from ckptools.text import plural
from ckptools.training import output
from ckptools.training.options import BACKENDS, BackendOptions, CreateOptions, check_torch, check_world_size

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Hardware:
    """The number of visible GPUs of a machine, and the backends that its torch was built with."""

    torch_version: str
    gpus: int = 0
    cuda: bool = False
    gloo: bool = True
    nccl: bool = False


@dataclass(frozen=True)
class Chosen:
    """The backend and device that a run takes.

    Attributes:
        gpus: number of visible GPUs on this node; 0 for a run on the CPU.
        remark: one line on why NCCL was not taken, if that may surprise; else empty.
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
        """The device in words: `CPU`, `1 GPU shared`, `GPU by local rank`."""
        if self.device == "cpu":
            return "CPU"
        return f"{self.gpus} GPU shared" if self.gpus == 1 and self.backend != "nccl" else "GPU by local rank"


def of_this_machine() -> Hardware:
    """Ask torch for the hardware of this machine; imports torch."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    version, cuda = str(torch.__version__), torch.backends.cuda.is_built()
    return Hardware(version, gpus, cuda, dist.is_gloo_available(), dist.is_nccl_available())


def absence(backend: str, machine: Hardware) -> str:
    """Why a machine cannot use a backend; empty when it can."""
    if backend == "nccl" and not machine.nccl:
        return f"torch {machine.torch_version} was built without {'NCCL' if machine.cuda else 'CUDA'}"
    if backend == "nccl" and not machine.gpus:
        return "no GPU is visible; it moves tensors between GPUs only"
    if backend == "gloo" and not machine.gloo:
        return f"torch {machine.torch_version} was built without gloo"
    return ""


def choose(options: BackendOptions, local_world_size: int, machine: Hardware) -> Chosen:
    """Choose backend and device for the ranks of one node.

    Raises:
        UsageError: this machine does not have the backend or device that the options name.
    """
    if why_not := absence(options.backend, machine):
        raise UsageError(None, f"--backend {options.backend}: {why_not}; ckptools create --backends lists what is here")
    if options.device == "cuda" and not machine.gpus:
        why = "no GPU is visible" if machine.cuda else f"torch {machine.torch_version} was built without CUDA"
        raise UsageError(None, f"--device cuda: {why}; --device cpu needs none")
    device = ("cuda" if machine.gpus else "cpu") if options.device == "auto" else options.device
    crowded = f"{local_world_size} ranks on this node and {plural(machine.gpus, 'GPU')}"
    shared = device == "cuda" and local_world_size > machine.gpus
    if options.backend == "nccl" and (device == "cpu" or shared):
        why = f"{crowded}, and it takes one rank per GPU" if shared else "it moves tensors of GPUs, not of --device cpu"
        raise UsageError(None, f"--backend nccl: {why}; --backend gloo takes any")
    fitting = "nccl" if device == "cuda" and not shared and machine.nccl else "gloo"
    backend = fitting if options.backend == "auto" else options.backend
    remark = f"{crowded}: NCCL takes one rank per GPU, so they share over gloo" if shared and backend == "gloo" else ""
    return Chosen(backend, device, machine.gpus if device == "cuda" else 0, remark)


def chosen_here(options: BackendOptions, local_world_size: int | None = None) -> Chosen:
    """Choose backend and device on this machine; without `local_world_size`, the launcher's variables state it."""
    count = local_world_size or os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1
    return choose(options, int(count), of_this_machine())


def check_here(options: CreateOptions, world_size: int, nproc: int) -> None:
    """Refuse options that do not fit so many ranks, this torch, this machine or the output folder; imports torch.

    Raises:
        UsageError: as `check_world_size`, `check_torch` and `choose`.
        OutputExistsError: the folder holds a checkpoint already.
    """
    check_world_size(options, world_size)
    check_torch(options)
    chosen_here(options.hardware, nproc)
    # Checkpoints that this run has saved before a restart, or that it resumes from, are no reason to refuse.
    if not (restarts() or (options.several and options.resuming.goes_on_in(options.out))):
        output.refuse_existing(options.out, options.force)


def own_device(chosen: Chosen) -> torch.device:
    """Return this rank's device, by its local rank, and make it the current one, as FSDP and NCCL expect."""
    import torch

    if chosen.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % chosen.gpus)
    torch.cuda.set_device(device)
    return device


def rows(machine: Hardware) -> list[tuple[str, str, str]]:
    """The rows of `--backends`: each backend, `yes` or `no`, and what it is for or why it is not here."""
    good_for = {
        "gloo": "CPU, at any number of ranks" + ("; GPUs too, through the CPU" if machine.gpus else ""),
        "nccl": f"{plural(machine.gpus, 'GPU')}, one rank each",
    }
    missing = {name: absence(name, machine) for name in BACKENDS}
    return [(name, "no" if missing[name] else "yes", missing[name] or good_for[name]) for name in BACKENDS]


def default_in_words(machine: Hardware) -> str:
    """Describe the default backend and device of a run: `with nothing said: gloo, CPU`."""
    chosen = choose(BackendOptions(), 1, machine)
    said = f"with nothing said: {chosen.backend}, {chosen.device_in_words}"
    return f"{said}; gloo when a node has more ranks than its {machine.gpus}" if chosen.gpus else said
