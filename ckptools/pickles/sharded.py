"""ShardedTensor (FSDP1 SHARDED_STATE_DICT, LOCAL_STATE_DICT's flat parameters), torch 1.13 to 2.13.

The pickled state is `(local_shards, ShardedTensorMetadata, ProcessGroupState, sharding_spec, init_rrefs)`:

- `local_shards`: list of `Shard(tensor, metadata)`, empty on a rank that owns nothing;
- the metadata lists the shards of *all* ranks, so one file holds the whole map, but only its own data;
- `ProcessGroupState`: local rank, global rank, local and global world size. "Local" is the process group that
  shares the tensor: under HSDP the ranks in the shard list are local to it.

Source: torch/distributed/_shard/sharded_tensor/api.py (`__getstate__`), metadata.py, shard.py; checked on files of
torch 1.13.1, 2.0.1, 2.6.0 and 2.13.0. A shard's own metadata may name another device than the list (CPU tensors
of a GPU job): places are compared by offsets and sizes only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptools.model import Shard, Tensor
from ckptools.pickles.shard_runs import Placement, ShardRecord
from ckptools.regions import Box, Ints
from ckptools.values import Opaque

if TYPE_CHECKING:
    from ckptools.pickles.machine import Machine


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object: its state is a dict, or `(dict, slots dict)` for classes with slots."""
    state = value.state if isinstance(value, Opaque) else None
    parts = state if isinstance(state, tuple) else (state,)
    merged: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, dict):
            merged.update(part)
    return merged


def describe(m: Machine, shape: Ints, dtype: str, state: Any) -> Tensor:
    """Describe a ShardedTensor from the state that its `__setstate__` would have got.

    Raises:
        ValueError: the state is not what torch writes, or contradicts itself.
    """
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("a ShardedTensor with an unknown state")
    local_shards, metadata, group = state[:3]
    local_rank, rank, local_world, world = _group(group)
    if world is not None:
        m.claims.add((rank, world))
    listed = [_record(r) for r in attributes(metadata).get("shards_metadata") or []]
    whole_world = local_world == world
    own = dict(map(_local_shard, local_shards))
    for box, tensor in own.items():
        if tensor.shape != box.sizes or tensor.dtype != dtype:
            raise ValueError(f"a shard of {box.sizes} {dtype} whose tensor is {tensor.shape} {tensor.dtype}")
    shards = [_shard(box, r, own, rank, local_rank, whole_world) for box, r in listed]
    strays = [b for b in own if b not in {box for box, _ in listed}]
    if strays:
        raise ValueError(f"a local shard {strays[0]} that the ShardedTensor does not list")
    return Tensor(shape, dtype, tuple(shards), "sharded_tensor", world_size=world)


def _shard(box: Box, r: int | None, own: dict[Box, Tensor], rank: int | None, local: int | None, known: bool) -> Shard:
    mine = own.get(box)
    if mine is not None and mine.shards:
        return Shard(box, rank, mine.shards[0].source)
    return Shard(box, r if known else None, None)


def _group(state: Any) -> tuple[int | None, int | None, int | None, int | None]:
    """Return local rank, global rank, local world size, global world size."""
    fields = attributes(state)
    names = ("local_rank", "global_rank", "local_world_size", "global_world_size")
    values = tuple(v if type(v := fields.get(n)) is int else None for n in names)
    return values[0], values[1], values[2], values[3]


def _record(value: Any) -> tuple[Box, int | None]:
    """The box and the rank of one entry of the shard list."""
    if isinstance(value, ShardRecord):
        return Box(value.offsets, value.sizes), value.rank
    fields = attributes(value)
    offsets, sizes = fields.get("shard_offsets"), fields.get("shard_sizes")
    if not isinstance(offsets, list) or not isinstance(sizes, list):
        raise ValueError("a shard without offsets and sizes")
    if not all(type(n) is int and n >= 0 for n in (*offsets, *sizes)):
        raise ValueError(f"a shard at {offsets!r:.40} of {sizes!r:.40}")
    placement = fields.get("placement")
    rank = placement.rank if isinstance(placement, Placement) else attributes(placement).get("_rank")
    return Box(tuple(offsets), tuple(sizes)), rank if type(rank) is int else None


def _local_shard(value: Any) -> tuple[Box, Tensor]:
    fields = attributes(value)
    tensor = fields.get("tensor")
    if not isinstance(tensor, Tensor):
        raise ValueError("a local shard without a tensor")
    return _record(fields.get("metadata"))[0], tensor
