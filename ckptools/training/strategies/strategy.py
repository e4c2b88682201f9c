"""The record that every strategy is, and DDP, the plainest of them; the other files in this folder make the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ckptools.training.options import CreateOptions

StateDict = dict[str, Any]


def every_rank_its_own(options: CreateOptions) -> tuple[int, int]:
    """Return which share of the data this rank trains on, and how many shares there are: a share per rank."""
    return dist.get_rank(), dist.get_world_size()


def device_of(model: nn.Module) -> torch.device:
    """Return where the model is, which is where its shards stay: the rank's own GPU, or the CPU."""
    return next(model.parameters()).device


def forward_and_backward(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute the gradients of one batch of int64 tokens (batch, context + 1); returns the mean loss, 0-d."""
    loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    return loss.detach()


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Take the mean cross entropy of logits (batch, context, vocab) against int64 targets (batch, context); 0-d."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class Strategy:
    """A way to spread a model over the ranks. All functions are collectives: every rank must call them.

    Attributes:
        wrap: spreads a model that every rank has built alike.
        model_state: as this rank saves it, under plain fqns: parameters as DTensors, buffers as plain tensors.
        optimizer_state: as this rank saves it, under fqns: moments as DTensors, `step` a plain 0-d tensor.
        data_share: which share of the data this rank trains on, and of how many; ranks that hold pieces of one
            copy of the model see the same data.
        backward: takes one batch through the model and leaves the gradients; returns the loss.
        in_parts: ranks have parameters of their own, so that the whole state is all of theirs together.
    """

    wrap: Callable[[nn.Module, CreateOptions], nn.Module]
    model_state: Callable[[nn.Module], StateDict] = get_model_state_dict
    optimizer_state: Callable[[nn.Module, optim.Optimizer], StateDict] = get_optimizer_state_dict
    data_share: Callable[[CreateOptions], tuple[int, int]] = every_rank_its_own
    backward: Callable[[nn.Module, Tensor], Tensor] = forward_and_backward
    in_parts: bool = False


def _wrap(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Wrap in DistributedDataParallel; with bf16 the forward pass casts where that is safe, and backward follows it."""
    if options.parallel.precision == "bf16":
        autocast = torch.autocast(device_of(model).type, torch.bfloat16)
        model.forward = autocast(model.forward)
    return DistributedDataParallel(model)


def _model_state(model: nn.Module) -> StateDict:
    """Return full tensors without the prefix `module.`, as Composer and torch's own tutorials save them."""
    wrapped: nn.Module = model.module  # type: ignore[assignment]
    return wrapped.state_dict()


def _optimizer_state(model: nn.Module, optimizer: optim.Optimizer) -> StateDict:
    """Return the optimizer's own state dict: parameters are integers, in the order of the groups."""
    return optimizer.state_dict()


DDP = Strategy(_wrap, _model_state, _optimizer_state)
