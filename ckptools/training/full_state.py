"""The full state, gathered by torch's own collectives: what a consolidated checkpoint must be equal to."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from ckptools.training.options import FULL_STATE
from ckptools.training.run import Run


def gather(run: Run) -> dict[str, Any]:
    """Gather everything on every rank; a collective.

    No `cpu_offload` on the CPU: there it copies nothing, and FSDP1's tensors are then views of a freed buffer.

    Returns:
        `{"model": {fqn: tensor}, "optimizer": {"state": {fqn: {name: value}}, "param_groups": [...]}}`
    """
    # It remarks on matrices that tensor parallel and FSDP2 cut both, which take two all-gathers.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    options = StateDictOptions(full_state_dict=True, cpu_offload=run.device.type != "cpu")
    return {
        "model": dict(get_model_state_dict(run.model, options=options)),
        "optimizer": dict(get_optimizer_state_dict(run.model, run.optimizer, options=options)),
    }


def save(run: Run, folder: Path) -> None:
    """Write `full.pt` from rank 0; a collective."""
    state = gather(run)
    if dist.get_rank() == 0:
        torch.save(state, folder / FULL_STATE)
