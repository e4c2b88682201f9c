"""The pieces of a weight that the tensor-parallel ranks hold, joined into one lazy tensor by a rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckptools.formats.megatron.rules import Rule
from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Shard, Source, Tensor
from ckptools.model.values import describe_for_error


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a weight.

    Attributes:
        tp: its tensor-parallel rank.
        rank: its global rank.
        tensor: what its file has; None when that was not read and the others tell the shape.
    """

    tp: int
    rank: int
    tensor: Tensor | None


class UnlikeError(ValueError):
    """Ranks hold what cannot be pieces of one weight."""


def join(pieces: Sequence[Piece], rule: Rule, ranks: int) -> Tensor:
    """The whole weight.

    Args:
        pieces: by rank; at least one has a tensor.
        rule: how they are joined.
        ranks: tensor-parallel size.

    Raises:
        UnlikeError: shapes or dtypes differ, or do not fit the rule.
    """
    first = next(p.tensor for p in pieces if p.tensor is not None)
    _check_alike(pieces, first)
    if rule.dim is None:
        shards = tuple(Shard(Box.whole(first.shape), p.rank, _source(p)) for p in pieces if p.tensor is not None)
        return replace(first, shards=shards)
    shape = _joined_shape(first.shape, rule, ranks)
    shards = tuple(shard for piece in pieces for shard in _placed(piece, first.shape, rule, ranks))
    return replace(first, shape=shape, shards=shards, kind="tensor_parallel", world_size=ranks)


def _check_alike(pieces: Sequence[Piece], first: Tensor) -> None:
    for piece in pieces:
        other = piece.tensor
        if other is not None and (other.shape, other.dtype) != (first.shape, first.dtype):
            text = f"{other.dtype} {list(other.shape)}, another rank has {first.dtype} {list(first.shape)}"
            raise UnlikeError(f"rank {piece.rank} has {text}; they are not pieces of one weight")


def _joined_shape(shape: Ints, rule: Rule, ranks: int) -> Ints:
    says = f"rule {describe_for_error(rule.given)} says" if rule.given else "expected"
    if rule.dim is None or rule.dim >= len(shape):
        raise UnlikeError(f"{says} dim {rule.dim}, but it has {len(shape)} dimensions")
    if shape[rule.dim] % rule.halves:
        raise UnlikeError(f"{says} {rule.halves} halves of dim {rule.dim}, which has {shape[rule.dim]} elements")
    return tuple(n * ranks if d == rule.dim else n for d, n in enumerate(shape))


def _source(piece: Piece) -> Source | None:
    return piece.tensor.shards[0].source if piece.tensor is not None and piece.tensor.shards else None


def _placed(piece: Piece, shape: Ints, rule: Rule, ranks: int) -> Iterator[Shard]:
    """The boxes of one rank's piece: one for each half."""
    dim, halves, source = rule.dim, rule.halves, _source(piece)
    assert dim is not None
    n = shape[dim] // halves
    sizes = tuple(n if d == dim else size for d, size in enumerate(shape))
    for half in range(halves):
        here = tuple(half * n if d == dim else 0 for d in range(len(shape)))
        there = tuple((half * ranks + piece.tp) * n if d == dim else 0 for d in range(len(shape)))
        yield Shard(Box(there, sizes), piece.rank, source.part(Box(here, sizes)) if source else None)
