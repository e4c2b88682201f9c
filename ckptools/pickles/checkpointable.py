"""CheckpointableTensor: a plain tensor whose attributes say which pieces of a global tensor it holds, torch 2.14 on.

`global_shape` is the shape of the whole; `global_offsets`, `local_offsets` and `local_sizes` have an entry for each
piece: where it begins in the whole, where in this tensor, and its sizes. What of the tensor is in no piece is padding.
torch pickles the attributes with the tensor. The file names neither rank nor world size, and only its own pieces.

Source: torch/distributed/checkpoint/protocol.py; checked on files of torch 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Tensor
from ckptools.pickles.device_mesh import OTHERS, Mesh
from ckptools.pickles.limits import MAX_NDIM

ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")

MAX_PIECES = 1 << 16
"""Pieces of one tensor."""


def placed(tensor: Tensor, attributes: Mapping[str, Any], meshes: set[Mesh]) -> Tensor:
    """The global tensor that a tensor with these attributes holds pieces of; the tensor itself without them.

    Args:
        tensor: as it is stored.
        attributes: of it.
        meshes: what the file says of other ranks; here takes note that there are some.
    """
    if not all(name in attributes for name in ATTRIBUTES) or tensor.note or len(tensor.shards) != 1:
        return tensor
    shape, *columns = (attributes[name] for name in ATTRIBUTES)
    pieces = _pieces(shape, columns)
    whole = Box.whole(tensor.shape)
    wrong = next((p for p in pieces if not (p[0].inside(shape) and p[1].inside(whole.sizes))), None) if pieces else None
    if pieces is None or wrong is not None:
        where = f": the piece {wrong[1]} of it would be {wrong[0]} of {list(shape)}" if wrong is not None else ""
        note = f"its global_shape, global_offsets, local_offsets and local_sizes contradict each other{where}"
        return replace(tensor, kind="unreadable", note=note)
    shards = tuple(tensor.shards[0].part(local, place) for place, local in pieces if place.numel or not place.sizes)
    if sum(shard.box.numel for shard in shards) < prod(shape):
        meshes.add(OTHERS)
    return replace(tensor, shape=tuple(shape), shards=shards, kind="checkpointable")


def _pieces(shape: Any, columns: list[Any]) -> list[tuple[Box, Box]] | None:
    """Each piece's place in the global tensor and in the local one; None where the attributes are no such lists."""
    lists = all(isinstance(c, (list, tuple)) and len(c) <= MAX_PIECES for c in columns)
    if not _is_ints(shape) or not lists or len({len(c) for c in columns}) != 1:
        return None
    if not all(_is_ints(entry) and len(entry) == len(shape) for column in columns for entry in column):
        return None
    return [(Box(_ints(g), _ints(n)), Box(_ints(at), _ints(n))) for g, at, n in zip(*columns, strict=True)]


def _is_ints(value: Any) -> bool:
    ok = isinstance(value, (list, tuple)) and len(value) <= MAX_NDIM
    return ok and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _ints(value: Any) -> Ints:
    return tuple(value)
