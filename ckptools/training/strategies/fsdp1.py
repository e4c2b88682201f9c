"""FullyShardedDataParallel, the first FSDP: parameters are slices of one flat tensor per wrapped unit.

`use_orig_params=True`, without which a unit could hold neither a frozen parameter nor two optimizer groups.
Without a device mesh a SHARDED_STATE_DICT holds ShardedTensor, with one it holds DTensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ckptools.training.model import Block
from ckptools.training.options import CreateOptions
from ckptools.training.strategies.strategy import Strategy, device_of


def wrap(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Wrap each block, and the root with what is left: embedding, head, norm."""
    return wrap_units(model, Block, options.parallel.dtensor)


def wrap_units(model: nn.Module, unit: type[nn.Module], dtensor: bool = False) -> nn.Module:
    """Wrap each module of the class `unit`, and the root with what is left."""
    device = device_of(model)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({unit}),
        use_orig_params=True,
        device_id=device,
        device_mesh=init_device_mesh(device.type, (dist.get_world_size(),)) if dtensor else None,
    )


@contextmanager
def _sharded(model: nn.Module) -> Iterator[None]:
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ):
        yield


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return each parameter as a ShardedTensor or DTensor, cut along dim 0; buffers are plain tensors."""
    with _sharded(model):
        return model.state_dict()


def optimizer_state(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the state under fqns, moments cut like their parameters, `step` a plain 0-d tensor."""
    with _sharded(model):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)


STRATEGY = Strategy(wrap, model_state, optimizer_state)
