"""The DeviceMesh of a DTensor: which rank has which place, and what it says of the world.

DeviceMesh has two forms: up to 2.8 at least `mesh` (an int tensor of ranks), `_flatten_mesh_list` (the same numbers
as plain ints) and `_coordinate_on_dim`; in 2.13 `_layout` (one `_FlatLayout(shape, stride)` per dimension),
`_flatten_rank_map` (of the root mesh), `_rank` and `_coordinate_on_dim`. So no tensor has to be read for it.

Source: torch/distributed/device_mesh.py, _mesh_layout.py; checked on files of torch 2.2.2, 2.4.1, 2.6.0 and 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ckptools.model.regions import Ints, contiguous_strides
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
    sizes, strides = _layout(layout) if layout is not None else (_mesh_shape(fields), None)
    if len(sizes) > MAX_MESH_DIMS or prod(sizes) > MAX_MESH:
        raise ValueError(f"a device mesh of {describe_for_error(sizes)} ranks")
    coordinate = fields.get("_coordinate_on_dim")
    place = tuple(coordinate) if isinstance(coordinate, (list, tuple)) and len(coordinate) == len(sizes) else None
    if place is not None and not all(type(c) is int and 0 <= c < n for c, n in zip(place, sizes, strict=True)):
        raise ValueError(f"a mesh coordinate {describe_for_error(place)} outside {describe_for_error(sizes)}")
    known = _rank_list(fields.get("_flatten_rank_map") or fields.get("_flatten_mesh_list"))
    rank = fields.get("_rank") if type(fields.get("_rank")) is int else None
    ranks = _ranks(known, sizes, strides, place, rank)
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


OTHERS = Mesh((), None, None, None, None, 2)
"""Stands for what a file says that holds pieces of a tensor and not all: that there is another rank."""
