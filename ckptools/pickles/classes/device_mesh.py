"""The DeviceMesh of a DTensor: which rank has which place, and what it says of the world.

DeviceMesh has three forms: up to 2.9 `mesh` (an int tensor of ranks), `_flatten_mesh_list` (the same numbers as plain
ints) and `_coordinate_on_dim`; then `_layout`, `_flatten_rank_map` (of the root mesh), `_rank` and
`_coordinate_on_dim`. So no tensor has to be read for it. A `_layout` is in 2.13 one `_FlatLayout(shape, stride)` per
dimension, and before that a `shape` and a `stride` of all: numbers where a mesh was flattened, tuples in tuples where
it was flattened from dimensions that do not follow each other.

Source: torch/distributed/device_mesh.py, _mesh_layout.py; checked on files of torch 2.2.2, 2.3.1, 2.4.1, 2.6.0, 2.9.1,
2.11.0, 2.12.0 and 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ckptools.model.regions import Box, Ints, contiguous_strides
from ckptools.model.tensor import Tensor
from ckptools.model.values import Opaque, describe_for_error
from ckptools.pickles.objects import attributes

MAX_MESH = 1 << 20
"""Ranks in a mesh; more than any cluster has, few enough to list."""

MAX_MESH_DIMS = 16

Claim = tuple[int | None, int]
"""Rank, which may be None, and world size."""


class Mesh(NamedTuple):
    """A device mesh as one rank saw it.

    Attributes:
        sizes: ranks per mesh dimension.
        coordinate: this rank's place in it; None on a rank that is not in the mesh.
        rank: this rank, if the file states it.
        ranks: rank of every coordinate in row-major order; None if the file does not state it.
        world_size: ranks of the world; None if the file does not state it.
        at_least: ranks that the world has at least.
    """

    sizes: Ints
    coordinate: Ints | None
    rank: int | None
    ranks: Ints | None
    world_size: int | None
    at_least: int


def mesh_of(value: Any) -> Mesh:
    """The mesh that the state of a DeviceMesh describes.

    Raises:
        ValueError: it is of no form that torch has written, or contradicts itself.
    """
    fields = attributes(value)
    layout = fields.get("_layout")
    axes = None if layout is None else _axes(layout)
    sizes = _mesh_shape(fields) if axes is None else tuple(prod(n for n, _ in axis) for axis in axes)
    if len(sizes) > MAX_MESH_DIMS or prod(sizes) > MAX_MESH:
        raise ValueError(f"a device mesh of {describe_for_error(sizes)} ranks")
    coordinate = fields.get("_coordinate_on_dim")
    place = tuple(coordinate) if isinstance(coordinate, (list, tuple)) and len(coordinate) == len(sizes) else None
    if place is not None and not all(type(c) is int and 0 <= c < n for c, n in zip(place, sizes, strict=True)):
        raise ValueError(f"a mesh coordinate {describe_for_error(place)} outside {describe_for_error(sizes)}")
    known = _rank_list(fields.get("_flatten_rank_map") or fields.get("_flatten_mesh_list"))
    rank = fields.get("_rank") if type(fields.get("_rank")) is int else None
    ranks = _ranks(known, sizes, axes, place, rank)
    if rank is None and ranks is not None and place is not None:
        rank = ranks[_flat_index(sizes, place)]
    return Mesh(sizes, place, rank, ranks, *worlds(_world_size(fields, sizes), ranks if layout is None else known))


def worlds(outermost: int, ranks: Ints | None) -> tuple[int | None, int]:
    """Ranks of the world, and ranks that it has at least.

    A mesh may be made over some of the ranks, as a pipeline stage's `DeviceMesh("cuda", [2, 3])` is.

    Args:
        outermost: ranks of the outermost mesh that is known.
        ranks: of that mesh, or of a slice that does not name it; None if the file does not state them.
    """
    at_least = max(outermost, max(ranks or (0,)) + 1)
    whole = ranks is None or sorted(ranks) == list(range(at_least))
    return at_least if whole else None, at_least


def claims_of(claims: Iterable[Claim], meshes: Iterable[Mesh]) -> tuple[frozenset[Claim], bool]:
    """The claims of a file, and whether its world sizes are only lower bounds.

    Args:
        claims: what ShardedTensors say.
        meshes: several in one file may be parts of one world: the one with the most ranks speaks for all.
    """
    listed, sure = list(meshes), max((world for _, world in claims), default=0)
    most = max((mesh.at_least for mesh in listed), default=0)
    known = max((mesh.world_size or 0 for mesh in listed), default=0)
    world = max(most, sure)
    return frozenset(claims) | {(mesh.rank, world) for mesh in listed}, world > max(known, sure)


Axis = list[tuple[int, int]]
"""Sizes and strides of what a mesh dimension is made of, outermost first: none for one rank, several where it was
flattened from dimensions that do not follow each other."""


def _ranks(
    known: Ints | None, sizes: Ints, axes: list[Axis] | None, place: Ints | None, rank: int | None
) -> Ints | None:
    """Rank of every coordinate. With axes the list is the root mesh's, and ours the slice that holds `rank`."""
    if known is None:
        return None
    if axes is None:
        return known if len(known) == prod(sizes) else None
    if rank not in known or place is None:
        return None
    inner = tuple(n for axis in axes for n, _ in axis)
    strides = tuple(s for axis in axes for _, s in axis)
    steps = zip(axes, place, strict=True)
    cell = [c for axis, at in steps for c in Box.whole(tuple(n for n, _ in axis)).index_of(at)]
    base = known.index(rank) - sum(c * s for c, s in zip(cell, strides, strict=True))
    if strides == contiguous_strides(inner):
        return known[base : base + prod(sizes)] if 0 <= base <= len(known) - prod(sizes) else None
    at = [base + sum(c * s for c, s in zip(cell, strides, strict=True)) for cell in product(*map(range, inner))]
    return tuple(known[i] for i in at) if all(0 <= i < len(known) for i in at) else None


