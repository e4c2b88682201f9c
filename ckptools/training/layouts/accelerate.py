"""The layout of `accelerator.save_state`: model and optimizer, and beside them what else a run resumes with.

| with | model | optimizer |
|---|---|---|
| DDP | `model.safetensors` | `optimizer.bin`, keyed by integers |
| FSDP, sharded state dicts | DCP folder `pytorch_model_fsdp_0/` | DCP folder `optimizer_0/` |
| FSDP1, local ones | `pytorch_model_fsdp_rank{rank}.bin`, flat parameters | DCP folder `optimizer_0/` |
| FSDP1, full ones | `pytorch_model_fsdp.bin` | `optimizer.bin`, keyed by fqns |

DDP's safetensors have the names of the model without its wrapper, and a tied weight under its first name only.
`scheduler.bin` and `random_states_{rank}.pkl` are pickles of `torch.save`, the latter with the batches that this epoch
has had. `custom_checkpoint_0.pkl` is the state of the first object that a script gave to
`register_for_checkpointing`: here the counters that Accelerate itself does not keep. A `DistributedSampler` has no file
of its own. The scheduler has moved once per optimizer step, as with `split_batches` or
`step_scheduler_with_optimizer=False`; else Accelerate moves it once for every process.
Source: accelerate/accelerator.py (`save_state`), checkpointing.py and utils/fsdp_utils.py of 1.15.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptools.training import random_states
from ckptools.training.run import Run, place_folder


def save(run: Run, folder: Path) -> None:
    """Write model and optimizer whole from rank 0, or sharded by all; and every rank's random states."""
    folder, rank = place_folder(run, folder), dist.get_rank()
    model = run.strategy.model_state(run.model)
    optimizer = run.strategy.optimizer_state(run.model, run.optimizer)
    if not run.options.one_rank_has_all:
        if run.options.parallel.state_dict_type == "local":
            torch.save(model, folder / f"pytorch_model_fsdp_rank{rank}.bin")
        else:
            dcp_save({"model": model}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp_save({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0")
    elif rank == 0:
        if run.options.strategy == "ddp":
            save_file(each_once(model), folder / "model.safetensors", metadata={"format": "pt"})
        else:
            torch.save(model, folder / "pytorch_model_fsdp.bin")
        torch.save(optimizer, folder / "optimizer.bin")
    if rank == 0:
        torch.save(run.scheduler.state_dict(), folder / "scheduler.bin")
        torch.save(progress(run), folder / "custom_checkpoint_0.pkl")
    torch.save(_random_states(run), folder / f"random_states_{rank}.pkl")


def each_once(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave a tied weight under its first name only: safetensors has no two names for the same bytes."""
    first: dict[int, str] = {}
    for name, tensor in state.items():
        first.setdefault(tensor.untyped_storage().data_ptr(), name)
    return {name: state[name] for name in first.values()}


def progress(run: Run) -> dict[str, int]:
    """Count what a script that uses Accelerate counts itself."""
    return {"epoch": run.epoch, "batch_in_epoch": run.batch_in_epoch, "global_step": run.step}


def _random_states(run: Run) -> dict[str, Any]:
    """This rank's random states; `step` begins anew with every epoch."""
    own = random_states.capture(run.device)
    states = {
        "step": run.batch_in_epoch,
        "random_state": own["python"],
        "numpy_random_seed": own["numpy"],
        "torch_manual_seed": own["torch"],
    }
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    return states
