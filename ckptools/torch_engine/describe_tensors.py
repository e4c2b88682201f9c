"""Tensors that torch has loaded, described in the model.

A loaded tensor does not know where in the file it came from. Its `Source` has the path, dtype, shape and strides, a
record named after the storage (so that tied tensors are still seen to be tied), and offsets from `NOWHERE`, which is
so far below zero that reading there fails, whatever is added to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from ckptools.model.regions import Box, Ints, grid_boxes
from ckptools.model.tensor import Shard, Source, Tensor, in_rank_order
from ckptools.pickles.classes import sharded_tensor, tensor_classes
from ckptools.pickles.classes.device_mesh import Mesh, note_mesh, worlds
from ckptools.pickles.classes.dtensor import Placement, local_runs
from ckptools.pickles.classes.tensors import WHY_NOT

NOWHERE = -(1 << 62)
"""Offset of a storage whose place in the file is not known."""


class TensorDescriber:
    """Describes the tensors of one loaded file.

    Attributes:
        path: the file.
        claims: `(rank, world size)` as the sharded ones say, so far.
        meshes: device meshes that may be slices of larger ones.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.claims: set[tuple[int | None, int]] = set()
        self.meshes: set[Mesh] = set()
        self._storages: dict[int, str] = {}

    def describe(self, tensor: Any) -> Tensor:
        """Describe a tensor of any kind."""
        import torch

        described = self._tensor_by_kind(tensor)
        parameter = isinstance(tensor, torch.nn.Parameter)
        return replace(described, requires_grad=tensor.requires_grad, parameter=parameter)

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
        """Describe a tensor that may be of a class of its own, as the inert reader does it by its pickled state."""
        import torch

        cls, state = type(tensor), {k: self._value(v) for k, v in vars(tensor).items()}
        if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return tensor_classes.of_class(_name(cls), tuple(tensor.shape), dtype_name(tensor.dtype), state)
        plain = self._plain(tensor)
        if cls in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return sharded_tensor.placed(plain, state, self.meshes)
        found = tensor_classes.of_class(_name(cls), plain.shape, plain.dtype, {**state, "data": plain})
        return plain if plain.kind == "meta" else found

    def _value(self, value: Any) -> Any:
        """An attribute of a tensor, with the tensors in it described."""
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor_by_kind(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._value, value))
        return {k: self._value(v) for k, v in value.items()} if type(value) is dict else value

    def _plain(self, tensor: Any) -> Tensor:
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
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
        return Source(self.path, NOWHERE + start, dtype_name(tensor.dtype), shape, strides, record, span)

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
        shape, dtype = tuple(tensor.size()), dtype_name(tensor.dtype)
        return Tensor(shape, dtype, tuple(shards), "sharded_tensor", world_size=world)

    def _dtensor(self, tensor: Any) -> Tensor:
        mesh = mesh_of(tensor.device_mesh)
        note_mesh(mesh, self.claims, self.meshes)
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        placements = tuple(map(placement_of, tensor.placements))
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
        """This rank's pieces first, then those of the other coordinates in order."""
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


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def mesh_of(device_mesh: Any) -> Mesh:
    """Describe a DeviceMesh that `offline()` has let in."""
    from ckptools.torch_engine.patches import mesh_ranks

    found = mesh_ranks(vars(device_mesh))
    ranks = None if found is None else tuple(found.flatten().tolist())
    coordinate, root = device_mesh.get_coordinate(), device_mesh._ckptools_names_root
    return Mesh(
        tuple(device_mesh.shape),
        None if coordinate is None else tuple(coordinate),
        device_mesh._ckptools_rank,
        ranks,
        *worlds(device_mesh._ckptools_world_size, ranks, root),
        root,
    )


def placement_of(placement: Any) -> Placement:
    """Describe a placement of the installed torch."""
    kind = type(placement).__name__
    if kind == "Partial":
        return Placement(f"Partial({placement.reduce_op})")
    return Placement(kind, getattr(placement, "dim", 0), getattr(placement, "split_factor", 1))


def dtype_name(dtype: Any) -> str:
    """Return torch's name of a dtype, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _box(metadata: Any) -> Box:
    return Box(tuple(metadata.shard_offsets), tuple(metadata.shard_sizes))