def _axes(value: Any) -> list[Axis]:
    """The mesh dimensions of a `_MeshLayout`.

    Raises:
        ValueError: it is of no form that torch has written.
    """
    fields = attributes(value)
    listed = [attributes(axis) for axis in (fields.get("axes") or ())[: MAX_MESH_DIMS + 1]]
    pairs = [(axis.get("shape"), axis.get("stride")) for axis in listed]
    if not pairs:
        shape, stride = (_in_tuple(fields.get(name)) for name in ("shape", "stride"))
        pairs = list(zip(shape, stride, strict=False)) if len(shape) == len(stride) else []
    axes = [(_numbers(shape), _numbers(stride)) for shape, stride in pairs]
    if not axes or any(len(shape) != len(stride) for shape, stride in axes):
        raise ValueError("a device mesh of unknown layout")
    return [list(zip(shape, stride, strict=True)) for shape, stride in axes]


def _in_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value[: MAX_MESH_DIMS + 1]) if isinstance(value, (list, tuple)) else (value,)


def _numbers(value: Any) -> Ints:
    """The numbers of a mesh dimension, which may be in tuples of tuples.

    Raises:
        ValueError: it holds something else, or too many.
    """
    found = _in_tuple(value)
    for _ in range(MAX_MESH_DIMS):
        if len(found) > MAX_MESH_DIMS or all(type(n) is int and 0 <= n <= MAX_MESH for n in found):
            break
        found = tuple(n for part in found for n in _in_tuple(part))
    numbers = _rank_list(found)
    if numbers is None or len(numbers) > MAX_MESH_DIMS:
        raise ValueError("a device mesh of unknown layout")
    return numbers


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


OTHERS = Mesh((), None, None, None, None, 2)
"""Stands for what a file says that holds pieces of a tensor and not all: that there is another rank."""
