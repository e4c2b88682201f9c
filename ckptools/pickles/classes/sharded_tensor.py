"""ShardedTensor (FSDP1), torch 1.13 to 2.13, and CheckpointableTensor, torch 2.14 on: tensors with a list of shards.

FSDP1 saves ShardedTensors for SHARDED_STATE_DICT, and for LOCAL_STATE_DICT's flat parameters. The pickled state is
`(local_shards, ShardedTensorMetadata, ProcessGroupState, sharding_spec, init_rrefs)`:

- `local_shards`: list of `Shard(tensor, metadata)`, empty on a rank that owns nothing;
- the metadata lists the shards of *all* ranks, so one file holds the whole map, but only its own data;
- `ProcessGroupState`: local rank, global rank, local and global world size. "Local" is the process group that
  shares the tensor: under HSDP the ranks in the shard list are local to it.

Source: torch/distributed/_shard/sharded_tensor/api.py (`__getstate__`), metadata.py, shard.py; checked on files of
torch 1.13.1, 2.0.1, 2.6.0 and 2.13.0. A shard's own metadata may name another device than the list (CPU tensors
of a GPU job): places are compared by offsets and sizes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard, ShardList
from ckptools.model.shards import Shards
from ckptools.model.tensor import Tensor
from ckptools.model.values import describe_for_error
from ckptools.pickles.classes.device_mesh import OTHERS, Mesh
from ckptools.pickles.machine_state import MachineState
from ckptools.pickles.objects import MAX_NDIM, PlacementRecord, ShardRecord, attributes

MAX_WORLD = 1 << 20
"""Ranks of a world; more than any cluster has."""


RECORD_WORK = 8
"""Work that reading a record counts for; it takes more than a hundred bytes of pickle to spell one."""

MAX_SHAPES = 4
"""Shapes of tensors that a record remembers to be listed by: a bias, a weight and its moments share their boxes."""


def describe(m: MachineState, shape: Ints, dtype: str, state: Any) -> Tensor:
    """Describe a ShardedTensor from the state that its `__setstate__` would have got.

    Raises:
        ValueError: the state is not what torch writes, or contradicts itself.
    """
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("a ShardedTensor with an unknown state")
    local_shards, metadata, group = state[:3]
    rank, local_world, world = _group(group)
    if world is not None:
        m.claims.add((rank, world))
    listed = attributes(metadata).get("shards_metadata") or []
    m.spend(RECORD_WORK * len(listed))
    # Under HSDP the ranks are local to the process group that shares the tensor, and the file does not name it.
    named = local_world == world
    shards = m.repeated.shard_list([_listed(m, record, shape, named) for record in listed])
    own: dict[int, Shard] = {}
    local = [_local_shard(m, one) for one in local_shards]
    wrong: list[str] = []
    for box, tensor in local:
        m.spend(len(shards))
        wrong += _put(shards, own, box, tensor, rank, dtype)
    note = next((tensor.note for _, tensor in local if tensor.note), "")
    found = Tensor(shape, dtype, _with_own(shards, own), "sharded_tensor", world_size=world, note=note)
    return replace(found, contradictions=tuple([(rank, why) for why in wrong])) if wrong else found


def _with_own(shards: tuple[Shard, ...], own: dict[int, Shard]) -> Shards:
    """A list with this rank's own in their places; one that all ranks share where these follow each other."""
    start, stop = min(own, default=0), max(own, default=-1) + 1
    if stop - start != len(own):
        return tuple([own.get(i, shard) for i, shard in enumerate(shards)])
    return ShardList(shards, start, stop, tuple([own[i] for i in range(start, stop)]))


def _put(
    shards: Sequence[Shard], own: dict[int, Shard], box: Box, tensor: Tensor, rank: int | None, dtype: str
) -> Iterator[str]:
    """Find the place of a local shard in the list; yield why there is none."""
    if tensor.shape != box.sizes or tensor.dtype != dtype:
        expected = f"{dtype} {describe_for_error(box.sizes)}"
        yield f"its shard is {tensor.dtype} {describe_for_error(tensor.shape)}, expected {expected}"
        return
    offsets = box.offsets  # compared first: boxes are many, and comparing them whole takes longer
    places = [i for i, shard in enumerate(shards) if shard.box.offsets == offsets and shard.box == box]
    if not places or any(i in own for i in places):
        again = "more than once" if places else "that the ShardedTensor does not list"
        yield f"a local shard {box} {again}"
    elif tensor.shards:
        for i in places:
            own[i] = tensor.shards[0]._replace(box=box, rank=rank)


def _listed(m: MachineState, value: Any, shape: Ints, named: bool) -> Shard:
    """One entry of the shard list; with its rank when the ranks are global."""
    record = value if isinstance(value, ShardRecord) else _record(m, value)
    if shape not in record.shapes:
        if not record.shard.box.inside(shape):
            raise ValueError(
                f"a shard at {describe_for_error(record.shard.box.offsets)} of "
                f"{describe_for_error(record.shard.box.sizes)} in "
                f"a tensor of {describe_for_error(shape)}"
            )
        record.shapes = (shape, *record.shapes[: MAX_SHAPES - 1])
    return record.shard if named else record.without_rank


