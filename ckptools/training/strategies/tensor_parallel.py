"""Tensor parallel: every matrix is cut, and each rank of a group multiplies with its own part of it.

All ranks of a group see the same data and draw the same random numbers. What goes through a cut matrix becomes whole
again by a collective: an all-reduce behind rows, an all-gather behind columns where all of it is needed.

Below FSDP2 it is a dimension of a mesh of two, or of three when the shards have replicas (HSDP). Tensor parallel cuts
first, within neighbouring ranks, which share a node and its fast links; FSDP2 then cuts the parts. A matrix that both
cut along dim 0 lies in the files as `(_StridedShard(0), Shard(0))`: FSDP's dimension comes first in the mesh though its
cut came second.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ckptools.training.options import CreateOptions
from ckptools.training.strategies.fsdp import shard
from ckptools.training.strategies.strategy import Strategy, device_of


def plan(layers: int) -> dict[str, ParallelStyle]:
    """Say for each matrix how it is cut; what is not named stays whole on every rank: norms, scales, `start`.

    The perceptron is the pattern to know: `up` is cut by its outputs and `down` by its inputs, so that between them
    no rank needs what another has. DTensor in between (`use_local_output=False`), because a hidden size that does not
    divide makes parts of unequal length, and a plain tensor does not say what it is a part of.

    Attention is the pattern's exception. To cut it between heads, heads must divide by the group's size (5 do not), and
    the rows of `qkv` must lie head by head (they are all queries, then all keys, then all values). So the matrices
    are cut all the same, what `qkv` makes is gathered, and every rank mixes all heads.
    """
    styles: dict[str, ParallelStyle] = {
        "emb": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in range(layers):
        block = f"blocks.{layer}"
        styles |= {
            f"{block}.attn.qkv": ColwiseParallel(output_layouts=Replicate()),
            f"{block}.attn.out": RowwiseParallel(input_layouts=Replicate()),
            f"{block}.up": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            f"{block}.down": RowwiseParallel(),
        }
    return styles


OWN_VALUES: dict[str, Any] = (
    {"src_data_rank": None} if "src_data_rank" in signature(parallelize_module).parameters else {}
)
"""All ranks have built the same model, so that each cuts its own and receives no values; since torch 2.7."""


def cut(model: nn.Module, mesh: DeviceMesh, options: CreateOptions) -> nn.Module:
    """Cut the matrices over a mesh of one dimension; the model stays the object that it was."""
    parallelize_module(model, mesh, plan(options.size.layers), **OWN_VALUES)
    # Both were cut along the vocabulary, each as a parameter of its own: tie them again.
    model.head.weight = model.emb.weight  # type: ignore[union-attr]
    return model


def wrap(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Cut the matrices over all ranks: one group."""
    mesh = init_device_mesh(device_of(model).type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    return cut(model, mesh, options)


def wrap_below_fsdp2(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Cut over `tp`, then shard over `dp`."""
    size = options.parallel.tensor_parallel_size
    mesh = init_device_mesh(device_of(model).type, (dist.get_world_size() // size, size), mesh_dim_names=("dp", "tp"))
    return shard(cut(model, mesh["tp"], options), mesh["dp"], options.parallel.precision)


def wrap_below_hsdp(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Cut over `tp`, then shard over `shard` and repeat over `replicate`."""
    size, replicas = options.parallel.tensor_parallel_size, options.parallel.replicas
    shape = (replicas, dist.get_world_size() // (replicas * size), size)
    mesh = init_device_mesh(device_of(model).type, shape, mesh_dim_names=("replicate", "shard", "tp"))
    return shard(cut(model, mesh["tp"], options), mesh["replicate", "shard"], options.parallel.precision)


def one_share(options: CreateOptions) -> tuple[int, int]:
    """All ranks train on the same data."""
    return 0, 1


def share_of_group(options: CreateOptions) -> tuple[int, int]:
    """Every tensor-parallel group trains on data of its own."""
    size = options.parallel.tensor_parallel_size
    return dist.get_rank() // size, dist.get_world_size() // size


TP = Strategy(wrap, data_share=one_share)
FSDP2_TP = Strategy(wrap_below_fsdp2, data_share=share_of_group)
HSDP_TP = Strategy(wrap_below_hsdp, data_share=share_of_group)
