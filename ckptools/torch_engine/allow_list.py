"""The allow-list of the torch loader: which classes `load_shard` makes when a file is not trusted.

torch's own list (tensors, dtypes, OrderedDict …) is extended by what distributed checkpoints hold and cannot do
harm: ShardedTensor and DTensor with their parts, small Python types, numpy arrays of plain numbers. Each is known by
the name that files use, in all the spellings that torch has had. Functions among them are replaced by our own, which
do only what a checkpoint needs.

Before torch sees a file, the inert reader has listed every name in it; only those are allowed, and only while the
file is being loaded. Source of torch's side: torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckptools.errors import ForeignClassError
from ckptools.pickles import reader
from ckptools.torch_engine import stand_ins
from ckptools.torch_engine.stand_ins import only_empty_bytes, only_process_group_state, plain_dict

DTENSOR_HOMES = (
    "torch.distributed.tensor",
    "torch.distributed.tensor._api",
    "torch.distributed.tensor._dtensor_spec",
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor",
    "torch.distributed._tensor.api",
    "torch.distributed._tensor.placement_types",
)
"""Modules that DTensor and its parts were pickled under, torch 2.0 to 2.13."""


def names_in(path: Path) -> tuple[str, ...]:
    """List the dotted names that a torch.save file mentions, without running anything.

    Raises:
        ReadError: it is cut, damaged, or no torch.save file.
    """
    return reader.read(path).names


@contextmanager
def allowing(path: Path, names: Iterable[str]) -> Iterator[None]:
    """Let torch make what a file names, if all of it is allowed; what was allowed before stays so afterwards.

    Raises:
        ForeignClassError: some is not.
    """
    import torch
    from torch import _weights_only_unpickler as torchs

    ours = {name: table()[name] for name in map(spelling, names) if name in table()}
    known = torchs._get_allowed_globals().keys() | torchs._get_user_allowed_globals().keys() | ours.keys()
    foreign = list(dict.fromkeys(name for name in map(spelling, names) if name not in known))
    if foreign:
        raise ForeignClassError(path, foreign)
    entries = {(thing, name) for name, thing in ours.items()} - set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals(list(entries)):
        yield


def spelling(dotted: str) -> str:
    """Bring a name that protocol 2 writes as Python 2 did (`__builtin__.set`) into its present form."""
    module, _, name = dotted.rpartition(".")
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    return f"{IMPORT_MAPPING.get(module, module)}.{name}"


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    """The objects that may be made, by the names under which files know them. Imports torch's distributed parts."""
    return {
        **{f"{kind.__module__}.{kind.__qualname__}": kind for kind in _python_types()},
        "builtins.getattr": only_process_group_state,
        "builtins.bytes": only_empty_bytes,
        "collections.defaultdict": plain_dict,
        **stand_ins.table(),
        **_torch_types(),
    }


def _python_types() -> tuple[type, ...]:
    return (timedelta, datetime, date, frozenset, dict, list, int, float, Namespace)


def _torch_types() -> dict[str, Any]:
    from torch import distributed
    from torch.torch_version import TorchVersion

    found: dict[str, Any] = {"torch.torch_version.TorchVersion": TorchVersion}
    if distributed.is_available():
        found |= {f"{c.__module__}.{c.__qualname__}": c for c in _sharded_tensor_types()}
        found |= {f"{home}.{c.__name__}": c for c in _dtensor_types() for home in DTENSOR_HOMES}
        found |= _mesh_types()
    return found


def _sharded_tensor_types() -> Iterator[type]:
    from torch.distributed._shard import metadata as shards
    from torch.distributed._shard.sharded_tensor import metadata, shard
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
    from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
    from torch.distributed.remote_device import _remote_device

    yield from (ShardedTensor, ShardedTensor.ProcessGroupState, shard.Shard, shards.ShardMetadata, _remote_device)
    yield from (ChunkShardingSpec, EnumerableShardingSpec)
    yield from (metadata.ShardedTensorMetadata, metadata.TensorProperties, metadata.MEM_FORMAT_ENCODING)


def _dtensor_types() -> Iterator[type]:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _dtensor_spec, placement_types

    yield from (DTensor, Partial, Replicate, Shard, _dtensor_spec.DTensorSpec, _dtensor_spec.TensorMeta)
    later = ((_dtensor_spec, "ShardOrderEntry"), (placement_types, "_StridedShard"))
    yield from (getattr(module, name) for module, name in later if hasattr(module, name))


def _mesh_types() -> dict[str, Any]:
    from torch.distributed import device_mesh

    homes = ("torch.distributed.device_mesh", "torch.distributed._tensor.device_mesh")
    found = {f"{home}.DeviceMesh": device_mesh.DeviceMesh for home in homes}
    for name in ("_MeshLayout", "_FlatLayout"):  # since torch 2.9 or so
        if hasattr(device_mesh, name):
            found[f"torch.distributed._mesh_layout.{name}"] = getattr(device_mesh, name)
    return found
