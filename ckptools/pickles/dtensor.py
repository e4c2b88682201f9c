"""DTensor (FSDP2, FSDP1 with a device mesh, tensor parallel), torch 2.2 to 2.13.

The pickled state holds `_local_tensor` and `_spec`, a `DTensorSpec` of mesh, placements and tensor_meta; the global
shape and dtype are in the call's own arguments. What lies where follows from the mesh coordinate: going through the
mesh dimensions from left to right, `Shard(d)` keeps this coordinate's chunk of the index list of dimension d,
`_StridedShard(d, sf)` keeps it in each of sf pieces, `Replicate` keeps all. `Partial` would have to be reduced over
ranks, so it is named and not read.

DeviceMesh has two forms: up to 2.8 at least `mesh` (an int tensor of ranks), `_flatten_mesh_list` (the same numbers
as plain ints) and `_coordinate_on_dim`; in 2.13 `_layout` (one `_FlatLayout(shape, stride)` per dimension),
`_flatten_rank_map` (of the root mesh), `_rank` and `_coordinate_on_dim`. So no tensor has to be read for it.

Source: torch/distributed/device_mesh.py, _mesh_layout.py, tensor/_dtensor_spec.py, tensor/placement_types.py; checked
on files of torch 2.2.2, 2.4.1, 2.6.0 and 2.13.0, and with torch's own full tensors for uneven 2-D strided shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ckptools.model.regions import Ints, Run, chunk_runs, contiguous_strides, grid_boxes, strided_chunk_runs
from ckptools.model.tensor import Shard, Source, Tensor, in_rank_order
from ckptools.model.values import Opaque, describe_for_error
from ckptools.pickles.sharded import attributes

if TYPE_CHECKING:
    from ckptools.pickles.machine_state import MachineState

MAX_MESH = 1 << 20
"""Ranks in a mesh; more than any cluster has, few enough to list."""

MAX_MESH_DIMS = 16
MAX_SCATTER = 1024
"""Runs of rows that strided shards may scatter one rank's piece into; torch makes as many as a mesh dimension has."""

SHARDS = ("Shard", "_StridedShard")


@dataclass(frozen=True)
class Mesh:
    """A device mesh as one rank saw it.

    Attributes:
        sizes: ranks per mesh dimension.
        coordinate: this rank's place in it; None on a rank that is not in the mesh.
        rank: this rank, when the file tells.
        ranks: rank of every coordinate in row-major order; None when the file does not tell.
        world_size: ranks of the world; None when the file does not tell.
        at_least: ranks that the world has at least.
        names_root: whether a slice would name the mesh that it was cut from; older ones do not.
    """

    sizes: Ints
    coordinate: Ints | None
    rank: int | None
    ranks: Ints | None
    world_size: int | None
    at_least: int
    names_root: bool


@dataclass(frozen=True)
class Placement:
    """How a mesh dimension cuts a tensor.

    Attributes:
        kind: `Shard`, `_StridedShard`, `Replicate`, or the name of one that cannot be placed.
        dim: tensor dimension, for the two kinds of shard.
        split_factor: pieces that were cut before, for `_StridedShard`.
    """

    kind: str
    dim: int = 0
    split_factor: int = 1

    def __str__(self) -> str:
        if self.kind.startswith("Partial("):
            return self.kind
        inner = {"Shard": f"{self.dim}", "_StridedShard": f"{self.dim}, sf={self.split_factor}"}
        return f"{self.kind}({inner.get(self.kind, '')})"


