"""FSDP1 with `use_orig_params=False`, models by name beside plain optimizer states.

`save_all(OUT)` writes `OUT/<variant>/rank{R}.pt`, and of the same moment `OUT/<variant>.pt`, the full state dict, and
`OUT/<variant>-moments.pt`, `{fqn: {slot: values}}`, both as torch gathers them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.formats.save_local_states import Block, Inner, Model, in_ranks, train

VARIANTS: dict[str, dict[str, Any]] = {
    "dtensor": {"mesh": (4,)},
    "sharded_tensor": {},
    "tied_bf16": {"mesh": (4,), "tied": True, "dtype": torch.bfloat16},
    "frozen": {"mesh": (4,), "frozen": True},
    "hsdp": {"mesh": (2, 2), "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "one_unit": {"mesh": (4,), "units": ()},
}


def wrapped(tied=False, frozen=False, dtype=torch.float32, mesh=None, units=(Block, Inner), **options):
    model = Model(tied, False).to(dtype)
    for block in model.blocks if frozen else ():
        block.inner.scale.requires_grad_(False)
    names = ("replicate", "shard")[-len(mesh or ()) :]
    options["device_mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names) if mesh else None
    policy = ModuleWrapPolicy(set(units)) if units else None
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def save(out: Path, name: str, rank: int) -> None:
    torch.manual_seed(5)
    model = wrapped(**VARIANTS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, VARIANTS[name].get("dtype", torch.float32), rank)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, out / name / f"rank{rank}.pt")
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        weights = model.state_dict()
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    if rank == 0:
        torch.save(weights, out / f"{name}.pt")
        torch.save(moments, out / f"{name}-moments.pt")


def save_all(out: Path) -> None:
    """Fill a folder."""
    in_ranks(out, VARIANTS, save)
