"""Which options of `create` go together. Free of torch, so that a mistake is found before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from pathlib import Path

from ckptools.errors import UsageError
from ckptools.text import parse_bytes
from ckptools.training import file_names
from ckptools.training.options import (
    LAUNCHERS,
    LAYOUTS,
    LOADS,
    OPTIMIZERS,
    SCHEDULERS,
    STRATEGIES,
    CreateOptions,
    FileOptions,
    LaunchOptions,
    ParallelOptions,
    ResumeOptions,
    run_name,
)
from ckptools.training.output import FULL_STATE

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
    _check_layout(options)
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


def _check_layout(options: CreateOptions) -> None:
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


def _check_files(options: CreateOptions) -> None:
    if options.files.run_name is not None:
        file_names.check_run_name(options.files.run_name)
    _check_file_options(options.files, options.layout)
    if options.files.name == FULL_STATE:
        raise UsageError(None, f"--name {FULL_STATE}: this is what --full writes; expected another name")
    if options.files.name is not None:
        one_writer = options.one_rank_has_all and options.layout in ("composer", "snapshot")
        file_names.check(options.files.name, options.layout, one_writer, run_name(options, 1))


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


def _check_file_options(options: FileOptions, layout: str) -> None:
    check_word("files-per-rank", options.files_per_rank, ("one", "several"))
    check_word("items", options.items, ("torch", "safetensors"))
    for flag, layouts in _misplaced(options, GOES_WITH, layout):
        raise UsageError(None, f"{flag} goes with --layout {layouts}; not with {layout}")
    if not options.consolidated and not options.save_distributed:
        raise UsageError(None, "--no-consolidated goes with --save-distributed; without it rank 0 writes whole files")
    size = options.max_shard_size
    if size is not None and parse_bytes(size) is None:
        raise UsageError(None, f"--max-shard-size {size}: expected a size such as 5GB or 500MiB")


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
    if options.simulation.simulate_world and options.strategy in ("tp", "fsdp2-tp", "hsdp-tp"):
        from torch.distributed.tensor.parallel import parallelize_module

        if "src_data_rank" not in signature(parallelize_module).parameters:
            raise UsageError(None, f"--simulate-world with --strategy {options.strategy} {later}")
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