def describe(m: MachineState, shape: Ints, dtype: str, state: Any) -> Tensor:
    """Describe a DTensor from its state.

    Raises:
        ValueError: the state is not what torch writes, or the local tensor does not fit its place.
    """
    holder = Opaque("DTensor")
    holder.state = state
    fields = attributes(holder)
    local, spec = fields.get("_local_tensor"), attributes(fields.get("_spec"))
    if not isinstance(local, Tensor) or "mesh" not in spec:
        raise ValueError("a DTensor with an unknown state")
    mesh = _mesh(spec["mesh"])
    m.spend(prod(mesh.sizes) // 8)
    listed = spec.get("placements")
    placements = tuple(_placement(p, len(shape)) for p in (listed if isinstance(listed, (list, tuple)) else ())[:99])
    if len(placements) != len(mesh.sizes):
        raise ValueError(f"a DTensor with {len(placements)} placements on a mesh of {len(mesh.sizes)} dimensions")
    note_mesh(mesh, m.claims, m.meshes)
    return _placed(m, shape, dtype, local, mesh, placements)


def note_mesh(mesh: Mesh, claims: set[Claim], meshes: set[Mesh]) -> None:
    """Note what a mesh says of the world: as a claim where it names its root, else among the meshes that may not."""
    if mesh.names_root and mesh.world_size is not None:
        claims.add((mesh.rank, mesh.world_size))
    else:
        meshes.add(mesh)


def _placed(
    m: MachineState, shape: Ints, dtype: str, local: Tensor, mesh: Mesh, placements: tuple[Placement, ...]
) -> Tensor:
    names = tuple(map(str, placements))
    strange = [p.kind for p in placements if p.kind not in (*SHARDS, "Replicate")]
    if strange:
        note = f"placement {strange[0]}: the ranks hold terms that must be reduced; ckptools does not guess how"
        return Tensor(shape, dtype, (), "unreadable", names, mesh.sizes, world_size=mesh.world_size, note=note)
    scatter = prod(p.split_factor for p in placements)
    if scatter > MAX_SCATTER:
        raise ValueError(f"a DTensor scattered over {describe_for_error(scatter)} runs")
    own = _own_shards(shape, dtype, local, mesh, placements)
    others = _other_shards(m, shape, mesh, placements, scatter)
    return Tensor(
        shape, dtype, in_rank_order((*own, *others)), "dtensor", names, mesh.sizes, world_size=mesh.world_size
    )


def _own_shards(shape: Ints, dtype: str, local: Tensor, mesh: Mesh, placements: tuple[Placement, ...]) -> list[Shard]:
    """The pieces of the local tensor; more than one when a strided shard scatters its rows."""
    if mesh.coordinate is None:
        return []
    runs = local_runs(shape, mesh.sizes, mesh.coordinate, placements)
    expected = tuple(sum(n for _, n in r) for r in runs)
    source: Source | None = local.shards[0].source if local.shards else None
    if local.dtype != dtype or (local.shape != expected and prod(local.shape) + prod(expected)):
        raise ValueError(f"a DTensor whose local tensor is {local.shape} {local.dtype}, expected {expected} {dtype}")
    if not prod(expected) or source is None:
        return []
    return [Shard(place, mesh.rank, source.part(packed)) for place, packed in grid_boxes(runs)]


def _other_shards(
    m: MachineState, shape: Ints, mesh: Mesh, placements: tuple[Placement, ...], scatter: int
) -> tuple[Shard, ...]:
    """What the other coordinates of the mesh hold, by the rule; their bytes are in other files."""
    m.spend(prod(mesh.sizes) // 8)
    key = (shape, mesh.sizes, mesh.ranks, placements)
    layouts = m.repeated.layouts
    if key not in layouts:
        m.spend(prod(mesh.sizes) * (4 + scatter))
        layouts[key] = _all_shards(*key)
    return tuple(shard for coordinate, shards in layouts[key] if coordinate != mesh.coordinate for shard in shards)


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
    """Index list per tensor dimension that the rank at `coordinate` holds, as `(start, length)` runs."""
    runs: list[list[Run]] = [[(0, n)] for n in shape]
    for size, c, placement in zip(sizes, coordinate, placements, strict=True):
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
    if kind in ("Partial", "_Partial"):
        return Placement(f"Partial({_word(fields.get('reduce_op', ''))})")
    return Placement(_word(kind), dim if kind in SHARDS else 0, split if kind in SHARDS else 1)


def _word(value: Any) -> str:
    """A name from the file as a part of a placement's name; never more than a word."""
    return (
        value
        if isinstance(value, str) and len(value) < 64 and value.replace("_", "").isalnum()
        else describe_for_error(value)
    )


def _mesh(value: Any) -> Mesh:
    fields = attributes(value)
    layout = fields.get("_layout")
    sizes, strides = _layout(layout) if layout is not None else (_mesh_shape(fields), None)
    if len(sizes) > MAX_MESH_DIMS or prod(sizes) > MAX_MESH:
        raise ValueError(f"a device mesh of {describe_for_error(sizes)} ranks")
    coordinate = fields.get("_coordinate_on_dim")
    place = tuple(coordinate) if isinstance(coordinate, (list, tuple)) and len(coordinate) == len(sizes) else None
    if place is not None and not all(type(c) is int and 0 <= c < n for c, n in zip(place, sizes, strict=True)):
        raise ValueError(f"a mesh coordinate {describe_for_error(place)} outside {describe_for_error(sizes)}")
    known = _rank_list(fields.get("_flatten_rank_map") or fields.get("_flatten_mesh_list"))
    rank = fields.get("_rank") if type(fields.get("_rank")) is int else None
    ranks, root = _ranks(known, sizes, strides, place, rank), layout is not None
    if rank is None and ranks is not None and place is not None:
        rank = ranks[_flat_index(sizes, place)]
    return Mesh(sizes, place, rank, ranks, *worlds(_world_size(fields, sizes), ranks, root), root)


def worlds(outermost: int, ranks: Ints | None, names_root: bool) -> tuple[int | None, int]:
    """Ranks of the world, and ranks that it has at least.

    Args:
        outermost: ranks of the outermost mesh that is known.
        ranks: of the mesh itself; None when the file does not tell.
        names_root: whether a slice would name the mesh that it was cut from. Older ones do not, and then the largest
            rank of a slice is no world size.
    """
    at_least = max(outermost, max(ranks or (0,)) + 1)
    whole = names_root or ranks is None or sorted(ranks) == list(range(at_least))
    return at_least if whole else None, at_least


Claim = tuple[int | None, int]
"""Rank, which may be None, and world size."""


def claims_of(told: Iterable[Claim], meshes: Iterable[Mesh]) -> tuple[frozenset[Claim], bool]:
    """What a file claims, and whether its world sizes are only what the world has at least.

    Args:
        told: what ShardedTensors say, and meshes that name the one that they were cut from.
        meshes: the others. Several in one file may be slices of one world: the one with the most ranks speaks for all.
    """
    listed, sure = list(meshes), max((world for _, world in told), default=0)
    most = max((mesh.at_least for mesh in listed), default=0)
    known = max((mesh.world_size or 0 for mesh in listed), default=0)
    world = max(most, sure)
    return frozenset(told) | {(mesh.rank, world) for mesh in listed}, world > max(known, sure)


def _ranks(known: Ints | None, sizes: Ints, strides: Ints | None, place: Ints | None, rank: int | None) -> Ints | None:
    """Rank of every coordinate. With strides the list is the root mesh's, and ours the slice that holds `rank`."""
    if known is None:
        return None
    if strides is None:
        return known if len(known) == prod(sizes) else None
    if rank not in known or place is None:
        return None
    base = known.index(rank) - sum(c * s for c, s in zip(place, strides, strict=True))
    if strides == contiguous_strides(sizes):
        return known[base : base + prod(sizes)] if 0 <= base <= len(known) - prod(sizes) else None
    at = [base + sum(c * s for c, s in zip(cell, strides, strict=True)) for cell in product(*map(range, sizes))]
    return tuple(known[i] for i in at) if all(0 <= i < len(known) for i in at) else None


def _layout(value: Any) -> tuple[Ints, Ints | None]:
    """Sizes and strides of a `_MeshLayout`, one axis per mesh dimension; strides None when an axis is nested."""
    fields = attributes(value)
    axes = [attributes(axis) for axis in (fields.get("axes") or ())[: MAX_MESH_DIMS + 1]]
    if not axes and "shape" in fields:  # an earlier form: shape and stride directly
        axes = [{"shape": (n,), "stride": (s,)} for n, s in zip(fields["shape"], fields["stride"], strict=True)]
    shapes = [_rank_list(axis.get("shape")) for axis in axes]
    strides = [_rank_list(axis.get("stride")) for axis in axes]
    if not axes or any(s is None or len(s) > MAX_MESH_DIMS for s in shapes):
        raise ValueError("a device mesh of unknown layout")
    sizes = tuple(prod(s or ()) for s in shapes)
    flat = all(s is not None and len(s) == 1 for s in strides)
    return sizes, tuple((s or (0,))[0] for s in strides) if flat else None


def _mesh_shape(fields: dict[str, Any]) -> Ints:
    mesh = fields.get("mesh", fields.get("_mesh"))
    if not isinstance(mesh, Tensor):
        raise ValueError("a device mesh of unknown form")
    return mesh.shape


def _world_size(fields: dict[str, Any], sizes: Ints) -> int:
    """Ranks of the outermost mesh that this one was sliced from."""
    world = prod(sizes)
    for _ in range(8):
        outer = fields.get("_root_mesh") or fields.get("_parent_mesh")
        if not isinstance(outer, Opaque):
            break
        fields = attributes(outer)
        known = _rank_list(fields.get("_flatten_rank_map") or fields.get("_flatten_mesh_list"))
        world = max(world, len(known or ()))
    return world


def _rank_list(value: Any) -> Ints | None:
    ok = isinstance(value, (list, tuple)) and len(value) <= MAX_MESH
    return tuple(value) if ok and all(type(r) is int and 0 <= r <= MAX_MESH for r in value) else None


def _flat_index(sizes: Ints, coordinate: Ints) -> int:
    index = 0
    for n, c in zip(sizes, coordinate, strict=True):
        index = index * n + c
    return index
