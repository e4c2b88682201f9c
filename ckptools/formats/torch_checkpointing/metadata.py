"""Reader of `metadata.pkl`: the ranks' parts of every tensor, and the file of each rank's item.

A pickle of plain values, written by rank 0 when an item has a resharder:

    {"version": "2.0", "world_size": 4, "metadata": {ITEM: {
        "nested_path_to_metadata": {'["state","w","exp_avg"]': [
            {"ranks": (0, 1), "sharding_metadata": {"type": …, "data": …}}]},
        "rank_to_layout_info": {0: None | {"file_path": "model_0.safetensors", "serialization_format": {"type": …}}}}}}

In version 1.0 `metadata` has a key `'["ITEM","w"]'` for every tensor, and `rank_to_layout_info_mappings` has the files.
Two types are known. `DTensorShardingMetadata` has global_shape, dtype, mesh_spec and placements (`Shard`,
`StridedShard`, `Replicate`); a plain tensor is written as one that all ranks replicate. `default_tensor_v1` lists the
boxes of each rank by itself. Source: torch_checkpointing/distributed_metadata.py, dtensor_metadata.py,
default_metadata.py and checkpoint_layout.py of 0.1.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.json_file import parse_json
from ckptools.files.location import is_plain_path
from ckptools.files.opening import File
from ckptools.files.zip_archive import MAX_PICKLE
from ckptools.model.regions import Box, Ints, grid_boxes
from ckptools.model.tensor import TensorKind
from ckptools.model.tree import KeyPath
from ckptools.model.values import describe_for_error
from ckptools.pickles.classes.device_mesh import MAX_MESH
from ckptools.pickles.classes.dtensor import Placement, local_runs
from ckptools.pickles.machine import Machine, load_checked

METADATA = "metadata.pkl"
SIGN = b"sharding_metadata"
"""Bytes near the beginning of every `metadata.pkl` of this format."""

SIGN_WITHIN = 1 << 14
KINDS = {
    "TorchSerialization": "pt",
    "SafetensorsSerialization": "safetensors",
    "JsonSerialization": "json",
    "RawSerialization": "raw",
}
MAX_DIMS = 64
MAX_SIZE = 1 << 62


class LocalBox(NamedTuple):
    """A box that a rank holds: its place in the whole tensor, and in the rank's own."""

    box: Box
    local: Box


class Sharding(NamedTuple):
    """How some ranks hold a tensor of a whole `shape`: by placements on a mesh, or piece by piece.

    Attributes:
        ranks: those with a part of it, or at least an empty piece.
        mesh: sizes of the device mesh; empty where the pieces are listed.
        mesh_ranks: the rank at each coordinate, in row-major order.
        listed: the pieces of each of `ranks`, where they are listed.
    """

    shape: Ints
    dtype: str
    ranks: Ints
    mesh: Ints = ()
    mesh_ranks: Ints = ()
    placements: tuple[Placement, ...] = ()
    listed: tuple[LocalBox, ...] | None = None

    def pieces(self, rank: int) -> tuple[LocalBox, ...]:
        """The boxes on a rank."""
        if self.listed is not None:
            return self.listed
        return tuple(LocalBox(*boxes) for boxes in grid_boxes(self._runs(rank)))

    def local_shape(self, rank: int) -> Ints | None:
        """The shape of a rank's own tensor; None where the list of its pieces does not show it."""
        return tuple(sum(n for _, n in runs) for runs in self._runs(rank)) if self.listed is None else None

    def described(self) -> tuple[TensorKind, tuple[str, ...] | None, Ints | None]:
        """The kind, placements and mesh of its tensor."""
        if self.listed is not None:
            return "chunks", None, None
        if all(placement.kind == "Replicate" for placement in self.placements):
            return "plain", None, None
        return "dtensor", tuple(map(str, self.placements)), self.mesh

    def _runs(self, rank: int) -> list[list[tuple[int, int]]]:
        coordinate = Box.whole(self.mesh).index_of(self.mesh_ranks.index(rank))
        return local_runs(self.shape, self.mesh, coordinate, self.placements)


@dataclass
class ItemMetadata:
    """The metadata of one item: its tensors by key path, and by rank the file and its kind, where it is unusual."""

    tensors: dict[KeyPath, list[Sharding]] = field(default_factory=dict)
    files: dict[int, tuple[str, str]] = field(default_factory=dict)

    def ranks(self) -> set[int]:
        """Ranks that hold anything of it."""
        return {rank for shardings in self.tensors.values() for one in shardings for rank in one.ranks}

    def of_rank(self, rank: int) -> Iterator[tuple[KeyPath, Sharding]]:
        """The tensors on a rank, by key path."""
        for path, shardings in self.tensors.items():
            yield from ((path, one) for one in shardings if rank in one.ranks)


class Metadata(NamedTuple):
    """The content of `metadata.pkl`: its items by name, and dotted names that the pickle mentions."""

    items: dict[str, ItemMetadata]
    world_size: int
    nbytes: int
    names: tuple[str, ...]


def is_metadata(path: Path) -> bool:
    """Whether a file is a `metadata.pkl` of this format, by its name and its beginning."""
    if path.name != METADATA or not path.is_file():
        return False
    with File(path) as file:
        return SIGN in file.read(0, min(file.size, SIGN_WITHIN))