def _group(state: Any) -> tuple[int | None, int | None, int | None]:
    """Return global rank, local world size, global world size.

    Raises:
        ValueError: a rank outside its world.
    """
    fields = attributes(state)
    rank, local_world, world = (
        value if type(value := fields.get(name)) is int else None
        for name in ("global_rank", "local_world_size", "global_world_size")
    )
    if world is not None and not (0 <= (rank or 0) < world <= MAX_WORLD):
        raise ValueError(
            f"a ShardedTensor of rank {describe_for_error(rank)} in a world of {describe_for_error(world)}"
        )
    return rank, local_world, world


def _record(m: MachineState, value: Any) -> ShardRecord:
    fields = attributes(value)
    offsets, sizes = fields.get("shard_offsets"), fields.get("shard_sizes")
    if not isinstance(offsets, list) or not isinstance(sizes, list):
        raise ValueError("a shard without offsets and sizes")
    if not all(type(n) is int and n >= 0 for n in (*offsets, *sizes)):
        raise ValueError(f"a shard at {describe_for_error(offsets)} of {describe_for_error(sizes)}")
    placement = fields.get("placement")
    rank = placement.rank if isinstance(placement, PlacementRecord) else attributes(placement).get("_rank")
    return m.repeated.record(tuple(offsets), tuple(sizes), rank if type(rank) is int else None)


def _local_shard(m: MachineState, value: Any) -> tuple[Box, Tensor]:
    fields = attributes(value)
    tensor, metadata = fields.get("tensor"), fields.get("metadata")
    if not isinstance(tensor, Tensor):
        raise ValueError("a local shard without a tensor")
    record = metadata if isinstance(metadata, ShardRecord) else _record(m, metadata)
    return record.shard.box, tensor


# -- CheckpointableTensor ---------------------------------------------------------------------------------------------


# A plain tensor whose attributes say which pieces of a global tensor it holds. `global_shape` is the shape of the
# whole; `global_offsets`, `local_offsets` and `local_sizes` have an entry for each piece: where it begins in the whole,
# where in this tensor, and its sizes. What of the tensor is in no piece is padding. torch pickles the attributes with
# the tensor. The file names neither rank nor world size, and only its own pieces. Source:
# torch/distributed/checkpoint/protocol.py; checked on files of torch 2.15.

ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")

MAX_PIECES = 1 << 16
"""Pieces of one tensor."""


def placed(tensor: Tensor, attributes: Mapping[str, Any], meshes: set[Mesh]) -> Tensor:
    """The global tensor that a tensor with these attributes holds pieces of; the tensor itself without them.

    Args:
        tensor: as it is stored.
        attributes: of it.
        meshes: what the file says of other ranks; here takes note that there are some.
    """
    if not all(name in attributes for name in ATTRIBUTES) or tensor.note or len(tensor.shards) != 1:
        return tensor
    shape, *columns = (attributes[name] for name in ATTRIBUTES)
    pieces = _pieces(shape, columns)
    whole = Box.whole(tensor.shape)
    wrong = next((p for p in pieces if not (p[0].inside(shape) and p[1].inside(whole.sizes))), None) if pieces else None
    if pieces is None or wrong is not None:
        where = f": the piece {wrong[1]} of it would be {wrong[0]} of {list(shape)}" if wrong is not None else ""
        note = f"its global_shape, global_offsets, local_offsets and local_sizes contradict each other{where}"
        return replace(tensor, kind="unreadable", note=note)
    shards = tuple(tensor.shards[0].part(local, place) for place, local in pieces if place.numel or not place.sizes)
    if sum(shard.box.numel for shard in shards) < prod(shape):
        meshes.add(OTHERS)
    return replace(tensor, shape=tuple(shape), shards=shards, kind="checkpointable")


def _pieces(shape: Any, columns: list[Any]) -> list[tuple[Box, Box]] | None:
    """Each piece's place in the global tensor and in the local one; None where the attributes are no such lists."""
    lists = all(isinstance(c, (list, tuple)) and len(c) <= MAX_PIECES for c in columns)
    if not _is_ints(shape) or not lists or len({len(c) for c in columns}) != 1:
        return None
    if not all(_is_ints(entry) and len(entry) == len(shape) for column in columns for entry in column):
        return None
    return [(Box(_ints(g), _ints(n)), Box(_ints(at), _ints(n))) for g, at, n in zip(*columns, strict=True)]


def _is_ints(value: Any) -> bool:
    ok = isinstance(value, (list, tuple)) and len(value) <= MAX_NDIM
    return ok and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _ints(value: Any) -> Ints:
    return tuple(value)
