"""Files of `torch.save`, one per rank or one from rank 0: Composer's, verl's, and the snapshot of torch's tutorials."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptools.training import random_states
from ckptools.training.options import run_name
from ckptools.training.run import Run, place, place_folder


def save_snapshot(run: Run, folder: Path) -> None:
    """Write `snapshot.pt` from rank 0, as torch's multi-GPU tutorials save a DDP run.

    `MODEL_STATE` has no prefix `module.`, `OPTIMIZER_STATE` is keyed by integers, `EPOCHS_RUN` is the epoch that
    training was in. Source: github.com/pytorch/examples, distributed/ddp-tutorial-series and minGPT-ddp.
    """
    if dist.get_rank() == 0:
        content = {
            "MODEL_STATE": run.strategy.model_state(run.model),
            "OPTIMIZER_STATE": run.strategy.optimizer_state(run.model, run.optimizer),
            "EPOCHS_RUN": run.epoch,
        }
        torch.save(content, place(run, folder))


def save_verl(run: Run, folder: Path) -> None:
    """Write verl's three files of this rank, `{what}_world_size_{W}_rank_{R}.pt`; rank 0 adds `fsdp_config.json`.

    The model is a state dict of DTensors. The optimizer is its own `state_dict()`, keyed by integers: DTensors
    with FSDP2, with FSDP1 the local slices of the flat parameters, 1-D and without their shapes.
    Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py (0.9), and files that it wrote.
    """
    folder = place_folder(run, folder)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    random = random_states.capture(run.device)
    contents = {
        "model": run.strategy.model_state(run.model),
        "optim": run.optimizer.state_dict(),
        "extra_state": {
            "lr_scheduler": run.scheduler.state_dict(),
            "rng": {"cpu": random["torch"], "numpy": random["numpy"], "random": random["python"]},
        },
    }
    for what, content in contents.items():
        torch.save(content, folder / f"{what}_world_size_{world_size}_rank_{rank}.pt")
    if rank == 0:
        version = 1 if run.options.strategy == "fsdp1" else 2
        config = {"FSDP_version": version, "world_size": world_size}
        (folder / "fsdp_config.json").write_text(json.dumps(config, indent=4))


def save_composer(run: Run, folder: Path) -> None:
    """Write this rank's `ep{epoch}-ba{batch}-rank{rank}.pt`, as Composer 0.13 to 0.15 does.

    It holds `{"state": {...}, "rng": [one dict per rank]}`: every file holds the random number state of all ranks. With
    FSDP each rank writes its shards, or flat pieces; with DDP, and with FSDP's full state dict, rank 0 writes one whole
    file, also named `rank0`.
    Source: composer/utils/checkpoint.py and composer/core/state.py of those versions, and files that they wrote.
    """
    content = {"state": composer_state(run), "rng": random_states.gather(run.device)}
    if dist.get_rank() == 0 or not run.options.one_rank_has_all:
        torch.save(content, place(run, folder))


def composer_state(run: Run) -> dict[str, Any]:
    """Everything under `state`; optimizers and schedulers go by their class names, and what a run lacks is empty."""
    return {
        "model": run.strategy.model_state(run.model),
        "optimizers": {type(run.optimizer).__name__: run.strategy.optimizer_state(run.model, run.optimizer)},
        "schedulers": {type(run.scheduler).__name__: run.scheduler.state_dict()},
        "algorithms": [],
        "callbacks": {},
        "scaler": {},
        "timestamp": {"Timestamp": _timestamp(run)},
        "rank_zero_seed": run.options.seed,
        "train_metrics": {},
        "eval_metrics": {},
        "run_name": run_name(run.options, dist.get_world_size()),
        "dataset_state": {"train": None, "eval": {}},
        "integrations": {},
        "metadata": _metadata(run),
    }


def _timestamp(run: Run) -> dict[str, int | timedelta]:
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


def _metadata(run: Run) -> dict[str, Any]:
    return {
        "torch_version": str(torch.__version__),
        "device": "cpu" if run.device.type == "cpu" else "gpu",
        "precision": {"fp32": "fp32", "bf16": "amp_bf16"}[run.options.parallel.precision],
        "world_size": dist.get_world_size(),
        "device_train_microbatch_size": run.options.batch,
        "dist_backend": run.hardware.backend,
    }
