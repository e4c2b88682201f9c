"""The allow-list of the torch loader: the classes that `load_shard` builds from an untrusted file.

It extends torch's own list (tensors, dtypes, OrderedDict …) by harmless classes of distributed checkpoints:
ShardedTensor and DTensor with their parts, small Python types, numpy arrays of plain numbers. Each is listed by the
name that files use, in all spellings that torch has had. Functions are replaced by restricted ones, which do only what
a checkpoint needs, and refuse anything else by name.

The inert reader lists every name in a file before torch loads it; only these names are allowed, and only during the
load.

numpy's own way to rebuild arrays is not safe: `dtype.__setstate__` accepts any state, so that a forged dtype turns raw
bytes of the file into Python objects, and reading an element of the array crashes the process or worse. So two
stand-ins replace numpy's functions during the load; `finished` then replaces them by real arrays and dtypes.

Source: torch/_weights_only_unpickler.py; numpy/_core/src/multiarray (`array_setstate`, `arraydescr_setstate`), tried
with numpy 2.4.
"""

from __future__ import annotations

import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from ckptools.errors import ForeignClassError

DTENSOR_HOMES = (
    "torch.distributed.tensor",
    "torch.distributed.tensor._api",
    "torch.distributed.tensor._dtensor_spec",
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor",
    "torch.distributed._tensor.api",
    "torch.distributed._tensor.placement_types",
)
"""Modules in which torch 2.0 to 2.13 pickled DTensor and its parts."""


@contextmanager
def allowing(path: Path, names: Iterable[str]) -> Iterator[None]:
    """Allow torch to build what a file names within the block, or raise ForeignClassError; earlier allowances stay."""
    import torch
    from torch import _weights_only_unpickler as torchs

    named = dict.fromkeys(map(spelling, names))
    ours = {name: table()[name] for name in named if name in table()}
    known = torchs._get_allowed_globals().keys() | torchs._get_user_allowed_globals().keys() | ours.keys()
    foreign = [name for name in named if name not in known]
    if foreign:
        raise ForeignClassError(path, foreign)
    entries = {(thing, name) for name, thing in ours.items()} - set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals(list(entries)):
        yield


def spelling(dotted: str) -> str:
    """Convert a name that protocol 2 writes as in Python 2 (`__builtin__.set`) to its present form."""
    module, _, name = dotted.rpartition(".")
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    return f"{IMPORT_MAPPING.get(module, module)}.{name}"


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    """Map names in files to the objects that may be built. Imports the distributed parts of torch."""
    plain = (timedelta, datetime, date, frozenset, dict, list, int, float, Namespace)
    cores = ("numpy.core.multiarray", "numpy._core.multiarray")  # numpy 2 renamed it
    return {
        **_by_name(plain),
        "builtins.getattr": only_process_group_state,
        "builtins.bytes": only_empty_bytes,
        "collections.defaultdict": plain_dict,
        "numpy.ndarray": array_class(),
        "numpy.dtype": Dtype,
        **{f"{core}._reconstruct": reconstruct for core in cores},
        **{f"{core}.scalar": scalar for core in cores},
        **_torch_types(),
    }


def _torch_types() -> dict[str, Any]:
    from torch import distributed
    from torch.torch_version import TorchVersion

    found: dict[str, Any] = {"torch.torch_version.TorchVersion": TorchVersion}
    if distributed.is_available():
        found |= _by_name(_sharded_tensor_types())
        found |= {f"{home}.{c.__name__}": c for c in _dtensor_types() for home in DTENSOR_HOMES}
        found |= _mesh_types()
    return found


def _by_name(classes: Iterable[type]) -> dict[str, type]:
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}


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
    for name in ("_MeshLayout", "_FlatLayout"):  # from about torch 2.9 on
        if hasattr(device_mesh, name):
            found[f"torch.distributed._mesh_layout.{name}"] = getattr(device_mesh, name)
    return found


# -- restricted replacements of Python's functions ---------------------------------------------------------------------


class Refused(Exception):  # noqa: N818 - load_shard turns it into ForeignClassError
    """A file calls an allowed function with forbidden arguments; the text describes the call."""


