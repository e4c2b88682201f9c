"""DistributedDataParallel: every rank holds everything, so rank 0 saves plain tensors for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from ckptools.training.options import CreateOptions
from ckptools.training.strategies.strategy import Strategy, device_of


def wrap(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Wrap in DistributedDataParallel; with bf16 the forward pass casts where that is safe, and backward follows it."""
    if options.parallel.precision == "bf16":
        autocast = torch.autocast(device_of(model).type, torch.bfloat16)
        model.forward = autocast(model.forward)
    return DistributedDataParallel(model)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return full tensors without the prefix `module.`, as Composer and torch's own tutorials save them."""
    wrapped: nn.Module = model.module  # type: ignore[assignment]
    return wrapped.state_dict()


def optimizer_state(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's own state dict: parameters are integers, in the order of the groups."""
    return optimizer.state_dict()


STRATEGY = Strategy(wrap, model_state, optimizer_state)
