"""Lightning's checkpoints, by its Trainer and by `fabric.save(path, state)`: a file with DDP, a folder with FSDP.

The Trainer writes `epoch={epoch}-step={step}.ckpt`. It trains a LightningModule, and the model is one attribute of
that: here `model`, so that every name begins with `model.`. With DDP rank 0 writes everything into one file. With FSDP
the tensors are a DCP folder and the rest is `meta.pt` in it; the strategy for FSDP1 calls the model `model` there, the
one for FSDP2 `state_dict`.

| key | holds |
|---|---|
| `epoch`, `global_step`, `pytorch-lightning_version` | counters, and who wrote it |
| `state_dict` | the model |
| `loops` | how far each loop is, in this epoch and in all: the position in the data |
| `callbacks` | nothing here |
| `optimizer_states`, `lr_schedulers` | lists; in the DCP folder `optimizer_0` |
| `rng` | of every rank; Lightning leaves random states to the hook `on_save_checkpoint`, which may add keys |

Source: lightning/pytorch/trainer/connectors/checkpoint_connector.py (`dump_checkpoint`), strategies/fsdp.py and
strategies/model_parallel.py, loops/ and loops/progress.py of 2.6.

What `fabric.save` gets is a script's own dict: here model, optimizer and scheduler as objects, for which Fabric puts
their state dicts, and counters and random states. With DDP rank 0 writes all of it into one file. With FSDP model and
optimizer are a DCP folder, and the rest is `meta.pt` in it.
Source: lightning/fabric/strategies/strategy.py, fsdp.py and model_parallel.py of 2.6.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptools.training import random_states
from ckptools.training.run import Run, place, place_folder

ATTRIBUTE = "model"
WRITER = "2.6.6"

# What is counted of a batch, and of an optimizer step.
STAGES = ("ready", "completed", "started", "processed")


def save_trainer(run: Run, folder: Path) -> None:
    """Write what `trainer.save_checkpoint` does."""
    content = training_state(run)
    if run.options.strategy == "ddp":
        # A module that has the model as its attribute, with what that leaves in a state dict.
        module = nn.ModuleDict({ATTRIBUTE: cast("nn.Module", run.model.module)})
        tensors = {"state_dict": module.state_dict(), "optimizer_states": [run.optimizer.state_dict()]}
        _save(run, folder, content | tensors)
    else:
        _save(run, folder, content, _sharded_state(run))


def _save(run: Run, folder: Path, content: dict[str, Any], shards: dict[str, Any] | None = None) -> None:
    """Write one file from rank 0, or the shards of every rank and rank 0's `meta.pt`."""
    if shards is None:
        path = place(run, folder)
    else:
        path = place_folder(run, folder)
        dcp_save(shards, checkpoint_id=path)
        path /= "meta.pt"
    if dist.get_rank() == 0:
        torch.save(content, path)


def _sharded_state(run: Run) -> dict[str, Any]:
    """Return model and optimizer with the attribute in front of every fqn."""
    model = run.strategy.model_state(run.model)
    optimizer = run.strategy.optimizer_state(run.model, run.optimizer)
    groups = [
        {**group, "params": [f"{ATTRIBUTE}.{fqn}" for fqn in group["params"]]} for group in optimizer["param_groups"]
    ]
    return {
        "model" if run.options.strategy == "fsdp1" else "state_dict": _renamed(model),
        "optimizer_0": {"state": _renamed(optimizer["state"]), "param_groups": groups},
    }


def _renamed(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{ATTRIBUTE}.{fqn}": value for fqn, value in state.items()}


def training_state(run: Run) -> dict[str, Any]:
    """Return everything but model and optimizer; a collective."""
    return {
        "epoch": run.epoch,
        "global_step": run.step,
        "pytorch-lightning_version": WRITER,
        "loops": _loops(run),
        "callbacks": {},
        "lr_schedulers": [run.scheduler.state_dict()],
        "rng": random_states.gather(run.device),
    }


def _loops(run: Run) -> dict[str, Any]:
    """The progress of the four loops; only the one that fits has begun."""
    batches = run.batch_in_epoch
    idle = {"state_dict": {}, "batch_progress": _progress(0, 0, *STAGES) | {"is_last_batch": False}}
    steps = _progress(run.step, batches, "ready", "completed")
    zero_grad = _progress(run.step, batches, "ready", "completed", "started")
    inner = {
        "state_dict": {"_batches_that_stepped": run.step - bool(batches)},
        "batch_progress": _batch_progress(run.step, batches),
        "scheduler_progress": steps,
        "automatic_optimization.state_dict": {},
        "automatic_optimization.optim_progress": {"optimizer": {"step": steps, "zero_grad": zero_grad}},
        "manual_optimization.state_dict": {},
        "manual_optimization.optim_step_progress": _progress(0, 0, "ready", "completed"),
        **{f"val_loop.{key}": value for key, value in idle.items()},
    }
    begun = {stage: run.epoch + (stage in ("ready", "started")) for stage in STAGES}
    fit = {"state_dict": {}, **{f"epoch_loop.{key}": value for key, value in inner.items()}}
    fit["epoch_progress"] = {"total": begun, "current": begun}
    predict = {"state_dict": {}, "batch_progress": _progress(0, 0, *STAGES)}
    return {"fit_loop": fit, "validate_loop": idle, "test_loop": idle, "predict_loop": predict}


def _batch_progress(total: int, current: int) -> dict[str, Any]:
    """Count batches as they stand in the hook in which they are saved, before the one at hand is called complete.

    After an epoch's last batch this is the start of the next epoch.
    """
    counts = _progress(total, current, *STAGES)
    if current:
        counts["total"]["completed"] -= 1
        counts["current"]["completed"] -= 1
    return counts | {"is_last_batch": False}


def _progress(total: int, current: int, *stages: str) -> dict[str, Any]:
    """Count since training and since the epoch began; between two steps every stage stands at the same number."""
    return {"total": dict.fromkeys(stages, total), "current": dict.fromkeys(stages, current)}


def save_fabric(run: Run, folder: Path) -> None:
    """Write what `fabric.save` does."""
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
        _save(run, folder, tensors | content)
    else:
        _save(run, folder, content, tensors)
