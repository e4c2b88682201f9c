"""Composer's checkpoints: the rank files of its versions 0.13 to 0.15, and the DCP folder of those from 0.16 on.

`ep{epoch}-ba{batch}-rank{rank}.pt` holds `{"state": {...}, "rng": [one dict per rank]}`: every file holds the random
number state of all ranks. With FSDP each rank writes its shards, or flat pieces; with DDP, and with FSDP's full state
dict, rank 0 writes one whole file, also named `rank0`.
Source: composer/utils/checkpoint.py and composer/core/state.py of those versions, and files that they wrote.

`ep{epoch}-ba{batch}/` holds the same tree, one level deeper: `state.model.<fqn>`,
`state.optimizers.<class>.state.<fqn>.<name>`, `rng.<rank>.<generator>`. Versions 0.16 to 0.30 had `optimizers` beside
`state`, for torch 2.0 could load an optimizer from the top only; since 0.31 it is back inside, as here.
Source: composer/utils/checkpoint.py (`_save_checkpoint`) of 0.16.4 and 0.32.1.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptools.training import random_states
from ckptools.training.layouts.place import place, place_folder
from ckptools.training.options import run_name
from ckptools.training.run import Run


def save_rank_files(run: Run, folder: Path) -> None:
    """Write this rank's file; where rank 0 has everything, only rank 0 does."""
    content = {"state": state(run), "rng": random_states.gather(run.device)}
    if dist.get_rank() == 0 or not run.options.one_rank_has_all:
        torch.save(content, place(run, folder))


def save_dcp(run: Run, folder: Path) -> None:
    """Save `{state, rng}` as a DCP folder; the random states of all ranks come from rank 0."""
    content: dict[str, Any] = {"state": state(run)}
    rng = random_states.gather(run.device)
    if dist.get_rank() == 0:
        content["rng"] = rng
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp_save(content, checkpoint_id=place_folder(run, folder), planner=planner)


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
