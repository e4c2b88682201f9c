"""Weights stored as flat runs of pieces (`fully_sharded_model_space`), as boxes of their true shape.

A tensor of shape [pieces along each dimension …, elements of a piece] with the true shape in the metadata's
`mcore_data`. Source: megatron/core/dist_checkpointing/strategies/resharding.py (core 0.11).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from operator import mul
from typing import Any

from ckptools.formats.flat_parameters.flat_runs import FlatRun, shards_in
from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor

UNPLACED = "flat runs whose pieces do not follow from the metadata; --only model writes the model"


def in_true_shape(tensor: Tensor, shape: Any) -> Tensor:
    """A tensor that is stored as flat runs, in its stated shape; with a note where they do not fit."""
    whole = tuple(shape) if isinstance(shape, (list, tuple)) else ()
    local = _local_shape(whole, tensor.shape)
    if local is None or not all(n == 1 for s in tensor.shards for n in s.box.sizes[:-1]):
        return replace(tensor, note=UNPLACED)
    shards = tuple(piece for s in tensor.shards for piece in _run_boxes(s, local))
    return replace(tensor, shape=whole, shards=shards, kind="chunks")


def _local_shape(whole: Ints, stored: Ints) -> Ints | None:
    """Shape of the pieces that flat runs are cut from; None where the stored shape is not theirs."""
    cuts = stored[:-1]
    if len(cuts) != len(whole) or not all(type(n) is int and n >= 0 for n in whole) or 0 in cuts:
        return None
    local = tuple(n // cut for n, cut in zip(whole, cuts, strict=True))
    return local if tuple(map(mul, local, cuts)) == whole and prod(local) == stored[-1] else None


def _run_boxes(shard: Shard, local: Ints) -> list[Shard]:
    """The boxes of a run of one piece, in the whole tensor."""
    at = tuple(i * n for i, n in zip(shard.box.offsets[:-1], local, strict=True))
    start, length = shard.box.offsets[-1], shard.box.sizes[-1]
    flat = shard.source.reshaped((length,)) if shard.source is not None and shard.source.contiguous else None
    return shards_in(Box(at, local), FlatRun(start, length, flat, shard.rank))
