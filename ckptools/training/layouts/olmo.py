"""OLMo-core's folder: `step{batch}/` with model and optimizer in a DCP, and the trainer's state of every rank.

    model_and_optim/        DCP: `model.<fqn>` and, flat, `optim.state.<fqn>.<name>`; several files per rank
    train/rank{rank}.pt     step, tokens, place in the data, random states with the versions of what drew them
    .metadata.json          version of the layout; written last
    config.json             what was trained

Of what several ranks hold the lowest writes. Source: OLMo-core 3.0.0, train/checkpoint.py, train/trainer.py
(`state_dict`), train/utils.py (`EnvRngStates`), data/data_loader.py, distributed/checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from ckptools.training import random_states
from ckptools.training.layouts.dcp import write
from ckptools.training.layouts.place import place_folder
from ckptools.training.run import Run

VERSION = "3.0.0"

# OLMo-core takes as many threads as the machine has cores and four more, each with a file.
FILES_PER_RANK = 4


def save(run: Run, folder: Path) -> None:
    """Write the folder: every rank its part of the DCP and its own state, rank 0 the rest."""
    folder = place_folder(run, folder)
    rank = dist.get_rank()
    (folder / "train").mkdir(exist_ok=True)
    torch.save(trainer_state(run), folder / "train" / f"rank{rank}.pt")
    content: dict[str, Any] = {
        "model": get_model_state_dict(run.model),
        "optim": get_optimizer_state_dict(
            run.model, run.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        ),
    }
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    write(content, folder / "model_and_optim", run.options.files, planner, FILES_PER_RANK)
    if rank == 0:
        (folder / "config.json").write_text(json.dumps({"model": dataclasses.asdict(run.options.size)}))
        (folder / ".metadata.json").write_text(json.dumps({"ephemeral": False, "version": VERSION}))


def trainer_state(run: Run) -> dict[str, Any]:
    """Everything that is not model or optimizer; OLMo-core computes the learning rate from the step."""
    context = run.options.size.context
    return {
        "global_step": run.step,
        "global_train_tokens_seen": run.samples * context,
        "global_train_petaflops": 0.0,
        "max_steps": run.options.steps,
        "data_loader": {
            "dataset_type": "fsl",
            "batches_processed": run.batch_in_epoch,
            "tokens_processed": run.position.samples * context,
            "sequence_length": context,
            "seed": run.options.seed,
            "epoch": run.epoch,
        },
        "epoch": run.epoch,
        "world_size": dist.get_world_size(),
        "rng": versioned(random_states.capture(run.device)),
        "callbacks": {},
    }


def versioned(states: dict[str, Any]) -> dict[str, Any]:
    """Put beside every random state the version of what draws from it; one of another version is not restored."""
    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
    }
    known = {
        name: {"version": tuple(map(int, versions[name].split(".")[:2])), "state": state}
        for name, state in states.items()
    }
    return {"cuda": None, **known}
