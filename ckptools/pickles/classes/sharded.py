"""Sharded tensors as torch pickles them: ShardedTensor, CheckpointableTensor and DTensor, torch 1.13 to 2.14 on.

A DTensor's pickled state holds `_local_tensor` and `_spec`, a `DTensorSpec` of mesh, placements and tensor_meta; the
global shape and dtype are in the call's own arguments. A rank's shards follow from its mesh coordinate: going through
the mesh dimensions from left to right, or in the order that newer specs state (`shard_order`), `Shard(d)` keeps this
coordinate's chunk of the index list of dimension d, `_StridedShard(d, sf)` keeps it in each of sf pieces, `Replicate`
keeps all. `Partial` would have to be reduced over ranks, so it is reported and not read.

Source: torch/distributed/tensor/_dtensor_spec.py, tensor/placement_types.py; checked on files of
torch 2.2.2, 2.4.1, 2.6.0 and 2.13.0, and with torch's own full tensors for uneven 2-D strided shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product, repeat
from math import prod
from typing import Any, NamedTuple

from ckptools.model.regions import Box, Ints, Run, chunk_runs, grid_boxes, strided_chunk_runs
from ckptools.model.shards import Shard, ShardList, in_rank_order
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque, describe_for_error
from ckptools.pickles.batches import Batch, gathered
from ckptools.pickles.machine_state import MachineState
from ckptools.pickles.objects import (
    MAX_MESH,
    MAX_MESH_DIMS,
    MAX_NDIM,
    OTHERS,
    Mesh,
    attributes,
    attributes_in,
    mesh_of,
)

# -- ShardedTensor (FSDP1), torch 1.13 to 2.13, and CheckpointableTensor, torch 2.14 on: tensors with a list of shards
# FSDP1 saves ShardedTensors for SHARDED_STATE_DICT, and for LOCAL_STATE_DICT's flat parameters. The pickled state is
# `(local_shards, ShardedTensorMetadata, ProcessGroupState, sharding_spec, init_rrefs)`:
#
# - `local_shards`: list of `Shard(tensor, metadata)`, empty on a rank that owns nothing;
# - the metadata lists the shards of *all* ranks, so one file holds the whole map, but only its own data;
# - `ProcessGroupState`: local rank, global rank, local and global world size. "Local" is the process group that
#   shares the tensor: under HSDP the ranks in the shard list are local to it.
#
# Source: torch/distributed/_shard/sharded_tensor/api.py (`__getstate__`), metadata.py, shard.py; checked on files of
# torch 1.13.1, 2.0.1, 2.6.0 and 2.13.0. A shard's own metadata may name another device than the list (CPU tensors
# of a GPU job): places are compared by offsets and sizes only.


MAX_WORLD = 1 << 20
"""Ranks of a world; more than any cluster has."""


RECORD_WORK = 8
"""Budget units for reading a record; its pickle takes more than a hundred bytes."""

BY_COLUMN = ("ShardMetadata",)
"""Classes that are read by column."""


def describe_sharded_tensor(m: MachineState, shape: Ints, dtype: str, state: Any) -> Tensor:
    """Describe a ShardedTensor from the state for its `__setstate__`.

    Raises:
        ValueError: the state is not as torch writes it, or contradicts itself.
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
    shards = m.repeated.shard_list([s for record in gathered(list(listed)) for s in _shards(m, record, shape, named)])
    own: dict[int, Shard] = {}
    local = [_local_shard(m, one) for one in local_shards]
    wrong: list[str] = []
    for box, tensor in local:
        m.spend(len(shards))
        wrong += _put(shards, own, box, tensor, rank, dtype)
    note = next((tensor.note for _, tensor in local if tensor.note), "")
    found = Tensor(shape, dtype, _with_own(shards, own), "sharded_tensor", world_size=world, note=note)
    return replace(found, contradictions=tuple([(rank, why) for why in wrong])) if wrong else found


def _with_own(shards: tuple[Shard, ...], own: dict[int, Shard]) -> Sequence[Shard]:
    """Fill a rank's own shards into a list of shards; consecutive ones leave the list shared by all ranks."""
    start, stop = min(own, default=0), max(own, default=-1) + 1
    if stop - start != len(own):
        return tuple([own.get(i, shard) for i, shard in enumerate(shards)])
    return ShardList(shards, start, stop, tuple([own[i] for i in range(start, stop)]))


