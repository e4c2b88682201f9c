"""What Lightning's `fabric.save(path, state)` writes: a file with DDP, a folder with FSDP.

`state` is a script's own dict: here model, optimizer and scheduler as objects, for which Fabric puts their state dicts,
and counters and random states. With DDP rank 0 writes all of it into one file. With FSDP model and optimizer are a DCP
folder, and the rest is `meta.pt` in it.
Source: lightning/fabric/strategies/strategy.py, fsdp.py and model_parallel.py of 2.6.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptools.training import random_states
from ckptools.training.layouts.place import place, place_folder
from ckptools.training.run import Run


def save(run: Run, folder: Path) -> None:
    """Write one file from rank 0, or the shards of every rank and rank 0's `meta.pt`."""
    tensors = {
        "model": run.strategy.model_state(run.model),
        "optimizer": run.strategy.optimizer_state(run.model, run.optimizer),
    }
    content = {
        "scheduler": run.scheduler.state_dict(),
        "iteration": run.step,
        "epoch": run.epoch,
        "batch_in_epoch": run.batch_in_epoch,
        "rng": random_states.gather(run.device),
    }
    if run.options.strategy == "ddp":
        content, path = tensors | content, place(run, folder)
    else:
        path = place_folder(run, folder)
        dcp_save(tensors, checkpoint_id=path)
        path /= "meta.pt"
    if dist.get_rank() == 0:
        torch.save(content, path)
