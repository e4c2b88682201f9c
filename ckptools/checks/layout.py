"""Do the shards of every tensor cover it exactly, and do the ranks agree on how?"""

from __future__ import annotations

from ckptools.checkpoint import Checkpoint
from ckptools.checks.results import Check, judged, skipped
from ckptools.model import Problem, Tensor, fqn_of, tensors_in
from ckptools.regions import TangledLayoutError, cover
from ckptools.views.words import plural

AGREEMENT = ("CK103", "CK104")


def layout(ck: Checkpoint) -> Check:
    """Every element of every tensor in exactly one shard; replicas of a shard count once."""
    tensors = [(path, t) for path, t in tensors_in(ck.tree) if t.kind != "meta"]
    if not tensors:
        return skipped("layout", "no tensors")
    problems = [p for path, t in tensors if (p := cover_problem(t, fqn_of(path))) is not None]
    sharded = sum(t.sharded for _, t in tensors)
    return judged("layout", problems, f"{plural(len(tensors), 'tensor')}, {sharded} sharded, covered exactly")


def agreement(ck: Checkpoint) -> Check:
    """World size by name, content and count; shapes, dtypes and shard maps across ranks."""
    ranks = len({f.rank for f in ck.files if f.status == "read"})
    problems = [p for p in ck.problems if p.code in AGREEMENT]
    if ranks < 2 and not problems:
        return skipped("ranks agree on layout", "one file read")
    return judged("ranks agree on layout", problems, f"{ranks} of {ranks}")


def cover_problem(tensor: Tensor, fqn: str) -> Problem | None:
    """Why a tensor cannot be put together whole, or None."""
    if tensor.note:
        return Problem("CK106", "error", tensor.note, None, fqn)
    try:
        told = cover(tensor.shape, {s.box for s in tensor.found})
    except TangledLayoutError as error:
        return Problem("CK106", "error", str(error), None, fqn)
    if told.exact:
        return None
    if told.outside:
        return Problem("CK102", "error", f"a shard at {told.outside[0]} outside of {list(tensor.shape)}", None, fqn)
    if told.overlaps:
        a, b = told.overlaps[0]
        return Problem("CK102", "error", f"shards {a} and {b} overlap", None, fqn)
    ranks = sorted({s.rank for s in tensor.shards if s.source is None and s.rank is not None})
    whose = f", held by rank {', '.join(map(str, ranks[:8]))}" if ranks else ""
    where = ", ".join(map(str, told.gaps[:3])) + (" …" if len(told.gaps) > 3 else "")
    text = f"gap {where}: {told.missing} of {tensor.numel} elements are in no file here{whose}"
    return Problem("CK101", "error", text, ranks[0] if ranks else None, fqn)
