"""`fully_shard`, the second FSDP: every parameter is a DTensor, cut along dim 0, over all ranks or in rows of them.

Rows are hybrid sharding (HSDP), a mesh of two dimensions with the shards of a whole model in every row. Ranks of a row
gather parameters from one another, often, over the fast links of a node; ranks of a column hold equal shards and
average gradients once per step. In the files a parameter lies as `(Replicate(), Shard(0))`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ckptools.training.model import Block
from ckptools.training.options import CreateOptions
from ckptools.training.strategies.strategy import Strategy, device_of

# Parameters are cast when they are gathered; the shards that the optimizer moves, and gradients' sums, stay float32.
PRECISIONS = {"fp32": MixedPrecisionPolicy(), "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def wrap(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Shard over all ranks."""
    mesh = init_device_mesh(device_of(model).type, (dist.get_world_size(),))
    return shard(model, mesh, options.parallel.precision)


def wrap_in_rows(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Shard within rows, repeat over columns."""
    mesh = replicate_and_shard(model, options.parallel.replicas)
    return shard(model, mesh, options.parallel.precision)


def replicate_and_shard(model: nn.Module, replicas: int) -> DeviceMesh:
    """Arrange all ranks in `replicas` rows, where the model is."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh(device_of(model).type, shape, mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, precision: str) -> nn.Module:
    """Shard each block, and the root with what is left; the model stays the object that it was."""
    policy = PRECISIONS[precision]
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


FSDP2 = Strategy(wrap)
HSDP = Strategy(wrap_in_rows)
