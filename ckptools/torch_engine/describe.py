"""The second way to read a file: torch loads it, and this module describes the objects as the inert reader does.

`ckptools.pickles.reader.read` works from the bytes of a pickle, without torch; this module works from the objects that
torch built from the same file. Both must agree, so that tests can compare each with the other.

A loaded tensor does not know where in the file its bytes lie. Its `Source` has the path, dtype, shape and strides, a
zip entry named after the storage (so that tied tensors are still recognised), and offsets from `NOWHERE`, which is so
far below zero that reading there fails whatever is added to it.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date, datetime, time, timedelta, timezone
from itertools import product
from math import prod
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from ckptools.errors import ReadError
from ckptools.model.regions import Box, Ints, grid_boxes
from ckptools.model.shards import Shard, Source, in_rank_order
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Opaque, Size, TorchName
from ckptools.pickles import reader
from ckptools.pickles.classes import sharded
from ckptools.pickles.classes.sharded import Placement, in_turn, local_runs
from ckptools.pickles.classes.tensors import WHY_NOT, of_class
from ckptools.pickles.machine import without_cycles
from ckptools.pickles.objects import Mesh, claims_of, structured, subarray_of, worlds
from ckptools.pickles.reader import Saved
from ckptools.torch_engine.offline import load_named, mesh_ranks
from ckptools.training_state.modules import with_modules

PLAIN_TYPES = (
    *(str, int, float, bool, bytes, complex, bytearray, type(None), range, slice),
    *(timedelta, datetime, date, time, timezone),
)
CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, frozenset)

NOWHERE = -(1 << 62)
"""Offset of a storage with unknown position in the file."""


def read(path: Path, trust: bool = False) -> Saved:
    """Read a torch.save file through torch; with `trust`, run whatever code it names, as `load_shard` does.

    Raises:
        ReadError, ForeignClassError: as `load_shard`; or the file is nested too deeply.
    """
    inert = reader.read(path)
    described = _Describer(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice to users of ShardedTensor
            tree = with_modules(without_cycles(described.value(load_named(path, inert.names, trust=trust))))
    except RecursionError as error:
        raise ReadError(path, "its values are nested too deep to be described") from error
    claims, at_least = claims_of(described.claims, described.meshes)
    read = inert._replace(bytes_read=inert.nbytes, form="", modules=False)
    return read._replace(tree=tree, claims=claims, at_least=at_least)


class _Describer:
    """Describes the objects of one loaded file.

    Attributes:
        claims: `(rank, world size)` stated by the sharded tensors so far.
        meshes: device meshes, which may be slices of larger ones.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.claims: set[tuple[int | None, int]] = set()
        self.meshes: set[Mesh] = set()
        self._storages: dict[int, str] = {}
        self._done: dict[int, tuple[Any, Any]] = {}

    def value(self, node: Any) -> Any:
        """Describe one object and everything in it; an object that occurs twice is described once."""
        if type(node) in PLAIN_TYPES:
            return node
        if id(node) not in self._done:
            describe = self._containers if type(node) in CONTAINERS else self._leaf
            # Keep the object, so that its id is not reused.
            self._done[id(node)] = (node, describe(node))
        return self._done[id(node)][1]

    def _containers(self, node: Any) -> Any:
        if isinstance(node, (tuple, set, frozenset)):
            return type(node)(map(self.value, node))
        if isinstance(node, list):
            made: Any = []
            self._done[id(node)] = (node, made)
            made.extend(map(self.value, node))
            return made
        made = defaultdict(node.default_factory) if isinstance(node, defaultdict) else type(node)()
        self._done[id(node)] = (node, made)
        for key, value in node.items():
            made[self.value(key)] = self.value(value)
        if isinstance(getattr(node, "_metadata", None), dict):
            made._metadata = self.value(node._metadata)
        return made

    def _leaf(self, node: Any) -> Any:
        import torch

        if isinstance(node, torch.Tensor):
            return self._tensor(node)
        if isinstance(node, (torch.storage.TypedStorage, torch.UntypedStorage)):
            dtype = getattr(node, "dtype", torch.uint8)
            return replace(self._plain(torch.empty(0, dtype=dtype).set_(node)), kind="storage")
        for kinds, describe in _small_types():
            if isinstance(node, kinds):
                return describe(node)
        return self._opaque(node)

    def _opaque(self, node: Any) -> Opaque | Global:
        """Describe an object of any other class by its `__reduce_ex__`, as a pickle would."""
        reduced: Any = node.__reduce_ex__(2)
        if isinstance(reduced, str):
            return Global(node.__module__, reduced)
        function, args, state, items, pairs = (*reduced, None, None, None)[:5]
        if function.__name__ == "__newobj__":
            function, args = args[0], args[1:]
        opaque = Opaque(f"{function.__module__}.{function.__qualname__}", self.value(tuple(args)))
        opaque.state = self.value(state)
        opaque.items = self.value([*(items or ())])
        opaque.pairs = self.value([*(pairs or ())])
        return opaque

    # -- tensors ---------------------------------------------------------------------------------------------

    def _tensor(self, tensor: Any) -> Tensor:
        import torch

        parameter = isinstance(tensor, torch.nn.Parameter)
        return replace(self._tensor_by_kind(tensor), requires_grad=tensor.requires_grad, parameter=parameter)

    def _tensor_by_kind(self, tensor: Any) -> Tensor:
        from torch import distributed

        if distributed.is_available():
            from torch.distributed._shard.sharded_tensor.api import ShardedTensor
            from torch.distributed.tensor import DTensor

            if isinstance(tensor, ShardedTensor):
                return self._sharded_tensor(tensor)
            if isinstance(tensor, DTensor):
                return self._dtensor(tensor)
        return self._by_class(tensor)

    def _by_class(self, tensor: Any) -> Tensor:
        """Describe a tensor that may be of a subclass, by its pickled state, as the inert reader does."""
        import torch

        cls, state = type(tensor), {k: self._attribute(v) for k, v in vars(tensor).items()}
        if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return of_class(_name(cls), tuple(tensor.shape), _dtype_name(tensor.dtype), state)
        plain = self._plain(tensor)
        if cls in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return sharded.placed_sharded_tensor(plain, state, self.meshes)
        found = of_class(_name(cls), plain.shape, plain.dtype, {**state, "data": plain})
        return plain if plain.kind == "meta" else found

    def _attribute(self, value: Any) -> Any:
        """Describe an attribute of a tensor, with the tensors in it."""
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor_by_kind(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._attribute, value))
        return {k: self._attribute(v) for k, v in value.items()} if type(value) is dict else value

    def _plain(self, tensor: Any) -> Tensor:
        shape, dtype = tuple(tensor.shape), _dtype_name(tensor.dtype)
        if tensor.is_nested:
            note = "a nested tensor; ckptools shows it and does not write it"
            return Tensor(shape, dtype, (), "unreadable", note=note)
        if tensor.is_quantized:
            return Tensor(shape, dtype, (), "quantized", note=WHY_NOT["quantized"])
        if str(tensor.layout) != "torch.strided":
            return Tensor(shape, dtype, (), "sparse", note=WHY_NOT["sparse"])
        if tensor.is_meta:
            return Tensor(shape, dtype, (), "meta", note="a meta tensor: a shape without values")
        bits = ", ".join(name for name in ("conj", "neg") if getattr(tensor, f"is_{name}")())
        shards = (Shard(Box.whole(shape), None, self._source(tensor)),)
        if bits:
            note = f"a lazy view ({bits}) whose values are not what is stored"
            return Tensor(shape, dtype, shards, "unreadable", note=note)
        return Tensor(shape, dtype, shards)

    def _source(self, tensor: Any) -> Source:
        storage = tensor.untyped_storage()
        record = self._storages.setdefault(storage.data_ptr(), f"storage {len(self._storages)}")
        start = tensor.storage_offset() * tensor.itemsize if tensor.numel() else 0
        span = (NOWHERE, storage.nbytes())
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return Source(self.path, NOWHERE + start, _dtype_name(tensor.dtype), shape, strides, record, span)

    def _sharded_tensor(self, tensor: Any) -> Tensor:
        saved_by = tensor._ckptools_group
        rank, world = saved_by.global_rank, saved_by.global_world_size
        self.claims.add((rank, world))
        whole_world = saved_by.local_world_size == world
        own = {_box(s.metadata): self._source(s.tensor) for s in tensor.local_shards()}
        shards = []
        for listed in tensor.metadata().shards_metadata:
            box = _box(listed)
            other = listed.placement.rank() if whole_world else None
            shards.append(Shard(box, rank if box in own else other, own.get(box)))
        shape, dtype = tuple(tensor.size()), _dtype_name(tensor.dtype)
        return Tensor(shape, dtype, tuple(shards), "sharded_tensor", world_size=world)

    def _dtensor(self, tensor: Any) -> Tensor:
        mesh = _mesh_of(tensor.device_mesh)
        self.meshes.add(mesh)
        shape, dtype = tuple(tensor.shape), _dtype_name(tensor.dtype)
        order = [(one.tensor_dim, one.mesh_dims) for one in getattr(tensor._spec, "shard_order", None) or ()]
        placements = in_turn(tuple(map(_placement_of, tensor.placements)), order)
        words = tuple(map(str, placements))
        strange = [p.kind for p in placements if p.kind not in ("Shard", "_StridedShard", "Replicate")]
        if strange:
            note = f"placement {strange[0]}: the ranks hold terms that must be reduced; ckptools does not guess how"
            return Tensor(shape, dtype, (), "unreadable", words, mesh.sizes, world_size=mesh.world_size, note=note)
        local = self._by_class(tensor._local_tensor)
        shards = in_rank_order(self._dtensor_shards(shape, mesh, placements, local))
        return Tensor(shape, dtype, shards, "dtensor", words, mesh.sizes, world_size=mesh.world_size, note=local.note)

    def _dtensor_shards(
        self, shape: Ints, mesh: Mesh, placements: tuple[Placement, ...], local: Tensor
    ) -> Iterator[Shard]:
        """Yield this rank's shards first, then the shards at the other mesh coordinates in order."""
        coordinates = list(product(*map(range, mesh.sizes)))
        rank_of = dict(zip(coordinates, mesh.ranks or [None] * len(coordinates), strict=True))
        for coordinate in sorted(coordinates, key=lambda c: c != mesh.coordinate):
            runs = local_runs(shape, mesh.sizes, coordinate, placements)
            if not prod(sum(n for _, n in dimension) for dimension in runs):
                continue
            own = local.shards[0] if coordinate == mesh.coordinate and local.shards else None
            for place, packed in grid_boxes(runs):
                there = Shard(place, rank_of[coordinate], None)
                yield own.part(packed, place)._replace(rank=there.rank) if own else there


