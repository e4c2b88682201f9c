"""Ranks that ask for tensors of many dtypes in every kind of distributed tensor; some have no rows of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import ckptools

RANKS = 4
ROWS = ((2, 3), (5, 4), (7,), (0, 3), (9, 1, 2))
"""Shapes; four ranks have rows of 1, 1, 0 and 0 of the first, and of 2, 2, 1 and 0 of the second."""

PLACED: dict[str, tuple[bool, tuple[Placement, ...]]] = {
    "rows": (False, (Shard(0),)),
    "columns": (False, (Shard(-1),)),
    "copies": (False, (Replicate(),)),
    "rows of copies": (True, (Replicate(), Shard(0))),
    "rows and columns": (True, (Shard(0), Shard(-1))),
    "rows twice": (True, (Shard(0), Shard(0))),
}
"""Whether ranks are in a mesh of 2 × 2, and the placements."""


def split(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part, as `Tensor.chunk` cuts: by one mesh dimension after the other."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = whole.chunk(mesh.size(dim), placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = parts[coordinate[dim]] if coordinate[dim] < len(parts) else empty
    return whole


def turned(local: Tensor) -> Tensor:
    """Memory of ones for a local tensor, whose last dimension is not the one of neighbours."""
    order = tuple(reversed(range(local.ndim)))
    return torch.ones(tuple(local.shape[n] for n in order), dtype=local.dtype).permute(order)


def ask(path: Path, truth: Path) -> None:
    """Be one rank; raises where something is not filled as it should be."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    expected: dict[str, Tensor] = torch.load(truth)
    flat, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, RANKS // 2))
    for two, placements in PLACED.values():
        mesh = square if two else flat
        wanted, locals_ = dict[str, object](), dict[str, Tensor]()
        for name, whole in expected.items():
            placed = placements if whole.ndim else (Replicate(),) * mesh.ndim
            locals_[name] = turned(split(whole, mesh, placed))
            wanted[name] = DTensor.from_local(
                locals_[name], mesh, placed, run_check=False, shape=whole.shape, stride=whole.stride()
            )
        load(path, wanted)
        for name, whole in expected.items():
            check(locals_[name], split(whole, mesh, placements if whole.ndim else ()), name, placements)
    # Of ShardedTensor torch takes those of which each shard has rows; a rank may have no shard.
    several = {name: whole for name, whole in expected.items() if whole.ndim and len(whole) > RANKS}
    pieces = {name: split(whole, flat, (Shard(0),)) for name, whole in several.items()}
    sharded: dict[str, object] = {}
    for name, whole in several.items():
        offset = min(dist.get_rank() * -(-len(whole) // RANKS), len(whole))
        shards = [
            LocalShard.from_tensor_and_offsets(
                torch.ones_like(pieces[name]), [offset, *[0] * (whole.ndim - 1)], dist.get_rank()
            )
        ]
        sharded[name] = init_from_local_shards(shards if len(pieces[name]) else [], whole.size())
    load(path, sharded, strict=False)
    for name, one in sharded.items():
        for shard in one.local_shards():  # type: ignore[attr-defined]
            check(shard.tensor, pieces[name], name, "ShardedTensor")
    dist.barrier()
    dist.destroy_process_group()


def load(path: Path, wanted: dict[str, object], strict: bool = True) -> None:
    state = {"model": wanted}
    reader = ckptools.StorageReader(path, strict=strict)
    dcp.load(state, storage_reader=reader)
    assert not reader.kept


def check(found: Tensor, expected: Tensor, name: str, where: object) -> None:
    """Raise unless two tensors have the same bits."""
    one, other = (value.clone(memory_format=torch.contiguous_format) for value in (found, expected))
    same = one.shape == other.shape and torch.equal(*(v.reshape(-1).view(torch.uint8) for v in (one, other)))
    assert one.dtype == other.dtype and same, f"rank {dist.get_rank()}: {name} of {where}"
