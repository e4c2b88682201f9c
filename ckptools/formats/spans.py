"""Spans: runs of consecutive elements of a flattened tensor, as FSDP1 and DeepSpeed hold them, placed as boxes."""

from __future__ import annotations

from ckptools.model import Shard, Source
from ckptools.regions import Box, Ints, span_boxes


def place(shape: Ints, start: int, source: Source, rank: int | None) -> list[Shard]:
    """The shards of a run of a flattened tensor: at most 2 * ndim - 1 boxes.

    Args:
        shape: of the whole tensor.
        start: index of the run's first element in the flattened tensor.
        source: the run, 1-D and contiguous; `start + numel` is at most the tensor's numel.
        rank: who holds it.
    """
    placed = []
    for box, at in span_boxes(shape, start, source.shape[0]):
        piece = source.part(Box((at,), (box.numel,)))
        placed.append(Shard(box, rank, piece.reshaped(box.sizes)))
    return placed