def _put(
    shards: Sequence[Shard], own: dict[int, Shard], box: Box, tensor: Tensor, rank: int | None, dtype: str
) -> Iterator[str]:
    """Enter a local shard in `own`, by its index in the list of all shards; yield the reason if it has none."""
    if tensor.shape != box.sizes or tensor.dtype != dtype:
        expected = f"{dtype} {describe_for_error(box.sizes)}"
        yield f"its shard is {tensor.dtype} {describe_for_error(tensor.shape)}, expected {expected}"
        return
    offsets = box.offsets  # compared before whole boxes, which takes longer for many boxes
    places = [i for i, shard in enumerate(shards) if shard.box.offsets == offsets and shard.box == box]
    if not places or any(i in own for i in places):
        again = "more than once" if places else "that the ShardedTensor does not list"
        yield f"a local shard {box} {again}"
    elif tensor.shards:
        for i in places:
            own[i] = tensor.shards[0]._replace(box=box, rank=rank)


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


def _shards(m: MachineState, value: Any, shape: Ints | None, named: bool) -> Sequence[Shard]:
    """The shards, without their bytes, of a `ShardMetadata` or a batch of them.

    Args:
        m: the machine.
        value: a `ShardMetadata` or a batch.
        shape: of the tensor that contains them; None for any.
        named: whether their ranks are global ranks.

    Raises:
        ValueError: the state is not as torch writes it, or a shard lies outside the tensor.
    """
    if not isinstance(value, Batch):
        fields = attributes(value)
        rank = attributes(fields.get("placement")).get("_rank") if named else None
        return (_shard(m, shape, fields.get("shard_offsets"), fields.get("shard_sizes"), rank),)
    key, kept = (value.start, value.stop, shape, named), value.rows.kept
    if key not in kept:
        places, extents = (value.column(name, kind="list") for name in ("shard_offsets", "shard_sizes"))
        ranks = value.column("placement", "_rank", kind="int") if named else repeat(None)
        kept[key] = tuple(map(_shard, repeat(m), repeat(shape), places, extents, ranks))
    found: Sequence[Shard] = kept[key]
    return found


def _shard(m: MachineState, shape: Ints | None, offsets: Any, sizes: Any, rank: Any) -> Shard:
    if not isinstance(offsets, list) or not isinstance(sizes, list):
        raise ValueError("a shard without offsets and sizes")
    if not all(type(n) is int and n >= 0 for n in (*offsets, *sizes)):
        raise ValueError(f"a shard at {describe_for_error(offsets)} of {describe_for_error(sizes)}")
    shard = m.repeated.shard(tuple(offsets), tuple(sizes), rank if type(rank) is int else None)
    if shape is not None and not shard.box.inside(shape):
        box = f"a shard at {describe_for_error(shard.box.offsets)} of {describe_for_error(shard.box.sizes)}"
        raise ValueError(f"{box} in a tensor of {describe_for_error(shape)}")
    return shard


def _local_shard(m: MachineState, value: Any) -> tuple[Box, Tensor]:
    fields = attributes(value)
    tensor = fields.get("tensor")
    if not isinstance(tensor, Tensor):
        raise ValueError("a local shard without a tensor")
    (shard,) = _shards(m, fields.get("metadata"), None, named=False)
    return shard.box, tensor


# -- CheckpointableTensor ----------------------------------------------------------------------------------------------


# A plain tensor whose attributes place pieces of it in a global tensor. `global_shape` is the shape of the whole;
# `global_offsets`, `local_offsets` and `local_sizes` have an entry for each piece: where it begins in the whole, where
# in this tensor, and its sizes. Elements outside of all pieces are padding. torch pickles the attributes with the
# tensor. The file states neither rank nor world size, and lists only its own pieces. Source:
# torch/distributed/checkpoint/protocol.py; checked on files of torch 2.15.

ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")

MAX_PIECES = 1 << 16
"""At most this many pieces of one tensor."""


def placed_sharded_tensor(tensor: Tensor, attributes: Mapping[str, Any], meshes: set[Mesh]) -> Tensor:
    """The global tensor of which a tensor with these attributes holds pieces; without them, the tensor itself.

    Args:
        tensor: as it is stored.
        attributes: of the tensor.
        meshes: collects hints that there are other ranks; a piece adds one.
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
    """Each piece's box in the global tensor and in the local tensor; None if the attributes are malformed."""
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


