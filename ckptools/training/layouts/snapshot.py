"""`snapshot.pt`, as torch's multi-GPU tutorials save a DDP run: one file from rank 0.

`MODEL_STATE` has no prefix `module.`, `OPTIMIZER_STATE` is keyed by integers, `EPOCHS_RUN` is the epoch that
training was in. Source: github.com/pytorch/examples, distributed/ddp-tutorial-series and minGPT-ddp.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from ckptools.training.layouts.place import place
from ckptools.training.run import Run


def save(run: Run, folder: Path) -> None:
    """Write `snapshot.pt` from rank 0."""
    if dist.get_rank() != 0:
        return
    content = {
        "MODEL_STATE": run.strategy.model_state(run.model),
        "OPTIMIZER_STATE": run.strategy.optimizer_state(run.model, run.optimizer),
        "EPOCHS_RUN": run.epoch,
    }
    torch.save(content, place(run, folder))
