"""Hybrid sharding: FSDP2 on a mesh of two dimensions, with the shards of a whole model in every row.

Ranks of a row gather parameters from one another, often, over the fast links of a node; ranks of a column hold equal
shards and average gradients once per step. In the files a parameter lies as `(Replicate(), Shard(0))`.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckptools.training.options import CreateOptions
from ckptools.training.strategies import fsdp2
from ckptools.training.strategies.strategy import Strategy, device_of


def replicate_and_shard(model: nn.Module, replicas: int) -> DeviceMesh:
    """Arrange all ranks in `replicas` rows, where the model is."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh(device_of(model).type, shape, mesh_dim_names=("replicate", "shard"))


def wrap(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Shard within rows, repeat over columns."""
    mesh = replicate_and_shard(model, options.parallel.replicas)
    return fsdp2.shard(model, mesh, options.parallel.precision)


STRATEGY = Strategy(wrap, fsdp2.model_state, fsdp2.optimizer_state)
