"""Load real torch objects from one rank's file, without the cluster.

`torch.load` of a rank file needs the process group that saved it: a `ShardedTensor` refuses another rank or world size,
and a `DTensor`'s mesh names process groups that do not exist. `offline()` makes a group of this process alone and
removes the checks while it lasts; `load_shard` loads a file inside it.

The group is Gloo over an in-process store, so it needs no port, and any number of processes can do this on one host.
torch is imported on use.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from ckptools.errors import CkptoolsError, ForeignClassError, ReadError
from ckptools.files.opening import File
from ckptools.pickles import reader

# -- patches of torch in `offline()`: three classes accept their pickled state without their process group
# - `ShardedTensor` compares the rank and the world size that saved it with the current process group's.
# - `DeviceMesh` has had several states: up to 2.9 `mesh` (an int tensor of ranks) and `mesh_dim_names`, then
#   `_layout` over a `_rank_map`; code for one form cannot read the other. It also has names of process groups, which
#   do not exist in another process, or name other groups. And a slice of a larger mesh finds its own ranks by
#   asking for the current one.
# - `DTensorSpec` has fields (`shard_order`) that older states lack, keeps hashes that are valid in one process only,
#   and has placements that became C++ objects.
#
# Source: torch/distributed/_shard/sharded_tensor/api.py, device_mesh.py, tensor/_dtensor_spec.py; checked with torch
# 2.13.0 on files of torch 1.13.1 to 2.13.0, and with torch 2.11.0 and 2.12.0 on files of their own.


State = dict[str, Any]

GROUP_FIELDS = ("_dim_group_names", "_dim_group_infos", "_pg_registry")
NO_GROUP = "(none: loaded offline by ckptools)"
"""Replaces a process group's name, and appears in torch's error if something asks for the group."""


def patches() -> list[tuple[type, str, Callable[..., Any]]]:
    """List `(class, method name, replacement)` for the installed torch."""
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
    """Set a ShardedTensor's state without checks, and keep the rank that saved it."""
    from torch import distributed

    tensor._local_shards, tensor._metadata, saved_by, tensor._sharding_spec, _ = state
    tensor._sharded_tensor_id = None
    tensor._init_rrefs = False  # would look for an RPC agent
    tensor._process_group = distributed.group.WORLD
    tensor._ckptools_group = saved_by
    tensor._ckptools_rank = saved_by.global_rank
    tensor._ckptools_world_size = saved_by.global_world_size


