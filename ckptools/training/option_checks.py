"""Which options of `create` go together. Free of torch, so that a mistake is found before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.cluster.environment import STARTERS
from ckptools.errors import UsageError
from ckptools.model.regions import chunk
from ckptools.text import parse_bytes
from ckptools.training.options import (
    BACKENDS,
    DEVICES,
    LAUNCHERS,
    LAYOUTS,
    LOADS,
    OPTIMIZERS,
    SCHEDULERS,
    STRATEGIES,
    BackendOptions,
    CreateOptions,
    FileOptions,
    LaunchOptions,
    ParallelOptions,
    ResumeOptions,
    check_file_name,
    check_run_name,
    run_name,
)
from ckptools.training.output import FULL_STATE

if TYPE_CHECKING:
    import torch


# The layouts that take a state dict of FSDP1 which is not sharded; a sharded one goes into all that it is written with.
WITHOUT_SHARDS = ("composer", "accelerate")


def check(options: CreateOptions) -> None:
    """Refuse what does not fit together.

    Raises:
        UsageError: an unknown word, a layout that does not go with the strategy, a number out of range.
    """
    check_word("strategy", options.strategy, STRATEGIES)
    check_word("layout", options.layout, tuple(LAYOUTS))
    check_word("optimizer", options.optimizer, OPTIMIZERS)
    check_word("scheduler", options.scheduler, SCHEDULERS)
    _check_parallel(options.parallel, options.strategy)
    if options.strategy not in LAYOUTS[options.layout]:
        fitting = [name for name, strategies in LAYOUTS.items() if options.strategy in strategies]
        raise UsageError(
            None,
            f"--layout {options.layout} is not written with --strategy {options.strategy}; "
            f"with {options.strategy} choose from {', '.join(fitting)}",
        )
    kind = options.parallel.state_dict_type
    if kind != "sharded" and options.layout not in WITHOUT_SHARDS:
        takers = ", ".join(WITHOUT_SHARDS)
        raise UsageError(None, f"--layout {options.layout} takes no --state-dict-type {kind}; choose from {takers}")
    _check_files(options)
    _check_resuming(options.resuming, options.steps, options.world_size)
    size = options.size
    for name in ("vocab", "width", "layers", "heads", "context"):
        check_least(name, getattr(size, name))
    check_least("steps", options.steps)
    check_least("batch", options.batch)
    check_least("world-size", options.world_size)
    if not 0 <= size.dropout < 1:
        raise UsageError(None, f"--dropout is {size.dropout}, must be at least 0 and below 1")
    if options.size.width % options.size.heads:
        raise UsageError(None, f"--width {options.size.width} does not divide by --heads {options.size.heads}")


def check_word(name: str, value: str | None, known: tuple[str, ...]) -> None:
    """Refuse an option that is none of the words that it may be; None is one that was not given."""
    if value is not None and value not in known:
        raise UsageError(None, f"--{name} {value} is not known; choose from {', '.join(known)}")


def check_least(name: str, value: int | None, least: int = 1) -> None:
    """Refuse a number that is too small; None is one that was not given."""
    if value is not None and value < least:
        raise UsageError(None, f"--{name} is {value}, must be at least {least}")


def _check_files(options: CreateOptions) -> None:
    if options.files.run_name is not None:
        check_run_name(options.files.run_name)
    check_word("files-per-rank", options.files.files_per_rank, ("one", "several"))
    check_word("items", options.files.items, ("torch", "safetensors"))
    for flag, layouts in _misplaced(options.files, GOES_WITH, options.layout):
        raise UsageError(None, f"{flag} goes with --layout {layouts}; not with {options.layout}")
    if not options.files.consolidated and not options.files.save_distributed:
        raise UsageError(None, "--no-consolidated goes with --save-distributed; without it rank 0 writes whole files")
    size = options.files.max_shard_size
    if size is not None and parse_bytes(size) is None:
        raise UsageError(None, f"--max-shard-size {size}: expected a size such as 5GB or 500MiB")
    if options.files.name == FULL_STATE:
        raise UsageError(None, f"--name {FULL_STATE}: this is what --full writes; expected another name")
    if options.files.name is not None:
        one_writer = options.one_rank_has_all and options.layout in ("composer", "snapshot")
        check_file_name(options.files.name, options.layout, one_writer, run_name(options, 1))


# The strategies that each choice is one of; a choice that is not here is checked with the world's size.
CHOICES_OF: dict[str, tuple[str, ...]] = {
    "sharding": ("fsdp1",),
    "use_orig_params": ("fsdp1",),
    "state_dict_type": ("fsdp1",),
    "dtensor": ("fsdp1",),
    "precision": ("ddp", "fsdp1", "fsdp2", "hsdp", "fsdp2-tp", "hsdp-tp"),
    "replicas": ("fsdp1", "hsdp", "hsdp-tp"),
}


def _check_parallel(parallel: ParallelOptions, strategy: str) -> None:
    check_word("sharding", parallel.sharding, ("full", "grad-op", "hybrid"))
    check_word("state-dict-type", parallel.state_dict_type, ("sharded", "local", "full"))
    check_word("precision", parallel.precision, ("fp32", "bf16"))
    for flag, strategies in _misplaced(parallel, CHOICES_OF, strategy):
        raise UsageError(None, f"{flag} goes with --strategy {strategies}, not {strategy}")
    # These torch refuses on some ranks only, while the others wait for them.
    if parallel.state_dict_type == "local" and parallel.dtensor:
        raise UsageError(None, "--state-dict-type local does not go with --dtensor: flat pieces are no DTensors")
    if parallel.state_dict_type == "local" and parallel.sharding == "hybrid":
        raise UsageError(
            None,
            "--state-dict-type local does not go with --sharding hybrid: torch writes it for one group of all ranks; "
            "choose --state-dict-type sharded or full",
        )
    if strategy == "fsdp1" and parallel.sharding != "hybrid" and parallel.replicas != ParallelOptions.replicas:
        raise UsageError(None, f"--replicas goes with --sharding hybrid, not {parallel.sharding}")


def _misplaced(
    options: ParallelOptions | FileOptions, goes_with: dict[str, tuple[str, ...]], chosen: str
) -> Iterator[tuple[str, str]]:
    """Yield each option that was given and does not go with what was chosen, and what it goes with."""
    for name, known in goes_with.items():
        value = getattr(options, name)
        if value != getattr(type(options), name) and chosen not in known:
            yield f"--{'no-' if value is False else ''}{name.replace('_', '-')}", ", ".join(known)


# The layouts that an option goes with; the others do not have what it changes.
GOES_WITH: dict[str, tuple[str, ...]] = {
    "files_per_rank": ("dcp", "torchtitan", "olmo"),
    "items": ("dcp",),
    "async_save": ("dcp", "torchtitan", "olmo"),
    "save_distributed": ("huggingface",),
    "consolidated": ("huggingface",),
    "max_shard_size": ("huggingface",),
}


def check_torch(options: CreateOptions) -> None:
    """Refuse what this torch cannot do yet; imports torch.

    Raises:
        UsageError: what needs a later one.
    """
    import torch

    later = f"needs a later torch than {torch.__version__}"
    # Up to 2.6 FSDP2 asks for streams, which a CPU does not have.
    if options.strategy in ("fsdp2", "hsdp", "fsdp2-tp", "hsdp-tp") and not hasattr(torch.cpu.Stream, "record_event"):
        raise UsageError(None, f"--strategy {options.strategy} on a CPU {later}; fsdp1 and ddp do not")
    if options.files.items == "torch" and not options.files.save_distributed:
        return
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import filesystem

    if options.files.items == "safetensors" and not hasattr(filesystem, "SerializationFormat"):
        raise UsageError(None, f"--items safetensors {later}; --items torch does not")
    writer = getattr(checkpoint, "HuggingFaceStorageWriter", None)
    if options.files.save_distributed and (writer is None or "save_distributed" not in signature(writer).parameters):
        raise UsageError(None, f"--save-distributed {later}; without it rank 0 writes")


def check_launch(launch: LaunchOptions) -> None:
    """Refuse unknown words and numbers out of range.

    Raises:
        UsageError: one line that says which.
    """
    check_word("launcher", launch.launcher, LAUNCHERS)
    check_word("rdzv-backend", launch.rdzv_backend, ("static", "c10d"))
    check_word("world-size-from", launch.world_size_from, ("env", "argument"))
    check_least("nnodes", launch.nnodes)
    if launch.master_port is not None and not 0 < launch.master_port < 2**16:
        raise UsageError(None, f"--master-port is {launch.master_port}, must be from 1 to 65535")
    if not launch.timeout > 0:
        raise UsageError(None, f"--timeout is {launch.timeout:g}, must be more than 0 seconds")


def _check_resuming(resuming: ResumeOptions, steps: int, world_size: int | None) -> None:
    check_word("load", resuming.load, LOADS)
    if resuming.resume is not None and not Path(resuming.resume).exists():
        raise UsageError(Path(resuming.resume), "no such file or folder to go on from")
    check_least("save-every", resuming.save_every)
    check_least("max-restarts", resuming.max_restarts, 0)
    if resuming.killed is None:
        return
    rank, step = resuming.killed
    if world_size is not None and rank >= world_size:
        raise UsageError(None, f"--kill {resuming.kill}: there is no rank {rank} of {world_size}, counted from 0")
    if not 1 <= step <= steps:
        raise UsageError(None, f"--kill {resuming.kill}: there is no step {step}; --steps is {steps}")


# -- which numbers of ranks a strategy takes. Free of torch, so that a mistake is said before anything starts ----------


WITH_TENSOR_PARALLEL = ("tp", "fsdp2-tp", "hsdp-tp")


def check_world_size(options: CreateOptions, world_size: int) -> None:
    """Refuse a world that does not divide into the groups that the strategy makes.

    Raises:
        UsageError: it does not, or an option is of another strategy.
    """
    size = options.parallel.tensor_parallel
    if size is not None and options.strategy not in WITH_TENSOR_PARALLEL:
        _refuse(f"--tensor-parallel goes with --strategy {', '.join(WITH_TENSOR_PARALLEL)}, not {options.strategy}")
    check_least("tensor-parallel", size)
    if options.strategy == "tp" and size not in (None, world_size):
        _refuse(
            f"--strategy tp cuts over all {world_size} ranks, not over --tensor-parallel {size}; "
            "groups of fewer ranks than there are come with --strategy fsdp2-tp"
        )
    if options.strategy in WITH_TENSOR_PARALLEL:
        ranks = world_size if options.strategy == "tp" else options.parallel.tensor_parallel_size
        # Some rank may have an empty part, but torch's optimizers take no matrix with fewer rows than ranks.
        for name in ("width", "vocab"):
            rows = getattr(options.size, name)
            if rows < ranks:
                _refuse(f"--{name} {rows} cannot be cut over {ranks} ranks; try --{name} {ranks} or more")
    if options.strategy == "pipeline":
        layers, batch, parts = options.size.layers, options.batch, options.parallel.microbatches
        # The last stage has the head, so that it may go without a block; every other needs one.
        if world_size > layers + 1:
            more = f"try --layers {world_size - 1} or more"
            _refuse(f"--strategy pipeline has {world_size} stages for {layers} blocks; {more}")
        if parts < 1 or batch % parts:
            _refuse(f"--batch {batch} does not divide into --microbatches {parts}")
    experts = options.size.experts
    check_least("experts", experts, 0)
    if experts and options.strategy in WITH_TENSOR_PARALLEL:
        _refuse(
            f"--strategy {options.strategy} cuts perceptrons, not --experts; leave them out, or take --strategy moe"
        )
    if options.strategy == "moe" and experts % world_size:
        fitting = -(-experts // world_size) * world_size
        _refuse(f"--experts {experts} does not divide by {world_size} ranks; try --experts {fitting}")
    _check_mesh(options, world_size)
    if options.strategy in ("fsdp2-tp", "hsdp-tp"):
        _check_twice_cut(options, world_size)
    if options.parallel.sharding == "hybrid" and options.parallel.replicas == world_size > 1:
        # FSDP1 turns to NO_SHARD then, in a group of one rank, and the replicas drift apart.
        _refuse(
            f"--sharding hybrid with --replicas {world_size} leaves one rank to each replica, and FSDP1 then averages "
            f"no gradients; try --world-size {2 * world_size}, or --strategy hsdp"
        )


def _check_mesh(options: CreateOptions, world_size: int) -> None:
    """Check the groups by which the world must divide; a strategy that takes all ranks as one has none."""
    sizes = {}
    if options.strategy in ("fsdp2-tp", "hsdp-tp"):
        sizes["tensor-parallel"] = options.parallel.tensor_parallel_size
    if options.strategy in ("hsdp", "hsdp-tp") or options.parallel.sharding == "hybrid":
        sizes["replicas"] = options.parallel.replicas
    for name, size in sizes.items():
        check_least(name, size)
    group = prod(sizes.values())
    if world_size % group:
        words = " times ".join(f"--{name} {size}" for name, size in sizes.items())
        fitting = -(-world_size // group) * group
        _refuse(f"--world-size {world_size} does not divide by {words}; try --world-size {fitting}")


def _check_twice_cut(options: CreateOptions, world_size: int) -> None:
    """Rows that tensor parallel cuts and FSDP2 cuts again must lie as DTensor says of them (torch 2.13).

    A DTensor's placements say: take your part of each tensor-parallel piece, one after the other, and cut all of that
    over the tensor-parallel ranks. Where pieces are uneven, that is not always the part that FSDP2 has given a rank.
    """
    cuts = options.parallel.tensor_parallel_size
    shards = world_size // cuts // (options.parallel.replicas if options.strategy == "hsdp-tp" else 1)
    size = options.size
    for name, value, rows in (
        ("vocab", size.vocab, size.vocab),
        ("width", size.width, 3 * size.width),
        ("width", size.width, 4 * size.width + 1),
    ):
        if not all(_lies_as_said(rows, cuts, shards, shard) for shard in range(shards)):
            _refuse(
                f"--strategy {options.strategy} with --{name} {value}: torch's DTensor does not describe {rows} rows "
                f"that {cuts} ranks cut and {shards} ranks cut again; try another --{name} or --world-size"
            )


def _lies_as_said(rows: int, cuts: int, shards: int, shard: int) -> bool:
    sizes = [chunk(chunk(rows, cuts, cut)[1], shards, shard)[1] for cut in range(cuts)]
    return sizes == [chunk(sum(sizes), cuts, cut)[1] for cut in range(cuts)]


def _refuse(text: str) -> None:
    raise UsageError(None, text)


# -- backends and devices: what this machine has, what a run takes of it, and why not the others -----------------------
# A backend carries the collectives between the ranks: gloo works everywhere, NCCL between GPUs only and with one rank
# per GPU, MPI where torch was built with it. Each rank takes the GPU of its local rank, its number on its own node.
# Source: torch.distributed's table of backends, and NCCL's "Duplicate GPU detected".


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


def backend_of_this_machine() -> Hardware:
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


def backend_chosen_here(options: BackendOptions, world_size: int | None = None) -> Chosen:
    """Choose on this machine; `world_size` counts where no launcher has set how many ranks a node has."""
    count = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE")
    return choose(options, int(count or world_size or 1), backend_of_this_machine())


def own_device(chosen: Chosen) -> torch.device:
    """Return this rank's device, by its local rank, and make it the current one, as FSDP and NCCL expect."""
    import torch

    if chosen.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % chosen.gpus)
    torch.cuda.set_device(device)
    return device
