"""Patch torch in `offline()`: how three classes take their pickled state.

- `ShardedTensor` compares the rank and the world size that saved it with the current process group's.
- `DeviceMesh` has had several states: up to 2.9 `mesh` (an int tensor of ranks) and `mesh_dim_names`, then
  `_layout` over a `_rank_map`; one form is not read by the other's code. It also carries names of process groups,
  which do not exist in another process, or are those of other groups. And a slice of a larger mesh finds its own
  ranks by asking for the current one.
- `DTensorSpec` got fields (`shard_order`) that older states lack, keeps hashes that hold in one process only, and
  holds placements that became C++ objects.

Source: torch/distributed/_shard/sharded_tensor/api.py, device_mesh.py, tensor/_dtensor_spec.py; checked with torch
2.13.0 on files of torch 1.13.1 to 2.13.0, and with torch 2.11.0 and 2.12.0 on files of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

State = dict[str, Any]

GROUP_FIELDS = ("_dim_group_names", "_dim_group_infos", "_pg_registry")
NO_GROUP = "(none: loaded offline by ckptools)"
"""Takes the place of a process group's name, and turns up in torch's error when something asks for the group."""


def patches() -> list[tuple[type, str, Callable[..., Any]]]:
    """`(class, method name, replacement)` for the installed torch."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return [
        (ShardedTensor, "__setstate__", _set_sharded_tensor),
        (ShardedTensor, "__getstate__", _sharded_tensor_state(ShardedTensor.__getstate__)),
        (DeviceMesh, "__setstate__", _set_mesh),
        (DTensorSpec, "__setstate__", _set_spec),
    ]


def _set_sharded_tensor(tensor: Any, state: tuple[Any, ...]) -> None:
    """Take a ShardedTensor's state as it is, and note who saved it."""
    from torch import distributed

    tensor._local_shards, tensor._metadata, saved_by, tensor._sharding_spec, _ = state
    tensor._sharded_tensor_id = None
    tensor._init_rrefs = False  # would look for an RPC agent
    tensor._process_group = distributed.group.WORLD
    tensor._ckptools_group = saved_by
    tensor._ckptools_rank = saved_by.global_rank
    tensor._ckptools_world_size = saved_by.global_world_size


def _sharded_tensor_state(original: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
    """Make a `__getstate__` that says again who saved the tensor, not who has loaded it."""

    def get_state(tensor: Any) -> tuple[Any, ...]:
        if not hasattr(tensor, "_ckptools_group"):
            return original(tensor)
        saved_by = tensor._ckptools_group
        return tensor._local_shards, tensor._metadata, saved_by, tensor._sharding_spec, tensor._init_rrefs

    return get_state


def _set_mesh(mesh: Any, state: State) -> None:
    """Make a DeviceMesh of the installed torch's form from a state of any form, without process groups.

    A slice of a larger mesh becomes a mesh of its own ranks.
    """
    ranks = mesh_ranks(state)
    place = state.get("_coordinate_on_dim")
    rank = state.get("_rank")
    if ranks is None:  # a slice, saved by a rank that is not in it: it is unknown which slice
        mesh.__dict__.update({k: v for k, v in state.items() if k not in GROUP_FIELDS}, _pg_registry={})
    else:
        if rank is None and place is not None:
            rank = int(ranks[tuple(place)])
        mesh.__dict__.update(_standalone(type(mesh), state, ranks, rank))
        mesh._coordinate_on_dim = None if place is None else tuple(place)
    ndim = 0 if ranks is None else ranks.ndim
    mesh._dim_group_names = [NO_GROUP] * ndim
    mesh._dim_group_infos = [("", [], NO_GROUP)] * ndim  # torch 2.6: tag, ranks and name of each group
    mesh._ckptools_rank = rank
    mesh._ckptools_world_size = _world_size(state, ranks)
    mesh._ckptools_root_ranks = tuple(state.get("_flatten_rank_map") or ())


def mesh_ranks(state: State) -> Any:
    """Rank of every coordinate as an int tensor of the mesh's shape; None when the state does not say.

    The numbers are taken from the plain lists that torch keeps beside its tensors, which `map_location` may have
    put on another device, or on none.
    """
    import torch

    layout = state.get("_layout")
    if "mesh" in state:
        listed = state.get("_flatten_mesh_list")
        return state["mesh"] if listed is None else torch.tensor(listed).reshape(state["mesh"].shape)
    if layout is None or "_flatten_rank_map" not in state:
        return None
    if not hasattr(layout, "axes") and hasattr(type(layout), "from_sizes_strides"):
        layout = _with_axes(layout)
    slices = layout.remap_to_tensor(torch.tensor(state["_flatten_rank_map"]))  # every slice that looks like this one
    if len(slices) == 1:
        return slices[0]
    found = (slices == state.get("_rank", -1)).nonzero()
    return slices[int(found[0, 0])] if len(found) else None


def _with_axes(layout: Any) -> Any:
    """A `_MeshLayout` of torch before 2.13, which has one shape and stride of all dimensions, in the form of 2.13."""
    from torch.distributed._mesh_layout import _FlatLayout

    shape, stride = (value if isinstance(value, tuple) else (value,) for value in (layout.shape, layout.stride))
    return type(layout)(tuple(map(_FlatLayout, shape, stride)))


def _standalone(cls: type, state: State, ranks: Any, rank: int | None) -> State:
    """The attributes of a mesh of these ranks, as the installed torch makes it."""
    device_type = state.get("_device_type", state.get("device_type"))
    names = state.get("_mesh_dim_names", state.get("mesh_dim_names"))
    me = {"_rank": rank} if "_rank" in signature(cls).parameters else {}
    made: State = vars(cls(device_type, ranks, mesh_dim_names=names, _init_backend=False, **me))
    return made


def _world_size(state: State, ranks: Any) -> int:
    """Ranks of the outermost mesh."""
    outer = state.get("_root_mesh") or state.get("_parent_mesh")
    here = len(state.get("_flatten_rank_map") or ()) if ranks is None else ranks.numel()
    return max(here, getattr(outer, "_ckptools_world_size", 0))


def _set_spec(spec: Any, state: State) -> None:
    """Take a DTensorSpec's state, make what it lacks, and make its `Replicate`s again.

    Up to 2.8 or so a `Replicate` was pickled without a state. The installed torch's is a C++ object that only its
    state brings to life: the first look at one that got none ends the process.
    """
    from torch.distributed.tensor import Replicate

    fresh = tuple(Replicate() if type(p) is Replicate else p for p in state["placements"])
    spec.__dict__.update(state, placements=fresh, _hash=None)
    if "shard_order" not in state:
        spec.__post_init__()
