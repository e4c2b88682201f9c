"""Join tensor-parallel weights: the ranks' pieces become one lazy tensor by a rule.

No file states the dimension along which a plain tensor was cut. The format knows it, or the user gives a rule file: one
JSON object, a glob pattern for the name as `inspect` shows it, to `"replicated"`, `{"dim": 0}` or `{"dim": 0,
"halves": 2}` (each rank's piece is that many blocks along `dim`, joined block by block). The first pattern that
matches wins, before every rule of the format; `*` also matches dots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import UsageError
from ckptools.files.opening import read_json
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import describe_for_error
from ckptools.option import spelled

ALL_RANKS = (
    "joined by the rules that were given, as if no other rank had a file; nothing in the files says how many ranks"
)
MAX_DIM = 8
MAX_HALVES = 64


def no_rule() -> str:
    """Why the pieces of a weight are not joined: nobody says how."""
    return f"no rule says how its tensor-parallel pieces are joined; give one with {spelled('rules')} FILE"


@dataclass(frozen=True)
class JoinRule:
    """How the tensor-parallel pieces of one weight are joined.

    Attributes:
        dim: dimension along which they follow each other in rank order; None if every rank has the same.
        halves: number of blocks in each rank's piece, each of which is joined by itself.
        given: pattern of the rule file that states it; "" for a built-in rule.
    """

    dim: int | None
    halves: int = 1
    given: str = ""


REPLICATED, ROWS, COLUMNS, GATED = JoinRule(None), JoinRule(0), JoinRule(1), JoinRule(0, 2)

GivenRules = tuple[tuple[str, JoinRule], ...]
"""Pairs of pattern and rule in a rule file."""


@dataclass(frozen=True)
class RankPiece:
    """The piece of a weight on one tensor-parallel and global rank; no tensor if its file was not read."""

    tp: int
    rank: int
    tensor: Tensor | None


class BoxPair(NamedTuple):
    """A box of one rank's tensor, and the corresponding box of the whole tensor."""

    local: Box
    whole: Box


class UnlikeError(ValueError):
    """The ranks' tensors cannot be pieces of one weight."""


def join(pieces: Sequence[RankPiece], rule: JoinRule, ranks: int) -> Tensor:
    """Join the ranks' pieces of a weight, at least one with a tensor; `ranks` is the tensor-parallel size.

    Raises:
        UnlikeError: shapes or dtypes differ, or do not fit the rule.
    """
    first = next(p.tensor for p in pieces if p.tensor is not None)
    if rule.given and rule.dim is not None and rule.halves == 1 and _differ_along(pieces, first, rule.dim):
        # Pieces have different sizes if the last ranks of FSDP2 have smaller ones.
        start, uneven = 0, list[Shard]()
        for piece in pieces:
            assert piece.tensor is not None
            offsets = tuple(start if d == rule.dim else 0 for d in range(len(first.shape)))
            uneven.append(Shard(Box(offsets, piece.tensor.shape), piece.rank, _source(piece)))
            start += piece.tensor.shape[rule.dim]
        shape = tuple(start if d == rule.dim else n for d, n in enumerate(first.shape))
        return replace(first, shape=shape, shards=tuple(uneven), kind="tensor_parallel", world_size=ranks)
    for piece in pieces:
        other = piece.tensor
        if other is not None and (other.shape, other.dtype) != (first.shape, first.dtype):
            text = f"{other.dtype} {list(other.shape)}, another rank has {first.dtype} {list(first.shape)}"
            raise UnlikeError(f"rank {piece.rank} has {text}; they are not pieces of one weight")
    if rule.dim is None:
        shards = tuple(Shard(Box.whole(first.shape), p.rank, _source(p)) for p in pieces if p.tensor is not None)
        return replace(first, shards=shards)
    says = f"rule {describe_for_error(rule.given)} says" if rule.given else "expected"
    if rule.dim >= len(first.shape):
        raise UnlikeError(f"{says} dim {rule.dim}, but it has {len(first.shape)} dimensions")
    if first.shape[rule.dim] % rule.halves:
        raise UnlikeError(f"{says} {rule.halves} halves of dim {rule.dim}, which has {first.shape[rule.dim]} elements")
    shape = tuple(n * ranks if d == rule.dim else n for d, n in enumerate(first.shape))
    shards = tuple(shard for piece in pieces for shard in _placed(piece, first.shape, rule, ranks))
    return replace(first, shape=shape, shards=shards, kind="tensor_parallel", world_size=ranks)


