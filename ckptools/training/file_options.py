"""How a layout's files are called and cut, where it has a choice."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature

from ckptools.errors import UsageError
from ckptools.option import option
from ckptools.text import parse_bytes


@dataclass(frozen=True)
class FileOptions:
    """What the files are called."""

    name: str | None = option(
        None,
        "Template of the file's name, or of the folder's where a layout is a folder: a path below OUT with "
        "{run_name}, {epoch}, {batch}, {rank}, {local_rank}, {node_rank} or {world_size} in it.",
    )
    run_name: str | None = option(None, "What {run_name} stands for. [default: such as fsdp1-4-ranks]")
    files_per_rank: str = option("one", "DCP: one file for all that a rank writes, or several, one for each item.")
    items: str = option("torch", "DCP: tensors as archives of torch.save, or all of a file as safetensors.")
    async_save: bool = option(False, "DCP: write from a copy, in the background.")
    save_distributed: bool = option(
        False, "huggingface: every rank writes its own shards, by DCP; else rank 0 gathers the model and writes it."
    )
    consolidated: bool = option(True, "huggingface: with --save-distributed, join the shards to whole files too.")
    max_shard_size: str | None = option(None, "huggingface: bytes of tensors per file, such as 200KB or 5GB.")


CHOICES = {"files_per_rank": ("one", "several"), "items": ("torch", "safetensors")}

# The layouts that an option goes with; the others do not have what it changes.
GOES_WITH: dict[str, tuple[str, ...]] = {
    "files_per_rank": ("dcp", "torchtitan", "olmo"),
    "items": ("dcp",),
    "async_save": ("dcp", "torchtitan", "olmo"),
    "save_distributed": ("huggingface",),
    "consolidated": ("huggingface",),
    "max_shard_size": ("huggingface",),
}


def check(options: FileOptions, layout: str) -> None:
    """Refuse options that the layout does not have, or that do not go together.

    Raises:
        UsageError: which, and what it goes with.
    """
    for name, known in CHOICES.items():
        if (value := getattr(options, name)) not in known:
            raise UsageError(None, f"{_flag(name)} {value} is not known; choose from {', '.join(known)}")
    for name, layouts in GOES_WITH.items():
        if getattr(options, name) != getattr(FileOptions(), name) and layout not in layouts:
            raise UsageError(None, f"{_flag(name)} goes with --layout {', '.join(layouts)}; not with {layout}")
    if not options.consolidated and not options.save_distributed:
        raise UsageError(None, "--no-consolidated goes with --save-distributed; without it rank 0 writes whole files")
    size = options.max_shard_size
    if size is not None and parse_bytes(size) is None:
        raise UsageError(None, f"--max-shard-size {size}: expected a size such as 5GB or 500MiB")


def check_torch(options: FileOptions) -> None:
    """Refuse what this torch cannot write yet; imports torch.

    Raises:
        UsageError: what needs a later one.
    """
    if options.items == "torch" and not options.save_distributed:
        return
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import filesystem

    later = f"needs a later torch than {torch.__version__}"
    if options.items == "safetensors" and not hasattr(filesystem, "SerializationFormat"):
        raise UsageError(None, f"--items safetensors {later}; --items torch does not")
    writer = getattr(checkpoint, "HuggingFaceStorageWriter", None)
    if options.save_distributed and (writer is None or "save_distributed" not in signature(writer).parameters):
        raise UsageError(None, f"--save-distributed {later}; without it rank 0 writes")


def _flag(name: str) -> str:
    return "--no-consolidated" if name == "consolidated" else f"--{name.replace('_', '-')}"