def read_metadata(path: Path) -> Metadata:
    """Read `metadata.pkl`; nothing that it names is called.

    Raises:
        ReadError: it is damaged, or not what the format writes.
    """
    with File(path) as file:
        if file.size > MAX_PICKLE:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_PICKLE} are read")
        machine = Machine(file.read(0, file.size))
    tree = load_checked(machine, path, "pickle")
    try:
        items, world_size = _items(tree), tree["world_size"]
        if type(world_size) is not int or not 0 < world_size <= MAX_MESH:
            raise ValueError(f"world_size {describe_for_error(world_size)}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ReadError(path, f"is not what torch_checkpointing writes: {why}") from error
    return Metadata(items, world_size, len(machine.data), tuple(g.dotted for g in machine.globals.values()))


def _items(tree: Any) -> dict[str, ItemMetadata]:
    stored, version = tree["metadata"], tree.get("version", "1.0")
    if version not in ("1.0", "2.0"):
        raise ValueError(f"version {describe_for_error(version)}; 1.0 and 2.0 are read")
    items: dict[str, ItemMetadata] = {}
    if version == "1.0":
        for text, groups in stored.items():
            name, *path = _path(text)
            items.setdefault(str(name), ItemMetadata()).tensors[tuple(path)] = list(map(_sharding, groups))
        for rank, layouts in tree["rank_to_layout_info_mappings"].items():
            for name, layout in layouts.items():
                _add_file(items.get(name), rank, layout)
        return items
    for name, item in stored.items():
        items[name] = ItemMetadata({_path(k): [*map(_sharding, v)] for k, v in item["nested_path_to_metadata"].items()})
        for rank, layout in item["rank_to_layout_info"].items():
            _add_file(items[name], rank, layout)
    return items


def _path(text: Any) -> KeyPath:
    found = parse_json(text)
    if not isinstance(found, list) or not all(isinstance(key, (str, int)) for key in found):
        raise ValueError(f"the path {describe_for_error(text)}")
    return tuple(found)


def _add_file(item: ItemMetadata | None, rank: Any, layout: Any) -> None:
    if item is None or layout is None:
        return
    name, kind = layout["file_path"], KINDS.get(layout["serialization_format"]["type"], "")
    if not isinstance(name, str) or not is_plain_path(name):
        raise ValueError(f"names the file {describe_for_error(name)}; only files below its own folder are read")
    item.files[int(rank)] = name, kind


def _sharding(group: Any) -> Sharding:
    ranks, packed = _ints(group["ranks"]), group["sharding_metadata"]
    kind, data = packed["type"], packed["data"]
    shape, dtype = _ints(data["global_shape"]), str(data["dtype"]).removeprefix("torch.")
    if len(shape) > MAX_DIMS or dtype not in ITEMSIZE:
        raise ValueError(f"a tensor {describe_for_error(dtype)} {describe_for_error(shape)}")
    if kind == "default_tensor_v1":
        return Sharding(shape, dtype, ranks, listed=_listed(shape, data))
    if kind != "DTensorShardingMetadata":
        raise ValueError(f"the sharding {describe_for_error(kind)}, which is unknown")
    mesh = data["mesh_spec"]
    sizes, mesh_ranks = _ints(mesh["mesh_shape"]), _ints(mesh["mesh_data"])
    placements = tuple(_placement(p, len(shape)) for p in data["placements"])
    if prod(sizes) != len(mesh_ranks) or len(placements) != len(sizes) or len(mesh_ranks) > MAX_MESH:
        raise ValueError(f"{len(placements)} placements on a mesh {describe_for_error(sizes)}")
    if not set(ranks) <= set(mesh_ranks):
        raise ValueError("ranks that are not in their mesh")
    return Sharding(shape, dtype, ranks, sizes, mesh_ranks, placements)


def _placement(value: Mapping[str, Any], ndim: int) -> Placement:
    kind, dim, split = value["type"], value.get("dim", 0), value.get("split_factor", 1)
    if kind == "Replicate":
        return Placement("Replicate")
    if kind not in ("Shard", "StridedShard") or type(dim) is not int or not 0 <= dim < ndim:
        raise ValueError(f"the placement {describe_for_error(kind)} along {describe_for_error(dim)}")
    if type(split) is not int or not 1 <= split <= MAX_MESH:
        raise ValueError(f"a strided shard with split factor {describe_for_error(split)}")
    return Placement("Shard", dim) if kind == "Shard" else Placement("_StridedShard", dim, split)


def _listed(shape: Ints, data: Mapping[str, Any]) -> tuple[LocalBox, ...]:
    names = ("global_offsets", "local_offsets", "local_sizes")
    columns = [[_ints(row) for row in data[name]] for name in names]
    pieces = tuple(LocalBox(Box(g, n), Box(o, n)) for g, o, n in zip(*columns, strict=True))
    if not all(piece.box.inside(shape) and len(piece.local.offsets) == len(shape) for piece in pieces):
        raise ValueError(f"a piece outside of {describe_for_error(shape)}")
    return pieces


def _ints(value: Any) -> Ints:
    listed = tuple(value) if isinstance(value, (list, tuple)) else (None,)
    if not all(type(n) is int and 0 <= n < MAX_SIZE for n in listed):
        raise ValueError(f"{describe_for_error(value)}, expected sizes or ranks")
    return listed
