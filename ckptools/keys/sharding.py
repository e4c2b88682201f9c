"""How a checkpoint's tensors are sharded over its ranks; tensors that are sharded alike share a row."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.text import clip, plural, printable
from ckptools.training_state.models import trained_or_all

REPLICATE = "Replicate()"

MAX_CLASS = 40
"""Characters of a class name."""


class ShardingRow(NamedTuple):
    """Tensors that are sharded alike.

    Attributes:
        how: in words: `dim 0 over 4 ranks`, or DTensor's placements and mesh.
        uneven: number of tensors with shards of different sizes.
        empty: number of tensors that leave some rank without a shard.
    """

    how: str
    tensors: int
    sharded: bool
    uneven: int = 0
    empty: int = 0


def sharding_rows(ck: Checkpoint) -> tuple[ShardingRow, ...]:
    """Count the trained model's tensors by how they are sharded: sharded ones first, then by number of tensors.

    If nothing in the model is sharded, rows for sharded tensors elsewhere (an optimizer's partitions) follow; without a
    model, all tensors are counted.
    """
    model = [t for s in trained_or_all(ck) for _, t in tensors_in(s.value)]
    if not model:
        return _ways([t for _, t in tensors_in(ck.tree)])
    if ck.in_parts:
        return _ways(model, len(ck.ranks))
    if any(t.sharded for t in model):
        return _ways(model)
    others = _ways([t for _, t in tensors_in(ck.tree) if t.sharded])
    return (*_ways(model), *(one._replace(how=f"{one.how}, outside the model") for one in others))


def _ways(tensors: list[Tensor], ranks: int | None = None) -> tuple[ShardingRow, ...]:
    """Count tensors by sharding; with the number of `ranks`, whole tensors are grouped by how many ranks have them."""
    group = _group(tensors)
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        on = f" on {len({s.rank for s in tensor.found})} of {ranks} ranks" if ranks and not tensor.sharded else ""
        stored = f", {_encoded(tensor)}" if tensor.sharded and tensor.encoded_as else ""
        found.setdefault(_how(tensor, group) + on + stored, []).append(tensor)
    made = [_layout(how, alike, group) for how, alike in found.items()]
    return tuple(sorted(made, key=lambda one: (not one.sharded, -one.tensors)))


def sharding_name(ck: Checkpoint) -> str:
    """The kinds of sharded tensors in the files, as a word for programs: `dtensor`, or `none`."""
    kinds = {t.kind for _, t in tensors_in(ck.tree) if t.sharded}
    names = {
        "sharded_tensor": "fsdp1-sharded-tensor",
        "dtensor": "dtensor",
        "checkpointable": "checkpointable-tensor",
        "chunks": "dcp-chunks",
        "tensor_parallel": "tensor-parallel",
        "flat_pieces": "fsdp1-flat-pieces",
    }
    return "+".join(name for kind, name in names.items() if kind in kinds) or "none"


def placement(tensor: Tensor) -> str:
    """Describe how one tensor is sharded: `dim 0 over 4 ranks`; and the quantized weight that it belongs to."""
    how = _how(tensor, _group([tensor])) if tensor.sharded else _unsharded(tensor, tensor.kind)
    return how if tensor.coded is None else f"{how}, {tensor.coded.words}"


def _group(tensors: list[Tensor]) -> int | None:
    """The number of ranks that share a ShardedTensor, if it is fewer than all: HSDP, whose groups hold replicas.

    Read from one rank, the shards of other groups have no rank; read from all ranks, several ranks have the same
    elements. Ranks that a small tensor leaves empty do not count.
    """
    shared = [t for t in tensors if t.kind == "sharded_tensor"]
    nameless = any(None in t.every_shard.ranks for t in shared)
    if not nameless and not any(len(_pieces(t)) < sum(1 for s in t.shards if s.box.numel) for t in shared):
        return None
    group = max(len(t.every_shard.boxes) for t in shared)
    world = max(t.world_size or len(t.shards) for t in shared)
    return group if group < world else None


def _layout(how: str, tensors: list[Tensor], group: int | None) -> ShardingRow:
    if not tensors[0].sharded or tensors[0].kind == "flat_pieces":
        return ShardingRow(how, len(tensors), tensors[0].sharded)
    uneven = empty = 0
    for tensor in tensors:
        pieces, expected = _pieces(tensor), _expected(tensor, group)
        empty += len(pieces) < expected
        uneven += len(set(pieces)) > 1 or len(pieces) < expected
    return ShardingRow(how, len(tensors), True, uneven, empty)


def _pieces(tensor: Tensor) -> list[tuple[int, ...]]:
    """Sizes of the distinct nonempty shards; a replica on another rank does not count again."""
    if tensor.extents.lie_in_a_row(tensor.shape):  # whether or not they were read
        return tensor.extents.sizes
    return [box.sizes for box in tensor.every_shard.boxes if box.numel]


def _expected(tensor: Tensor, group: int | None) -> int:
    """The number of shards if every rank had one."""
    if tensor.mesh is not None and tensor.placements is not None:
        pairs = zip(tensor.mesh, tensor.placements, strict=False)
        return prod(n for n, placed in pairs if placed != REPLICATE)
    if tensor.kind in ("chunks", "checkpointable"):
        return len(_pieces(tensor))  # the number of ranks is unknown
    return group or tensor.world_size or len(tensor.shards)


def _how(tensor: Tensor, group: int | None) -> str:
    if tensor.kind == "dtensor":
        placements, mesh = tensor.placements or (), tensor.mesh or ()
        if len(placements) == len(mesh) == 1:
            return f"{placements[0]} on {plural(mesh[0], 'rank')}"
        return f"({', '.join(placements)}) on {' x '.join(map(str, mesh))} ranks"
    if tensor.kind == "flat_pieces":
        return "pieces of flattened parameters"
    if tensor.kind in ("chunks", "checkpointable"):
        return f"{_cut(tensor)} in {plural(len(_pieces(tensor)), 'piece')}"
    if tensor.kind == "tensor_parallel":
        over = plural(tensor.world_size or len(tensor.shards), "rank")
        return f"pieces of {over}, not joined" if tensor.note else f"{_cut(tensor)} over {over}"
    if tensor.kind == "sharded_tensor":
        world = tensor.world_size or len(tensor.shards)
        return f"{_cut(tensor)} over {f'groups of {group} of {world} ranks' if group else plural(world, 'rank')}"
    return _unsharded(tensor, f"{tensor.kind}, without loadable values")


def _unsharded(tensor: Tensor, otherwise: str) -> str:
    """Describe an unsharded tensor by its class; without one, by the caller's words."""
    return "whole" if tensor.kind in ("plain", "storage") else _encoded(tensor) if tensor.encoded_as else otherwise


def _encoded(tensor: Tensor) -> str:
    encoded = tensor.encoded_as[0]
    name = printable(clip(encoded.name.rpartition(".")[2], MAX_CLASS))
    return f"quantized as {name}" if encoded.coding is not None else f"of class {name}"


def _cut(tensor: Tensor) -> str:
    """The dimensions that are cut; for a tensor with a single shard, inferred from the empty shards of other ranks."""
    sizes = tensor.every_shard.box_sizes
    dims = {d for own in sizes for d, (part, whole) in enumerate(zip(own, tensor.shape, strict=False)) if part != whole}
    return "dim " + " and ".join(map(str, sorted(dims) or [0]))
