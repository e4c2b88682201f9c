"""`fully_shard`, the second FSDP: every parameter is a DTensor, cut along dim 0."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptools.training.model import Block
from ckptools.training.options import CreateOptions
from ckptools.training.strategies.strategy import Strategy, device_of


def wrap(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Shard over all ranks."""
    return shard(model, init_device_mesh(device_of(model).type, (dist.get_world_size(),)))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each block, and the root with what is left; the model stays the object that it was."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return each parameter as a DTensor; buffers are plain tensors."""
    return get_model_state_dict(model)


def optimizer_state(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the state under fqns, moments as DTensors, `step` a plain 0-d tensor."""
    return dict(get_optimizer_state_dict(model, optimizer))


STRATEGY = Strategy(wrap, model_state, optimizer_state)