def _differ_along(pieces: Sequence[RankPiece], first: Tensor, dim: int) -> bool:
    """Whether every rank has a piece, and these differ in their sizes along a single dimension."""
    tensors = [p.tensor for p in pieces]
    if dim >= len(first.shape) or any(t is None or len(t.shape) != len(first.shape) for t in tensors):
        return False
    alike = {(t.dtype, *(n for d, n in enumerate(t.shape) if d != dim)) for t in tensors if t is not None}
    return len(alike) == 1 and len({t.shape for t in tensors if t is not None}) > 1


def _source(piece: RankPiece) -> Source | None:
    return piece.tensor.shards[0].source if piece.tensor is not None and piece.tensor.shards else None


def _placed(piece: RankPiece, shape: Ints, rule: JoinRule, ranks: int) -> Iterator[Shard]:
    dim, halves, source = rule.dim, rule.halves, _source(piece)
    assert dim is not None
    n = shape[dim] // halves
    sizes = tuple(n if d == dim else size for d, size in enumerate(shape))
    for half in range(halves):
        here = tuple(half * n if d == dim else 0 for d in range(len(shape)))
        there = tuple((half * ranks + piece.tp) * n if d == dim else 0 for d in range(len(shape)))
        yield Shard(Box(there, sizes), piece.rank, source.part(Box(here, sizes)) if source else None)


def unjoined_tensor(pieces: Iterable[tuple[int, Tensor]], why: str) -> Tensor:
    """The pieces of a weight by rank, to be shown but not loaded; `why` is its note."""
    by_rank = list(pieces)
    shards = tuple(s._replace(rank=rank) for rank, tensor in by_rank for s in tensor.shards)
    return replace(by_rank[0][1], shards=shards, kind="tensor_parallel", note=why)


# -- the user's rules --------------------------------------------------------------------------------------------------


def given_rule(given: GivenRules, fqn: str) -> JoinRule | None:
    """The user's rule for a weight; None if no pattern matches."""
    return next((rule for pattern, rule in given if fnmatchcase(fqn, pattern)), None)


def read_rules(path: Path | None) -> GivenRules:
    """Read a rule file; no rules without one.

    Raises:
        UsageError: its content is not rules.
        ReadError: it is not JSON, or cannot be read.
    """
    if path is None:
        return ()
    found = read_json(path)
    if not isinstance(found, dict):
        raise UsageError(path, 'expected an object of pattern to rule, such as {"*.experts.*": {"dim": 0}}')
    return tuple((pattern, _rule(path, pattern, value)) for pattern, value in found.items())


def _rule(path: Path, pattern: str, value: Any) -> JoinRule:
    if value == "replicated":
        return JoinRule(None, 1, pattern)
    keys = value if isinstance(value, dict) else {}
    dim, halves = keys.get("dim"), keys.get("halves", 1)
    whole = type(dim) is int and 0 <= dim < MAX_DIM and type(halves) is int and 1 <= halves <= MAX_HALVES
    if not whole or set(keys) - {"dim", "halves"}:
        text = f'{describe_for_error(pattern)}: expected "replicated", {{"dim": 0}} or {{"dim": 0, "halves": 2}}'
        raise UsageError(path, text)
    return JoinRule(dim, halves, pattern)
