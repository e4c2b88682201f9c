"""Tensors of a Megatron torch_dist folder that are stored in another shape than their own.

The layers of a block may be one tensor, whose first dimension counts them. A tensor that ranks hold as flat runs is
stored as [pieces along each dimension ..., elements of a piece], with its own shape in the metadata
(`nd_reformulated_orig_global_shape`). Source: see `megatron_dist`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from ckptools.formats.flat_parameters.flat_runs import FlatRun, shards_in
from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Shard, Source, Tensor

UNPLACED = "flat runs whose pieces do not follow from the metadata; --only model writes the model"


def in_true_shape(tensor: Tensor, shape: Any) -> Tensor:
    """Return a tensor that is stored as flat runs in its stated shape; with a note where they do not fit."""
    whole = tuple(shape) if isinstance(shape, (list, tuple)) else ()
    local = _local_shape(whole, tensor.shape)
    if local is None or not all(_is_run(s.box) for s in tensor.shards):
        return replace(tensor, note=UNPLACED)
    shards = tuple(piece for s in tensor.shards for piece in _pieces(s, local))
    return replace(tensor, shape=whole, shards=shards, kind="chunks")


def layers_of(tensor: Tensor) -> list[Tensor]:
    """The layers of a tensor whose first dimension counts them."""
    shards: list[list[Shard]] = [[] for _ in range(tensor.shape[0])]
    for shard in tensor.shards:
        first, box = shard.box.offsets[0], Box(shard.box.offsets[1:], shard.box.sizes[1:])
        for n in range(first, min(first + shard.box.sizes[0], len(shards))):
            source = _row(shard.source, n - first) if shard.source else None
            shards[n].append(Shard(box, shard.rank, source))
    return [_layer(tensor, mine) for mine in shards]


def _layer(tensor: Tensor, shards: list[Shard]) -> Tensor:
    shape = tensor.shape[1:]
    plain = tensor.kind == "chunks" and all(s.box == Box.whole(shape) for s in shards)
    return replace(tensor, shape=shape, shards=tuple(shards), kind="plain" if plain else tensor.kind)


def _row(source: Source, at: int) -> Source:
    first = source.part(Box((at, *(0,) * (len(source.shape) - 1)), (1, *source.shape[1:])))
    return first._replace(shape=source.shape[1:], strides=source.strides[1:])


def _local_shape(whole: Ints, stored: Ints) -> Ints | None:
    """Shape of the pieces that flat runs are cut from: stored is [pieces along each dimension …, their elements]."""
    cuts = stored[:-1]
    if len(cuts) != len(whole) or not all(type(n) is int and n >= 0 for n in whole) or 0 in cuts:
        return None
    local = tuple(n // cut for n, cut in zip(whole, cuts, strict=True))
    divides = all(n % cut == 0 for n, cut in zip(whole, cuts, strict=True))
    return local if divides and prod(local) == stored[-1] else None


def _is_run(box: Box) -> bool:
    """Whether a box is a run of one piece."""
    return all(n == 1 for n in box.sizes[:-1])


def _pieces(shard: Shard, local: Ints) -> list[Shard]:
    """The boxes of a run of one piece, in the whole tensor."""
    at = tuple(i * n for i, n in zip(shard.box.offsets[:-1], local, strict=True))
    start, length = shard.box.offsets[-1], shard.box.sizes[-1]
    flat = shard.source.reshaped((length,)) if shard.source is not None and shard.source.contiguous else None
    return shards_in(Box(at, local), FlatRun(start, length, flat, shard.rank))