# -- DTensor (FSDP2, FSDP1 with a device mesh, tensor parallel), torch 2.2 to 2.13 -------------------------------------


MAX_SCATTER = 1024
"""Runs of rows that one rank's piece may be scattered over by strided shards; torch makes one per mesh coordinate."""

SHARDS = ("Shard", "_StridedShard")


class Placement(NamedTuple):
    """How a mesh dimension cuts a tensor.

    Attributes:
        kind: `Shard`, `_StridedShard`, `Replicate`, or the name of an unsupported placement.
        dim: tensor dimension, for the two kinds of shard.
        split_factor: number of earlier cuts, for `_StridedShard`.
        turn: its position, from 0, among the cuts of its dimension, if mesh dimensions do not cut from left to right.
    """

    kind: str
    dim: int = 0
    split_factor: int = 1
    turn: int | None = None

    def __str__(self) -> str:
        if self.kind.startswith("Partial("):
            return self.kind
        inner = {"Shard": f"{self.dim}", "_StridedShard": f"{self.dim}, sf={self.split_factor}"}
        return f"{self.kind}({inner.get(self.kind, '')}){'' if self.turn is None else f'[{self.turn}]'}"


def describe_dtensor(m: MachineState, shape: Ints, dtype: str, state: Any) -> Tensor:
    """Describe a DTensor from its state.

    Raises:
        ValueError: the state is not as torch writes it, or the local tensor does not fit its place.
    """
    fields = attributes_in(state)
    local, spec = fields.get("_local_tensor"), attributes(fields.get("_spec"))
    if not isinstance(local, Tensor) or "mesh" not in spec:
        raise ValueError("a DTensor with an unknown state")
    mesh = _mesh(m, spec["mesh"])
    listed = spec.get("placements")
    placements = tuple([_placement(p, len(shape)) for p in (listed if isinstance(listed, (list, tuple)) else ())[:99]])
    if len(placements) != len(mesh.sizes):
        raise ValueError(f"a DTensor with {len(placements)} placements on a mesh of {len(mesh.sizes)} dimensions")
    placements = _in_turn(placements, _shard_order(spec.get("shard_order")))
    return m.placed(placed_dtensor(m, shape, dtype, local, mesh, placements), local, spec["mesh"], placements)


