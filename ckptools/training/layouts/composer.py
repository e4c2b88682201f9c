"""Composer's rank files: `ep{epoch}-ba{batch}-rank{rank}.pt`, as its versions 0.13 to 0.15 write them.

`{"state": {...}, "rng": [one dict per rank]}`: every file holds the random number state of all ranks. With
FSDP each rank writes its shards, or flat pieces; with DDP, and with FSDP's full state dict, rank 0 writes one whole
file, also named `rank0`.
Source: composer/utils/checkpoint.py and composer/core/state.py of those versions, and files that they wrote.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptools.training import random_states
from ckptools.training.layouts.place import place
from ckptools.training.options import run_name
from ckptools.training.run import Run


def save(run: Run, folder: Path) -> None:
    """Write this rank's file; where rank 0 has everything, only rank 0 does."""
    content = {"state": state(run), "rng": random_states.gather(run.device)}
    if dist.get_rank() == 0 or not run.options.one_rank_has_all:
        torch.save(content, place(run, folder))


def state(run: Run) -> dict[str, Any]:
    """Everything under `state`; optimizers and schedulers go by their class names, and what a run lacks is empty."""
    return {
        "model": run.strategy.model_state(run.model),
        "optimizers": {type(run.optimizer).__name__: run.strategy.optimizer_state(run.model, run.optimizer)},
        "schedulers": {type(run.scheduler).__name__: run.scheduler.state_dict()},
        "algorithms": [],
        "callbacks": {},
        "scaler": {},
        "timestamp": {"Timestamp": timestamp(run)},
        "rank_zero_seed": run.options.seed,
        "train_metrics": {},
        "eval_metrics": {},
        "run_name": run_name(run.options, dist.get_world_size()),
        "dataset_state": {"train": None, "eval": {}},
        "integrations": {},
        "metadata": metadata(run),
    }


def timestamp(run: Run) -> dict[str, int | timedelta]:
    """Count epochs, batches, samples and tokens over all shares of the data; wall-clock times are real."""
    context, sample = run.options.size.context, run.position.samples
    return {
        "epoch": run.epoch,
        "batch": run.step,
        "sample": run.samples,
        "token": run.samples * context,
        "batch_in_epoch": run.batch_in_epoch,
        "sample_in_epoch": sample,
        "token_in_epoch": sample * context,
        "total_wct": run.elapsed,
        "epoch_wct": run.elapsed * (run.batch_in_epoch / run.step),
        "batch_wct": run.elapsed / run.step,
    }


def metadata(run: Run) -> dict[str, Any]:
    """Say what trained, in plain values that any unpickler takes."""
    return {
        "torch_version": str(torch.__version__),
        "device": "cpu" if run.device.type == "cpu" else "gpu",
        "precision": {"fp32": "fp32", "bf16": "amp_bf16"}[run.options.parallel.precision],
        "world_size": dist.get_world_size(),
        "device_train_microbatch_size": run.options.batch,
        "dist_backend": run.hardware.backend,
    }
