"""Whether the shards of a tensor make all of it, and the problem that says what is missing or overlaps."""

from __future__ import annotations

from collections.abc import Iterable

from ckptools.model.cover import TangledLayoutError, cover
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Tensor
from ckptools.text import first_few


def cover_problem(tensor: Tensor, fqn: str) -> Problem | None:
    """Why a tensor cannot be put together whole, or None."""
    if tensor.note:
        return Problem(Code.TENSOR_NOT_JOINED, tensor.note, None, fqn)
    try:
        covered = cover(tensor.shape, {s.box for s in tensor.found})
    except TangledLayoutError as error:
        return Problem(Code.TENSOR_NOT_JOINED, str(error), None, fqn, "error")
    if covered.exact:
        return None
    if covered.outside:
        box = covered.outside[0]
        text = f"a shard at {box}{_whose(tensor, box)} outside of {list(tensor.shape)}"
        return Problem(Code.TENSOR_OVERLAP, text, None, fqn)
    if covered.overlaps:
        a, b = covered.overlaps[0]
        text = f"shards {a}{_whose(tensor, a)} and {b}{_whose(tensor, b)} overlap"
        return Problem(Code.TENSOR_OVERLAP, text, None, fqn)
    ranks = sorted({s.rank for s in tensor.shards if not s.was_read and s.rank is not None})
    whose = f", held by rank {', '.join(map(str, ranks[:8]))}" if ranks else ""
    where = first_few(covered.gaps, 3)
    text = f"gap {where}: {covered.missing} of {tensor.numel} elements are in no file here{whose}"
    return Problem(Code.TENSOR_GAP, text, ranks[0] if ranks else None, fqn)


def can_be_read(shape: Ints, boxes: Iterable[Box]) -> bool:
    """Whether boxes make all of a tensor, as far as that can be told in time."""
    try:
        return cover(shape, set(boxes)).exact
    except TangledLayoutError:
        return False


def _whose(tensor: Tensor, box: Box) -> str:
    ranks = sorted({s.rank for s in tensor.shards if s.box == box and s.rank is not None})
    return f" (rank {', '.join(map(str, ranks[:8]))})" if ranks else ""