def _mesh(m: MachineState, value: Any) -> Mesh:
    """The mesh of a DTensor; read once for the thousands of DTensors that share it, as it may list many ranks."""
    if id(value) not in m.read_meshes:
        mesh = mesh_of(m.without_slots(value))
        m.spend(prod(mesh.sizes) // 4)
        m.read_meshes[id(value)] = value, mesh
    return m.read_meshes[id(value)][1]


def placed_dtensor(
    m: MachineState, shape: Ints, dtype: str, local: Tensor, mesh: Mesh, placements: tuple[Placement, ...]
) -> Tensor:
    """Describe a DTensor by its local tensor and its place in a mesh.

    Raises:
        ValueError: it is scattered over too many runs.
    """
    names, strange, scatter = _facts(placements)
    if strange:
        note = f"placement {strange[0]}: the ranks hold terms that must be reduced; ckptools does not guess how"
        return Tensor(shape, dtype, (), "unreadable", names, mesh.sizes, world_size=mesh.world_size, note=note)
    if local.kind == "meta":
        return Tensor(shape, dtype, (), "meta", names, mesh.sizes, world_size=mesh.world_size, note=local.note)
    if scatter > MAX_SCATTER:
        raise ValueError(f"a DTensor scattered over {describe_for_error(scatter)} runs")
    own, why = _own_shards(shape, dtype, local, mesh, placements)
    shards = _layout(m, shape, mesh, placements, scatter).with_own(own, mesh)
    tensor = Tensor(shape, dtype, shards, "dtensor", names, mesh.sizes, world_size=mesh.world_size, note=local.note)
    return replace(tensor, contradictions=((mesh.rank, why),)) if why else tensor


def _own_shards(
    shape: Ints, dtype: str, local: Tensor, mesh: Mesh, placements: tuple[Placement, ...]
) -> tuple[list[Shard], str]:
    """The shards in the local tensor, several if a strided shard scatters its rows; and why there are none."""
    if mesh.coordinate is None:
        return [], ""
    expected, pieces = local_pieces(shape, mesh.sizes, mesh.coordinate, placements)
    if local.dtype != dtype or (local.shape != expected and prod(local.shape) + prod(expected)):
        found = f"{local.dtype} {describe_for_error(local.shape)}"
        return [], f"its local tensor is {found}, expected {dtype} {describe_for_error(expected)}"
    if not prod(expected) or not local.shards:
        return [], ""
    shard = local.shards[0]
    if len(pieces) == 1 and shard.encoded is None and shard.source is not None and shard.source.shape == expected:
        return [Shard(pieces[0][0], mesh.rank, shard.source)], ""  # the piece is the whole local tensor
    return [shard.part(packed, place)._replace(rank=mesh.rank) for place, packed in pieces], ""


@lru_cache(maxsize=64)
def _facts(placements: tuple[Placement, ...]) -> tuple[tuple[str, ...], list[str], int]:
    """The names of placements, the unsupported kinds, and the number of runs over which a piece is scattered."""
    strange = [p.kind for p in placements if p.kind not in (*SHARDS, "Replicate")]
    return tuple(map(str, placements)), strange, prod(p.split_factor for p in placements)


@lru_cache(maxsize=64)
def local_pieces(
    shape: Ints, sizes: Ints, coordinate: Ints, placements: tuple[Placement, ...]
) -> tuple[Ints, list[tuple[Box, Box]]]:
    """Return the local sizes of the rank at `coordinate`, and its pieces: boxes in the tensor and in the local tensor.

    Layers have the same shapes, so few are computed, and their boxes are shared.
    """
    runs = local_runs(shape, sizes, coordinate, placements)
    return tuple(sum(n for _, n in r) for r in runs), list(grid_boxes(runs))


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """The shards of a tensor at all coordinates of a mesh, by its placements, without sources.

    Attributes:
        cells: coordinates with their shards.
        ordered: all shards in the order of their ranks.
        spans: index range in `ordered` of each coordinate's shards; empty if ranks are not distinct.
    """

    cells: list[tuple[Ints, list[Shard]]]
    ordered: tuple[Shard, ...]
    spans: dict[tuple[Ints, int | None], tuple[int, int]]

    def with_own(self, own: list[Shard], mesh: Mesh) -> Sequence[Shard]:
        """All shards in the order of their ranks, with this coordinate's own shards filled in."""
        span = self.spans.get((mesh.coordinate, mesh.rank)) if mesh.coordinate is not None else None
        if span is not None:
            return ShardList(self.ordered, *span, in_rank_order(own) if len(own) > 1 else tuple(own))
        others = (shard for coordinate, shards in self.cells if coordinate != mesh.coordinate for shard in shards)
        return in_rank_order((*own, *others))


def _layout(m: MachineState, shape: Ints, mesh: Mesh, placements: tuple[Placement, ...], scatter: int) -> DTensorLayout:
    """The layout of a tensor on a mesh; computed once for all tensors of a shape."""
    m.spend(prod(mesh.sizes) // 8)
    key = (shape, mesh.sizes, mesh.ranks, placements)
    layouts = m.repeated.layouts
    if key not in layouts:
        m.spend(prod(mesh.sizes) * (4 + scatter))
        cells = _all_shards(*key)
        ordered = in_rank_order(shard for _, shards in cells for shard in shards)
        layouts[key] = DTensorLayout(cells, ordered, _spans(cells, mesh.ranks))
    found: DTensorLayout = layouts[key]
    return found


def _spans(cells: list[tuple[Ints, list[Shard]]], ranks: Ints | None) -> dict[tuple[Ints, int | None], tuple[int, int]]:
    """The index range of each coordinate's shards, if all shards are in the order of their ranks."""
    spans: dict[tuple[Ints, int | None], tuple[int, int]] = {}
    if ranks is None or len(set(ranks)) < len(ranks):
        return spans
    at = 0
    for rank, (coordinate, shards) in sorted(zip(ranks, cells, strict=True), key=lambda pair: pair[0]):
        spans[coordinate, rank] = at, at + len(shards)
        at += len(shards)
    return spans


def _all_shards(
    shape: Ints, sizes: Ints, ranks: Ints | None, placements: tuple[Placement, ...]
) -> list[tuple[Ints, list[Shard]]]:
    rows = []
    for i, coordinate in enumerate(product(*map(range, sizes))):
        runs = local_runs(shape, sizes, coordinate, placements)
        rank = ranks[i] if ranks is not None else None
        filled = all(n for r in runs for _, n in r) and all(runs)
        rows.append((coordinate, [Shard(box, rank, None) for box, _ in grid_boxes(runs)] if filled else []))
    return rows


def local_runs(shape: Ints, sizes: Ints, coordinate: Ints, placements: tuple[Placement, ...]) -> list[list[Run]]:
    """The indices of the rank at `coordinate` along each tensor dimension, as `(start, length)` runs."""
    runs: list[list[Run]] = [[(0, n)] for n in shape]
    cuts = zip(sizes, coordinate, placements, strict=True)
    for size, c, placement in sorted(cuts, key=lambda cut: cut[2].turn or 0):
        d = placement.dim
        if placement.kind == "Shard":
            runs[d] = chunk_runs(runs[d], size, c)
        elif placement.kind == "_StridedShard":
            runs[d] = strided_chunk_runs(runs[d], size, c, placement.split_factor)
    return runs


def _placement(value: Any, ndim: int) -> Placement:
    kind = value.name.rpartition(".")[2] if isinstance(value, Opaque) else "?"
    fields = attributes(value)
    dim, split = fields.get("dim", 0), fields.get("split_factor", 1)
    if kind in SHARDS and not (type(dim) is int and 0 <= dim < ndim and type(split) is int):
        raise ValueError(f"a DTensor of {ndim} dimensions is sharded along {describe_for_error(dim)}")
    if kind == "_StridedShard" and not 1 <= split <= MAX_MESH:
        raise ValueError(f"a strided shard with split factor {describe_for_error(split)}")
    if kind in SHARDS:
        return _shard_placement(kind, dim, split)
    if kind in ("Partial", "_Partial"):
        return Placement(f"Partial({_word(fields.get('reduce_op', ''))})")
    return Placement(_word(kind))


@lru_cache(maxsize=64)
def _shard_placement(kind: str, dim: int, split: int) -> Placement:
    return Placement(kind, dim, split)


@lru_cache(maxsize=64)
def _in_turn(placements: tuple[Placement, ...], order: tuple[tuple[int, Ints], ...]) -> tuple[Placement, ...]:
    return in_turn(placements, order)


def in_turn(placements: tuple[Placement, ...], order: Sequence[tuple[int, Ints]]) -> tuple[Placement, ...]:
    """Add turns to placements, from the mesh dimensions that cut each tensor dimension, first to last.

    The split factor of a `_StridedShard` already implies its turn; torch 2.10 states the order as well.

    Raises:
        ValueError: the order contradicts the placements.
    """
    found = list(placements)
    for dim, mesh_dims in order:
        if sorted(mesh_dims) != [n for n, p in enumerate(placements) if p.kind in SHARDS and p.dim == dim]:
            raise ValueError(
                f"a DTensor whose shard order {describe_for_error((dim, mesh_dims))} is not its placements'"
            )
        said_twice = any(placements[n].kind == "_StridedShard" for n in mesh_dims)
        if not said_twice and mesh_dims != tuple(sorted(mesh_dims)):
            for turn, n in enumerate(mesh_dims):
                found[n] = found[n]._replace(turn=turn)
    return tuple(found)


def _shard_order(value: Any) -> tuple[tuple[int, Ints], ...]:
    """The entries of a `shard_order`; empty if the file states none, as with older torch or `_StridedShard`.

    Raises:
        ValueError: it is malformed.
    """
    listed = value[:99] if isinstance(value, (list, tuple)) else () if value is None else (value,)
    entries = tuple([entry.args if isinstance(entry, Opaque) else entry for entry in listed])
    if not all(map(_is_entry, entries)):
        raise ValueError("a DTensor with a shard order of unknown form")
    return entries


def _is_entry(entry: Any) -> bool:
    """Whether a value is a tensor dimension with mesh dimensions."""
    if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], tuple)):
        return False
    return len(entry[1]) <= MAX_MESH_DIMS and all(type(n) is int for n in (entry[0], *entry[1]))


def _word(value: Any) -> str:
    """A name from the file, shortened to a word of a placement's name."""
    return (
        value
        if isinstance(value, str) and len(value) < 64 and value.replace("_", "").isalnum()
        else describe_for_error(value)
    )