def _sharded_tensor_state(original: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
    """Make a `__getstate__` that keeps the rank that saved the tensor, in place of the rank that loaded it."""

    def get_state(tensor: Any) -> tuple[Any, ...]:
        if not hasattr(tensor, "_ckptools_group"):
            return original(tensor)
        saved_by = tensor._ckptools_group
        return tensor._local_shards, tensor._metadata, saved_by, tensor._sharding_spec, tensor._init_rrefs

    return get_state


def _set_mesh(mesh: Any, state: State) -> None:
    """Set a DeviceMesh from a state of any torch version, in the form of the installed one, without process groups.

    A slice of a larger mesh becomes a mesh of its own ranks.
    """
    ranks = mesh_ranks(state)
    place = state.get("_coordinate_on_dim")
    rank = state.get("_rank")
    if ranks is None:  # a rank outside of a slice saved it: unknown which slice
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
    """Return the rank of every coordinate as an int tensor of the mesh's shape; None if the state does not tell.

    The ranks come from the plain lists that torch keeps beside its tensors, as `map_location` may have moved the
    tensors to another device, or to none.
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
    slices = layout.remap_to_tensor(torch.tensor(state["_flatten_rank_map"]))  # all slices of this shape and stride
    if len(slices) == 1:
        return slices[0]
    found = (slices == state.get("_rank", -1)).nonzero()
    return slices[int(found[0, 0])] if len(found) else None


def _with_axes(layout: Any) -> Any:
    """Convert a `_MeshLayout` from before torch 2.13, with a single shape and stride, to the form of 2.13."""
    from torch.distributed._mesh_layout import _FlatLayout

    shape, stride = (value if isinstance(value, tuple) else (value,) for value in (layout.shape, layout.stride))
    return type(layout)(tuple(map(_FlatLayout, shape, stride)))


def _standalone(cls: type, state: State, ranks: Any, rank: int | None) -> State:
    """Return the attributes of a mesh of these ranks, as the installed torch makes it."""
    device_type = state.get("_device_type", state.get("device_type"))
    names = state.get("_mesh_dim_names", state.get("mesh_dim_names"))
    me = {"_rank": rank} if "_rank" in signature(cls).parameters else {}
    made: State = vars(cls(device_type, ranks, mesh_dim_names=names, _init_backend=False, **me))
    return made


def _world_size(state: State, ranks: Any) -> int:
    """Number of ranks of the outermost mesh."""
    outer = state.get("_root_mesh") or state.get("_parent_mesh")
    here = len(state.get("_flatten_rank_map") or ()) if ranks is None else ranks.numel()
    return max(here, getattr(outer, "_ckptools_world_size", 0))


def _set_spec(spec: Any, state: State) -> None:
    """Set a DTensorSpec's state, with fresh `Replicate`s and with the fields that it lacks.

    Up to about torch 2.8, `Replicate` was pickled without a state. The installed torch's is a C++ object that is not
    initialised without one: its first use crashes the process.
    """
    from torch.distributed.tensor import Replicate

    fresh = tuple(Replicate() if type(p) is Replicate else p for p in state["placements"])
    spec.__dict__.update(state, placements=fresh, _hash=None)
    if "shard_order" not in state:
        spec.__post_init__()


# -- torch offline -----------------------------------------------------------------------------------------------------


MapLocation = Any  # as for `torch.load`: a device, its name, a dict or a function

_lock = threading.RLock()
_inside = 0
_undo = ExitStack()


@contextmanager
def offline() -> Iterator[None]:
    """Allow rank files of any rank and world size to be loaded, by `torch.load` or `ckptools.load_shard`.

    Inside, `ShardedTensor`s load without a comparison with the current process group, and meshes of `DTensor`s saved by
    torch 2.2 and later are converted to the installed torch's form. Afterwards `local_shards()`, `metadata()`,
    `size()`, `dtype` of a ShardedTensor and `to_local()`, `placements`, `device_mesh` of a DTensor work, and both the
    tensor and the mesh keep the rank and world size that saved them as `_ckptools_rank` and `_ckptools_world_size`.
    Methods that need the other ranks (`full_tensor()`, `gather()`) raise torch's own error: no group is faked.

    An existing process group is used and left alone. Everything is undone on exit, also after an exception; with
    several threads or nested use, when the last one exits.
    """
    global _inside
    with _lock:
        if not _inside:
            _undo.enter_context(_entered())
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _undo.close()


@contextmanager
def _entered() -> Iterator[None]:
    """Make the process group and the patches, and undo them."""
    from torch import distributed

    with ExitStack() as stack:
        if distributed.is_available():
            stack.enter_context(_own_group())
            for owner, name, replacement in patches():
                stack.enter_context(_patched(owner, name, replacement))
        yield


@contextmanager
def _own_group() -> Iterator[None]:
    """Make a process group of this process alone, unless there is a group already."""
    from torch import distributed
    from torch._C._distributed_c10d import HashStore

    if distributed.is_initialized():
        yield
        return
    excepthook = sys.excepthook
    distributed.init_process_group("gloo", store=HashStore(), world_size=1, rank=0)
    sys.excepthook = excepthook  # torch's hook writes "[rank0]:" before tracebacks, even after the group is destroyed
    group = distributed.group.WORLD
    try:
        yield
    finally:
        if distributed.is_initialized() and distributed.group.WORLD is group:
            distributed.destroy_process_group()


@contextmanager
def _patched(owner: type, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of a class; an inherited or missing method is removed again."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def load_shard(path: str | Path, map_location: MapLocation = "cpu", trust: bool = False) -> Any:
    """Load one torch.save file as real objects: dicts, tensors, `ShardedTensor`s, `DTensor`s.

    The file is mapped, not read: a tensor's bytes are read from disk when they are used. (Files from before torch 1.6
    cannot be mapped and are read; compressed ones are first unpacked into a temporary file.)

    Args:
        path: one rank's file, or any file that torch.save wrote.
        map_location: device for the tensors, as in `torch.load`.
        trust: run whatever code the pickle names, as `torch.load(weights_only=False)` does. Otherwise only classes of
            `ckptools.torch_engine.allow_list` are built, and classes that the caller has added by
            `torch.serialization.add_safe_globals`.

    Raises:
        ReadError: the file is missing, cut, damaged, or not a torch.save file.
        ForeignClassError: the file needs classes that are not on the allow-list; `.names` lists all of them.
    """
    path = Path(path)
    return load_named(path, () if trust else reader.read(path).names, map_location, trust)


def load_named(path: Path, names: Sequence[str], map_location: MapLocation = "cpu", trust: bool = False) -> Any:
    """Load a file as `load_shard` does, given the names that it mentions."""
    from ckptools.torch_engine import allow_list

    path, zipped = _loadable(path)
    with offline(), _lock:  # one at a time: torch's allow-list and warnings are global
        if trust:
            return _load(path, map_location, zipped, weights_only=False)
        with allow_list.allowing(path, names):
            return allow_list.finished(_load(path, map_location, zipped, weights_only=True))


def load_plain(path: Path) -> Any:
    """Load a zip archive as plain `torch.load(path, mmap=True)` does, which builds only classes on torch's own list."""
    return _load(path, "cpu", True, weights_only=True)


def _loadable(path: Path) -> tuple[Path, bool]:
    """Return the file, or a temporary copy if it is compressed; and whether that is a zip archive."""
    with File(path) as file, reader.decompressed(file) as (opened, contents):
        if contents[-1] == "tar":
            raise ReadError(path, "is a tar, which torch.load does not look into; unpack it first")
        return opened.path, contents[-1] == "zip"


def _load(path: Path, map_location: MapLocation, zipped: bool, weights_only: bool) -> Any:
    import torch

    from ckptools.torch_engine.allow_list import Refused

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch's own deprecated storage classes
            return torch.load(path, map_location=map_location, mmap=zipped, weights_only=weights_only)
    except Refused as error:
        raise ForeignClassError(path, [str(error)]) from error
    except (CkptoolsError, MemoryError):
        raise
    except Exception as error:
        raise ReadError(path, f"torch cannot load it: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """Return the line of torch's message that tells the cause."""
    text = str(error).replace("WeightsUnpickler error:", "\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, UnpicklingError):
        lines = [line for line in lines if not line.startswith(_ADVICE)] or lines
    if lines and lines[0].startswith("Unsupported operand"):  # usually an opcode of pickle protocol 4
        lines[0] += ", in trusted files only (trust=True)"
    return f"{lines[0]:.200}" if lines else type(error).__name__


_ADVICE = ("Weights only load failed", "(1)", "(2)", "Please file an issue", "Check the documentation")
