"""torch.distributed.checkpoint: `.metadata`, and `__{rank}_{n}.distcp` of every rank that has something to write.

DCP writes one copy of what several ranks hold alike, and joins the trees of all ranks: what each rank has for itself
therefore has its rank in its key. `write` is what the layouts that are built on DCP share.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_and_wait

from ckptools.training import random_states
from ckptools.training.layouts.place import place_folder
from ckptools.training.options import FileOptions
from ckptools.training.run import Run


def save(run: Run, folder: Path) -> None:
    """Save `{model, optim, scheduler, step, sampler, rng}`, the optimizer under fqns: all that a resume needs.

    Where ranks have parameters of their own, each has other param groups too, and of one key DCP keeps one rank's
    value. Flat, every parameter has its hyperparameters under a key of its own: `optim.param_groups.<fqn>.lr`.
    """
    flat = StateDictOptions(flatten_optimizer_state_dict=run.strategy.in_parts)
    model, optim = get_state_dict(run.model, run.optimizer, options=flat)
    content = {
        "model": model,
        "optim": optim,
        "scheduler": run.scheduler.state_dict(),
        "step": run.step,
        "sampler": {"epoch": run.epoch, "sample_in_epoch": run.position.samples},
        "rng": {str(dist.get_rank()): random_states.capture(run.device)},
    }
    planner = DefaultSavePlanner() if run.options.files.items == "torch" else CopyingPlanner()
    write(content, place_folder(run, folder), run.options.files, planner)


def write(
    content: dict[str, Any], folder: Path, options: FileOptions, planner: DefaultSavePlanner, files: int = 1
) -> None:
    """Write a tree of tensors and objects as a DCP folder; returns when all ranks have written.

    Args:
        content: this rank's tree.
        folder: for all ranks.
        options: whether a rank has a file for all it writes or one for each item, and whether training could go on.
        planner: says which rank writes what several hold.
        files: that a rank's items are dealt out to, each written by a thread of its own.
    """
    writer = FileSystemWriter(folder, options.files_per_rank == "one", thread_count=files, **item_format(options))
    if not options.async_save:
        save_and_wait(content, storage_writer=writer, planner=planner)
        return
    # A copy is taken at once, and written by a thread while training could go on. That thread calls collectives too,
    # on the CPU, so they need a group of their own.
    group = dist.new_group(backend="gloo")
    written: Any = async_save(content, storage_writer=writer, planner=planner, process_group=group)
    written.result()
    dist.destroy_process_group(group)


def item_format(options: FileOptions) -> dict[str, Any]:
    """Say in torch's words how a tensor is written: an archive of its own, or all of a file as safetensors."""
    if options.items == "torch":
        return {}
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    return {"serialization_format": SerializationFormat.SAFETENSORS}


class CopyingPlanner(DefaultSavePlanner):
    """torch's planner, for safetensors, which refuses two tensors in the same memory, as tied weights are."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """Return what is written for an item: of a tensor a copy."""
        data = super().resolve_data(write_item)
        return data.clone() if isinstance(data, Tensor) else data
