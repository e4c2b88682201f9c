"""The full state, gathered by torch's own collectives: what a consolidated checkpoint must be equal to."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from ckptools.training.output import FULL_STATE
from ckptools.training.run import Run


def gather(run: Run) -> dict[str, Any]:
    """Gather `{"model": {fqn: tensor}, "optimizer": {"state": {fqn: {name: value}}, ...}}` on every rank; a collective.

    No `cpu_offload` on the CPU: there it copies nothing, and FSDP1's tensors are then views of a freed buffer.
    """
    # It remarks on matrices that tensor parallel and FSDP2 cut both, which take two all-gathers.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    options = StateDictOptions(full_state_dict=True, cpu_offload=run.device.type != "cpu")
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
    state = {"model": dict(model), "optimizer": dict(optimizer)}
    return _union(state) if run.strategy.in_parts else state


def _union(mine: dict[str, Any]) -> dict[str, Any]:
    """Put together what each rank alone has; a collective.

    Param groups are the same on all ranks but for their parameters, of which every rank lists its own.
    """
    parts: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    whole = parts[0]
    for part in parts[1:]:
        whole["model"] |= part["model"]
        whole["optimizer"]["state"] |= part["optimizer"]["state"]
        for group, more in zip(whole["optimizer"]["param_groups"], part["optimizer"]["param_groups"], strict=True):
            group["params"] += [name for name in more["params"] if name not in group["params"]]
    return whole


def save(run: Run, folder: Path) -> None:
    """Write `full.pt` from rank 0; a collective."""
    state = gather(run)
    if dist.get_rank() == 0:
        torch.save(state, folder / FULL_STATE)
