"""Composer's DCP folder: `ep{epoch}-ba{batch}/`, as its versions from 0.16 on save sharded checkpoints.

The same tree as in the rank files of `composer`, one level deeper in a folder: `state.model.<fqn>`,
`state.optimizers.<class>.state.<fqn>.<name>`, `rng.<rank>.<generator>`. Versions 0.16 to 0.30 had `optimizers` beside
`state`, for torch 2.0 could load an optimizer from the top only; since 0.31 it is back inside, as here.
Source: composer/utils/checkpoint.py (`_save_checkpoint`) of 0.16.4 and 0.32.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptools.training import random_states
from ckptools.training.layouts import composer
from ckptools.training.layouts.place import place_folder
from ckptools.training.run import Run


def save(run: Run, folder: Path) -> None:
    """Save `{state, rng}`; the random states of all ranks come from rank 0."""
    content: dict[str, Any] = {"state": composer.state(run)}
    rng = random_states.gather(run.device)
    if dist.get_rank() == 0:
        content["rng"] = rng
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp_save(content, checkpoint_id=place_folder(run, folder), planner=planner)
