"""Judge a checkpoint: the one place from which every command and the Python API take the verdict.

The verdict follows from the checkpoint's problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem
from ckptools.model.incidents import causes_of, consequences_of
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.model.verdict import Depth, Verdict
from ckptools.text import KeyPath, few, fqn_of, is_within, named_ranks, plural
from ckptools.training_state.rank_values import is_own, own_paths
from ckptools.training_state.sections import sections_of, tensors_of


def verdict_of(ck: Checkpoint, problems: Iterable[Problem] | None = None, depth: Depth | None = None) -> Verdict:
    """The verdict on a checkpoint.

    By default it follows from the problems found on opening, and its depth is that of opening.
    """
    opened: Depth = "structure" if ck.structure_read else "listed"
    if problems is None and depth is None:
        if "verdict" not in ck.worked_out:
            ck.worked_out["verdict"] = _judged(ck, ck.problems, opened)
        found: Verdict = ck.worked_out["verdict"]
        return found
    return _judged(ck, ck.problems if problems is None else tuple(problems), depth or opened)


def _judged(ck: Checkpoint, problems: Sequence[Problem], depth: Depth) -> Verdict:
    wrong = [p for p in problems if p.severity == "error" and p.kind.spoils]
    more = perhaps_more(problems)
    whole = False if wrong else None if more or not ck.structure_read else True
    recoverable = joinable = None
    if ck.structure_read:
        joinable = not any(p.kind is Code.TENSOR_NOT_JOINED and p.severity != "note" for p in problems)
        blocked = any(stands_in_the_way(ck, p) for p in wrong)
        recoverable = None if whole is None else whole or not (blocked or _has_gaps(ck))
    lost = lost_with_files(ck, wrong) if whole is False and recoverable else ()
    causes, following = causes_of(problems), consequences_of(problems)
    return Verdict(whole, recoverable, joinable, depth, _extent(ck, more), causes, lost, following)


def _has_gaps(ck: Checkpoint) -> bool:
    if "gaps" not in ck.worked_out:
        cut = {f.path for f in ck.files if f.status in ("cut", "bad")}
        tensors = (t for _, t in tensors_in(ck.tree) if t.kind != "meta" and is_placed(ck, t))
        found = (cover_problem(_without(tensor, cut) if cut else tensor, "") for tensor in tensors)
        ck.worked_out["gaps"] = any(problem is not None and problem.kind is Code.TENSOR_GAP for problem in found)
    return bool(ck.worked_out["gaps"])


def _without(tensor: Tensor, cut: set[Path]) -> Tensor:
    """The tensor without shards from damaged files, whose values may differ from the saved ones."""
    kept = tuple(s for s in tensor.shards if not any(source.path in cut for source in s.sources))
    return tensor if len(kept) == len(tensor.shards) else replace(tensor, shards=kept)


def is_placed(ck: Checkpoint, tensor: Tensor) -> bool:
    """Whether every shard of a tensor on ranks whose files are present has a known location."""
    return ck.all_ranks or all(shard.was_read or shard.rank not in ck.ranks for shard in tensor.shards)


def perhaps_more(problems: Iterable[Problem]) -> bool:
    """Whether missing files may hold more of a checkpoint."""
    return any(p.severity == "warning" and p.kind.lacks == "part" for p in problems)


def stands_in_the_way(ck: Checkpoint, problem: Problem) -> bool:
    """Whether a problem alone keeps a checkpoint from being put together, whatever its tensors are like.

    A rank's lost file does not, if other files state its content: gaps in tensors do, and replicas may fill them. A
    rank's own values, such as random states, are lost with its file and are named.
    """
    kind = problem.kind
    if problem.severity != "error" or not kind.spoils or problem.replicated:
        return False
    if kind.forbids == "any output":
        return True
    if kind.lacks == "file" and problem.rank is not None:
        return not (_is_stated(ck, problem.rank) if problem.tensor is None else _others_have(ck, problem))
    if kind.lacks == "file":
        return True
    if problem.tensor is None:
        return kind is not Code.BAD_CHECKSUM  # of an entry of the archive that ckptools does not read
    return not (kind.lacks == "value" and is_of_one_rank(ck, problem.tensor))


def _is_stated(ck: Checkpoint, rank: int) -> bool:
    """Whether the content of a rank's lost file is known: tensors list its shards, or every rank has all tensors.

    Nothing is known of a part, such as all optimizers, if no rank's file of it is present.
    """
    known = ck.worked_out.setdefault("stated ranks", {})
    parts = {f.part for f in ck.files if f.is_here}
    if any(f.rank == rank and not f.is_here and f.part not in parts for f in ck.files):
        return False
    if rank not in known:
        tensors = [t for _, t in tensors_of(s for s in sections_of(ck) if s.kind in ("model", "optimizer"))]
        others = set(ck.ranks) - {rank}
        listed = any(rank in t.every_shard.ranks and any(not s.was_read for s in t.on_rank(rank)) for t in tensors)
        known[rank] = listed or all(_is_of_all(ck, t) or others <= {*t.every_shard.ranks} for t in tensors)
    return bool(known[rank])


def _is_of_all(ck: Checkpoint, tensor: Tensor) -> bool:
    """Whether a tensor is cut over all ranks, some of which may hold none of it."""
    ranks = prod(tensor.mesh) if tensor.mesh else tensor.world_size
    return tensor.sharded and ranks == ck.world_size.value


def _others_have(ck: Checkpoint, problem: Problem) -> bool:
    """Whether other ranks have everything of a lost rank file's part but the rank's own values.

    A part that is kept by rank has one value for each rank, and no rank has another's.
    """
    part = problem.tensor or ""
    kept = ck.tree.get(part) if isinstance(ck.tree, Mapping) else None
    ranks = {f.rank for f in ck.files if f.part == part and f.status == "read" and f.rank != problem.rank}
    shared = ranks and not (isinstance(kept, Mapping) and ranks & kept.keys())
    return bool(shared) or is_of_one_rank(ck, part)


def is_of_one_rank(ck: Checkpoint, name: str) -> bool:
    """Whether a name lies in a part that each rank has for itself: random states, a position in the data."""
    return any(is_within(name, own) for own in _own_names(ck))


def _own_names(ck: Checkpoint) -> list[str]:
    return [fqn_of(section.path) for section in sections_of(ck) if section.path and is_own(section)]


def lost_with_files(ck: Checkpoint, problems: Iterable[Problem]) -> tuple[str, ...]:
    """Name the values that only lost rank files had: `what rank 2 had for itself: rng`."""
    wrong = list(problems)
    lost = [p for p in wrong if p.kind.lacks == "file" and p.rank is not None]
    ranks = {p.rank for p in lost if p.rank is not None}
    paths = [path for path in own_paths(sections_of(ck), ck.world_size.exact) if path]
    own = [path for path in dict.fromkeys([*paths, *ck.differing]) if any(may_concern(p, path) for p in lost)]
    names = list(dict.fromkeys(map(fqn_of, own)))
    outer = [name for name in names if not any(name != other and is_within(name, other) for other in names)]
    itself = "itself" if len(ranks) == 1 else "themselves"
    found = (f"what {named_ranks(ranks)} had for {itself}: {few(outer, 3)}",) if ranks and outer else ()
    values = (p for p in wrong if p.kind.lacks == "value" and not p.replicated and p.rank not in ranks)
    return (*found, *(p.tensor for p in values if p.tensor))


def may_concern(problem: Problem, path: KeyPath) -> bool:
    """Whether the value at a key path may have been in the part of the tree that a problem is about."""
    name, part = fqn_of(path), problem.tensor
    return part is None or is_within(name, part) or is_within(part, name)


def is_alone(ck: Checkpoint) -> bool:
    """Whether a single rank file was opened by name and has no siblings, which is not an error."""
    here = [f for f in ck.files if f.is_here]
    damaged = any(f.status in ("cut", "bad") for f in ck.files)
    others = any(f.status == "missing" for f in ck.files)
    one = len({f.rank for f in here}) == 1 and here[0].rank is not None
    return one and others and not damaged and any(f.path == ck.path for f in here)


def _extent(ck: Checkpoint, more: bool) -> str:
    here = [f for f in ck.files if f.is_here]
    ranks = len(ck.ranks)
    if more:
        each = "each whole in itself" if len(here) > 1 else "whole in itself"
        return f"{plural(len(here), 'file')}, {each}; files that are not here may hold more"
    if len(ck.files) == 1:
        rank = ck.files[0].rank
        others = f"one file, rank {rank}'s by its name; that other ranks hold more is not excluded"
        return "one file holds everything" if rank is None else others
    files = f"all {len(here)} files"
    if ranks:
        files = f"all {ranks} rank files" if len(here) == ranks else f"all {len(here)} files of {plural(ranks, 'rank')}"
    return f"{files} are here, all read" if ck.structure_read else f"{files} are here; contents not compared (verify)"
