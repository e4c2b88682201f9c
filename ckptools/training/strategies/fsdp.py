"""Fully sharded data parallel, both of torch's: each rank holds a part of every parameter.

In FullyShardedDataParallel, the first FSDP, parameters are slices of one flat tensor per wrapped unit. What a rank then
saves is its state dict's type:

| type | without a device mesh | with one |
|---|---|---|
| sharded | ShardedTensor, cut along dim 0 | DTensor |
| local | the flat tensors as they are, without names and shapes of what is in them | refused by torch |
| full | whole tensors, on rank 0; the other ranks' state dicts are empty | the same |

With `use_orig_params` the optimizer sees views of the flat tensors under the parameters' names. Without, it sees the
flat tensors: one may not mix frozen and trained parameters, nor weight decay and none.

With `fully_shard`, the second FSDP, every parameter is a DTensor, cut along dim 0, over all ranks or in rows of them.

Rows are hybrid sharding (HSDP), a mesh of two dimensions with the shards of a whole model in every row. Ranks of a row
gather parameters from one another, often, over the fast links of a node; ranks of a column hold equal shards and
average gradients once per step. In the files a parameter lies as `(Replicate(), Shard(0))`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ckptools.training.model import Block
from ckptools.training.options import CreateOptions, ParallelOptions
from ckptools.training.strategies.strategy import Strategy, device_of

SHARDINGS = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}

# Sums and buffers stay float32: a buffer that FSDP1 casts to bfloat16 is saved with what is left of it.
PRECISIONS_1 = {
    "fp32": None,
    "bf16": MixedPrecision(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=True),
}


def _wrap_fsdp1(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Wrap each block, and the root with what is left: embedding, head, norm."""
    return wrap_units(model, Block, options.parallel)


def wrap_units(model: nn.Module, unit: type[nn.Module], parallel: ParallelOptions | None = None) -> nn.Module:
    """Wrap each module of the class `unit`, and the root with what is left."""
    parallel = parallel or ParallelOptions()
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({unit}),
        sharding_strategy=SHARDINGS[parallel.sharding],
        mixed_precision=PRECISIONS_1[parallel.precision],
        use_orig_params=parallel.use_orig_params,
        # A flat parameter is trained as one; what is frozen stays outside, whole on every rank.
        ignored_states=None if parallel.use_orig_params else [p for p in model.parameters() if not p.requires_grad],
        device_id=device_of(model),
        **_ranks(model, parallel),
    )
    _choose_state_dict(wrapped, parallel.state_dict_type)
    return wrapped


def _ranks(model: nn.Module, parallel: ParallelOptions) -> dict[str, Any]:
    """Say which ranks share the shards, by a device mesh or by process groups; all of them, where nothing is said."""
    if parallel.sharding != "hybrid":
        mesh = init_device_mesh(device_of(model).type, (dist.get_world_size(),)) if parallel.dtensor else None
        return {"device_mesh": mesh}
    mesh = replicate_and_shard(model, parallel.replicas)
    if parallel.dtensor:
        return {"device_mesh": mesh}
    return {"process_group": (mesh.get_group("shard"), mesh.get_group("replicate"))}


def _choose_state_dict(model: nn.Module, kind: str) -> None:
    """Choose what `state_dict` and `optim_state_dict` return from now on."""
    # On the CPU "offloading" copies nothing, and the tensors are then views of a buffer that FSDP1 frees.
    offload = device_of(model).type != "cpu"
    model_config, optimizer_config = {
        "sharded": (ShardedStateDictConfig(offload), ShardedOptimStateDictConfig(offload)),
        "local": (LocalStateDictConfig(offload), LocalOptimStateDictConfig(offload)),
        "full": (FullStateDictConfig(offload, rank0_only=True), FullOptimStateDictConfig(offload, rank0_only=True)),
    }[kind]
    kind_of_torch = StateDictType[f"{kind.upper()}_STATE_DICT"]
    FullyShardedDataParallel.set_state_dict_type(model, kind_of_torch, model_config, optimizer_config)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of the type that was chosen; buffers are plain tensors in each."""
    return model.state_dict()


def optimizer_state(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the state under fqns, `step` a plain 0-d tensor; of the local type the moments are sharded tensors."""
    return FullyShardedDataParallel.optim_state_dict(model, optimizer)


FSDP1 = Strategy(_wrap_fsdp1, model_state, optimizer_state)


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


# Parameters are cast when they are gathered; the shards that the optimizer moves, and gradients' sums, stay float32.
PRECISIONS_2 = {"fp32": MixedPrecisionPolicy(), "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def _wrap_fsdp2(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Shard over all ranks."""
    mesh = init_device_mesh(device_of(model).type, (dist.get_world_size(),))
    return shard(model, mesh, options.parallel.precision)


def _wrap_hsdp(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Shard within rows, repeat over columns."""
    mesh = replicate_and_shard(model, options.parallel.replicas)
    return shard(model, mesh, options.parallel.precision)


def replicate_and_shard(model: nn.Module, replicas: int) -> DeviceMesh:
    """Arrange all ranks in `replicas` rows, where the model is."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh(device_of(model).type, shape, mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, precision: str) -> nn.Module:
    """Shard each block, and the root with what is left; the model stays the object that it was."""
    policy = PRECISIONS_2[precision]
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


FSDP2 = Strategy(_wrap_fsdp2)
HSDP = Strategy(_wrap_hsdp)
