"""Spans: runs of consecutive elements of a flattened tensor, as FSDP1 and DeepSpeed hold them, placed as boxes."""

from __future__ import annotations

from dataclasses import replace

from ckptools.model.regions import Box, Ints, span_boxes
from ckptools.model.tensor import Shard, Source


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


def place_in(piece: Box, start: int, length: int, source: Source | None, rank: int | None) -> list[Shard]:
    """The shards of a run of a flattened piece, in the tensor that it is a piece of.

    Args:
        piece: where it lies in the tensor.
        start: index of the run's first element in the flattened piece.
        length: elements of the run; `start + length` is at most the piece's numel.
        source: the run, 1-D and contiguous; None where its bytes are not known.
        rank: who holds it.
    """
    if source is None:
        placed = [Shard(box, rank, None) for box, _ in span_boxes(piece.sizes, start, length)]
    else:
        placed = place(piece.sizes, start, source, rank)
    return [replace(shard, box=_shifted(shard.box, piece.offsets)) for shard in placed]


def _shifted(box: Box, by: Ints) -> Box:
    return Box(tuple(a + b for a, b in zip(by, box.offsets, strict=True)), box.sizes)
