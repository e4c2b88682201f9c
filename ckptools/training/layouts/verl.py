"""verl's rank files: model, optimizer and the rest apart, `{what}_world_size_{W}_rank_{R}.pt`.

The model is a state dict of DTensors. The optimizer is its own `state_dict()`, keyed by integers: DTensors
with FSDP2, with FSDP1 the local slices of the flat parameters, 1-D and without their shapes.
Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py (0.9), and files that it wrote.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ckptools.training.layouts.place import place_folder
from ckptools.training.run import Run


def save(run: Run, folder: Path) -> None:
    """Write this rank's three files; rank 0 adds `fsdp_config.json`."""
    folder = place_folder(run, folder)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    contents = {
        "model": run.strategy.model_state(run.model),
        "optim": run.optimizer.state_dict(),
        "extra_state": {
            "lr_scheduler": run.scheduler.state_dict(),
            "rng": {
                "cpu": torch.get_rng_state(),
                "numpy": np.random.get_state(),
                "random": random.getstate(),
            },
        },
    }
    for what, content in contents.items():
        torch.save(content, folder / f"{what}_world_size_{world_size}_rank_{rank}.pt")
    if rank == 0:
        version = 1 if run.options.strategy == "fsdp1" else 2
        config = {"FSDP_version": version, "world_size": world_size}
        (folder / "fsdp_config.json").write_text(json.dumps(config, indent=4))