def _small_types() -> list[tuple[Any, Callable[[Any], Any]]]:
    """List types of torch and numpy that may be values of a tree, and functions that describe them."""
    import numpy as np
    import torch

    named = (torch.dtype, torch.qscheme)
    return [
        (torch.Size, Size),
        (named, lambda v: Global("torch", _dtype_name(v))),
        (torch.layout, lambda v: TorchName(_dtype_name(v))),
        (torch.device, lambda v: Device(v.type, v.index)),
        (torch.torch_version.TorchVersion, str),
        (np.ndarray, _numpy_array),
        (np.dtype, lambda v: NumpyDtype(_numpy_dtype(v))),
        (np.generic, lambda v: NumpyScalar(_numpy_dtype(v.dtype), v.tobytes())),
        ((type, FunctionType, BuiltinFunctionType), lambda v: Global(v.__module__, v.__qualname__)),
    ]


def _numpy_dtype(dtype: Any) -> str:
    """Spell a dtype as the inert reader does."""
    import numpy as np

    if dtype.names is not None:
        found = [(name, *dtype.fields[name], None)[:4] for name in dtype.names]
        fields = [(name, _numpy_dtype(of), offset, title) for name, of, offset, title in found]
        return structured(fields, dtype.itemsize, dtype.isalignedstruct, issubclass(dtype.type, np.record))
    return subarray_of(_numpy_dtype(dtype.base), dtype.shape) if dtype.subdtype else str(dtype.str)


def _numpy_array(array: Any) -> NumpyArray:
    if array.dtype.hasobject:
        return NumpyArray("|O", array.shape, False, b"")
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return NumpyArray(_numpy_dtype(array.dtype), array.shape, bool(fortran), array.tobytes("A"))


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _mesh_of(device_mesh: Any) -> Mesh:
    found = mesh_ranks(vars(device_mesh))
    ranks = None if found is None else tuple(found.flatten().tolist())
    coordinate = device_mesh.get_coordinate()
    return Mesh(
        tuple(device_mesh.shape),
        None if coordinate is None else tuple(coordinate),
        device_mesh._ckptools_rank,
        ranks,
        *worlds(device_mesh._ckptools_world_size, device_mesh._ckptools_root_ranks or ranks),
    )


def _placement_of(placement: Any) -> Placement:
    kind = type(placement).__name__
    if kind == "Partial":
        return Placement(f"Partial({placement.reduce_op})")
    return Placement(kind, getattr(placement, "dim", 0), getattr(placement, "split_factor", 1))


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _box(metadata: Any) -> Box:
    return Box(tuple(metadata.shard_offsets), tuple(metadata.shard_sizes))
