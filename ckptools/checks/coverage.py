"""Checks of shards: those of every tensor cover it exactly, and all ranks agree on how it is cut."""

from __future__ import annotations

from ckptools.checks.results import judged, skipped
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.model.verification import Check
from ckptools.tensor_io.coverage import cover_problem
from ckptools.text import plural

AGREEMENT = (Code.WORLD_SIZES_DISAGREE, Code.LAYOUT_DISAGREES)


def exactly_covered(ck: Checkpoint) -> Check:
    """Whether every element of every tensor is in exactly one shard; replicas of a shard count once."""
    tensors = [(path, t) for path, t in tensors_in(ck.tree) if t.kind != "meta"]
    if not tensors:
        return skipped("layout", "no tensors")
    lost = [p for p in ck.problems if p.kind is Code.TENSOR_NOT_JOINED and p.severity == "error"]
    told = {p.tensor for p in lost}
    others = ((fqn, t) for fqn, t in ((fqn_of(path), t) for path, t in tensors) if fqn not in told)
    problems = [*lost, *(p for fqn, t in others if (p := cover_problem(t, fqn)) is not None)]
    sharded = sum(t.sharded for _, t in tensors)
    return judged("layout", problems, f"{plural(len(tensors), 'tensor')}, {sharded} sharded, covered exactly")


def ranks_agree(ck: Checkpoint) -> Check:
    """Whether ranks agree on the world size, and on the shape, dtype and shards of every tensor."""
    ranks = len({f.rank for f in ck.files if f.status == "read" and f.rank is not None})
    problems = [p for p in ck.problems if p.kind in AGREEMENT]
    if ranks < 2 and not problems:
        return skipped("ranks agree on layout", "no two ranks to compare")
    return judged("ranks agree on layout", problems, f"{ranks} of {ranks}")