def only_process_group_state(owner: Any, name: Any) -> type:
    """Replace `getattr`: return the one nested class that protocol 2 can name only by `getattr`."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    if owner is ShardedTensor and name == "ProcessGroupState":
        return ShardedTensor.ProcessGroupState
    raise Refused(f"builtins.getattr(…, {name!r:.60})")


def only_empty_bytes(*args: Any) -> bytes:
    """Replace `bytes`: return `b""`, as protocol 2 spells it; a number as argument would allocate that much memory."""
    if args:
        raise Refused("builtins.bytes with arguments")
    return b""


def plain_dict(*_: Any) -> dict[Any, Any]:
    """Replace `defaultdict`, which torch's loader cannot fill, by an empty dict."""
    return {}


# -- numpy: plain numbers and text only, sizes checked -----------------------------------------------------------------


PLAIN = re.compile(r"[biufc]\d{1,2}|\?|[SU]\d{1,9}")
"""Codes of dtypes with numbers, booleans or text as values."""


class Dtype:
    """Stands in for `numpy.dtype`: a code without byte order, such as `f8`, and the order: `<`, `>`, or `|`."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any = "", align: Any = False, copy: Any = True) -> None:
        text = code.decode("latin1") if isinstance(code, bytes) else str(code)
        self.code = text.lstrip("<>|=")
        self.order = text[0] if text[:1] in ("<", ">") else "|"
        if not PLAIN.fullmatch(self.code):
            raise Refused(f"numpy.dtype({self.code!r:.40})")

    def __setstate__(self, state: Any) -> None:
        # (version, byte order, subarray, field names, fields, itemsize, alignment, flags)
        order = state[1].decode("latin1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
            raise Refused(f"numpy.dtype({self.code!r:.40}) with fields")
        self.order = order

    def real(self) -> Any:
        """Make the numpy dtype."""
        import numpy as np

        return np.dtype(self.order.replace("|", "") + self.code)


@lru_cache(maxsize=1)
def array_class() -> Any:
    """Make the class that stands in for `numpy.ndarray`: an array that checks its pickled state."""
    import numpy as np

    class CheckedArray(np.ndarray):
        """An array that is empty until its state is set."""

        def __new__(cls, *_: Any) -> Any:
            return super().__new__(cls, (0,), "u1")

        def __setstate__(self, state: Any) -> None:
            _, shape, dtype, fortran, data = state
            real = dtype.real() if isinstance(dtype, Dtype) else None
            data = data.encode("latin1") if isinstance(data, str) else data
            if real is None or not isinstance(data, bytes) or not all(type(n) is int and n >= 0 for n in shape):
                raise Refused("numpy.ndarray of Python objects")
            if prod(shape) * real.itemsize != len(data):
                raise Refused(f"numpy.ndarray of {prod(shape)} elements in {len(data)} bytes")
            checked: Any = (1, tuple(shape), real, bool(fortran), data)
            super().__setstate__(checked)

    return CheckedArray


def reconstruct(*_: Any) -> Any:
    """Stand in for `numpy.core.multiarray._reconstruct`: return an empty array, whatever the arguments."""
    return array_class()()


def scalar(dtype: Any, data: Any = b"") -> Any:
    """Stand in for `numpy.core.multiarray.scalar`."""
    import numpy as np

    real = dtype.real() if isinstance(dtype, Dtype) else None
    data = data.encode("latin1") if isinstance(data, str) else data
    if real is None or not isinstance(data, bytes) or len(data) != real.itemsize or not data:
        raise Refused("numpy scalar of a Python object")
    return np.frombuffer(data, real)[0]


def finished(tree: Any) -> Any:
    """Replace the stand-ins in a tree of dicts, lists and tuples by real arrays and dtypes, in place."""
    return _finished(tree, {})


def _finished(node: Any, done: dict[int, Any]) -> Any:
    if isinstance(node, Dtype):
        return node.real()
    if isinstance(node, array_class()):
        import numpy as np

        return np.array(node, copy=True, subok=False)
    if type(node) not in (dict, OrderedDict, list, tuple):
        return node
    if id(node) not in done:
        done[id(node)] = node  # do not enter a container that contains itself again
        done[id(node)] = _refilled(node, done)
    return done[id(node)]


def _refilled(node: Any, done: dict[int, Any]) -> Any:
    if isinstance(node, dict):
        node.update({key: _finished(value, done) for key, value in node.items()})
        return node
    items = [_finished(item, done) for item in node]
    if isinstance(node, list):
        node[:] = items
        return node
    return tuple(items) if any(a is not b for a, b in zip(items, node, strict=True)) else node
