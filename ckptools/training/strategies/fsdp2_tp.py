"""FSDP2 over tensor parallel: a mesh of two dimensions, or of three when the shards have replicas (HSDP).

Tensor parallel cuts first, within neighbouring ranks, which share a node and its fast links; FSDP2 then cuts the parts.
A matrix that both cut along dim 0 lies in the files as `(_StridedShard(0), Shard(0))`: FSDP's dimension comes first
in the mesh though its cut came second.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ckptools.training.options import CreateOptions
from ckptools.training.strategies import fsdp2, tensor_parallel
from ckptools.training.strategies.strategy import Strategy, device_of


def wrap(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Cut over `tp`, then shard over `dp`."""
    size = options.parallel.tensor_parallel_size
    mesh = init_device_mesh(device_of(model).type, (dist.get_world_size() // size, size), mesh_dim_names=("dp", "tp"))
    return fsdp2.shard(tensor_parallel.cut(model, mesh["tp"], options), mesh["dp"], options.parallel.precision)


def wrap_replicated(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Cut over `tp`, then shard over `shard` and repeat over `replicate`."""
    size, replicas = options.parallel.tensor_parallel_size, options.parallel.replicas
    shape = (replicas, dist.get_world_size() // (replicas * size), size)
    mesh = init_device_mesh(device_of(model).type, shape, mesh_dim_names=("replicate", "shard", "tp"))
    return fsdp2.shard(
        tensor_parallel.cut(model, mesh["tp"], options), mesh["replicate", "shard"], options.parallel.precision
    )


def share_of_group(options: CreateOptions) -> tuple[int, int]:
    """Every tensor-parallel group trains on data of its own."""
    size = options.parallel.tensor_parallel_size
    return dist.get_rank() // size, dist.get_world_size() // size


FSDP2_TP = Strategy(wrap, fsdp2.model_state, fsdp2.optimizer_state, share_of_group)
HSDP_TP = Strategy(wrap_replicated, fsdp2.model_state, fsdp2.optimizer_state, share_of_group)
