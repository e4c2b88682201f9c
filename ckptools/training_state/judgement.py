"""The one place where a checkpoint is judged: every command and the Python API show what is found here.

The verdict follows from problems. Those of optimizer state, steps and stated copies are found here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem, grouped
from ckptools.model.rank_vote import vote
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, shard_ranks, states_one_crc
from ckptools.model.tensor import Tensor, cover_problem
from ckptools.model.tree import KeyPath, Lost, fqn_of, is_within, scalar, tensors_in
from ckptools.model.verdict import Depth, Verdict, causes_of, consequences_of
from ckptools.text import few, named_ranks, plural
from ckptools.training_state.optimizers import Optimizer, ParamGroup, optimizers_of
from ckptools.training_state.rank_values import Shared, is_own, own_paths
from ckptools.training_state.sections import model_of, sections_of, tensors_of
from ckptools.training_state.steps import RANKS_DIFFER, contradiction


def verdict_of(ck: Checkpoint, problems: Iterable[Problem] | None = None, depth: Depth | None = None) -> Verdict:
    """The verdict on a checkpoint.

    By default it follows from what opening it found, and is as deep as opening it goes.
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
    """The tensor without what lies in files that are damaged elsewhere: they may be others than were saved."""
    kept = tuple(s for s in tensor.shards if not any(source.path in cut for source in s.sources))
    return tensor if len(kept) == len(tensor.shards) else replace(tensor, shards=kept)


def is_placed(ck: Checkpoint, tensor: Tensor) -> bool:
    """Whether it is known where every shard of a tensor lies that a rank has whose file is here."""
    return ck.all_ranks or all(shard.was_read or shard.rank not in ck.ranks for shard in tensor.shards)


def perhaps_more(problems: Iterable[Problem]) -> bool:
    """Whether files that are not here may hold more of a checkpoint."""
    return any(p.severity == "warning" and p.kind.lacks == "part" for p in problems)


def stands_in_the_way(ck: Checkpoint, problem: Problem) -> bool:
    """Whether a problem alone keeps a checkpoint from being put together, whatever its tensors are like.

    A rank's file does not where something states what was in it: the gaps that it leaves do, and where replicas fill
    them there are none. What a rank had for itself, such as random states, is lost with it and named.
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
        return kind is not Code.BAD_CHECKSUM  # of a part of the archive that holds nothing of ours
    return not (kind.lacks == "value" and is_of_one_rank(ck, problem.tensor))


def _is_stated(ck: Checkpoint, rank: int) -> bool:
    """Whether what a rank's lost file held is known: tensors list its pieces, or all tensors are every rank's.

    Of a part of which no rank's file is here, such as all optimizers, nothing is.
    """
    known = ck.worked_out.setdefault("stated ranks", {})
    parts = {f.part for f in ck.files if f.is_here}
    if any(f.rank == rank and not f.is_here and f.part not in parts for f in ck.files):
        return False
    if rank not in known:
        tensors = [t for _, t in tensors_of(s for s in sections_of(ck) if s.kind in ("model", "optimizer"))]
        others = set(ck.ranks) - {rank}
        listed = any(rank in shard_ranks(t.shards) and any(not s.was_read for s in t.on_rank(rank)) for t in tensors)
        known[rank] = listed or all(_is_of_all(ck, t) or others <= {*shard_ranks(t.shards)} for t in tensors)
    return bool(known[rank])


def _is_of_all(ck: Checkpoint, tensor: Tensor) -> bool:
    """Whether a tensor is cut over all ranks, of which some may hold none of it."""
    ranks = prod(tensor.mesh) if tensor.mesh else tensor.world_size
    return tensor.sharded and ranks == ck.world_size.value


def _others_have(ck: Checkpoint, problem: Problem) -> bool:
    """Whether nothing of a part is lost with a rank's file but what is the rank's own: other ranks have the rest.

    A part that is kept by rank holds a value for each of them, and no rank has another's.
    """
    part = problem.tensor or ""
    kept = ck.tree.get(part) if isinstance(ck.tree, Mapping) else None
    ranks = {f.rank for f in ck.files if f.part == part and f.status == "read" and f.rank != problem.rank}
    shared = ranks and not (isinstance(kept, Mapping) and ranks & kept.keys())
    return bool(shared) or is_of_one_rank(ck, part)


def is_of_one_rank(ck: Checkpoint, name: str) -> bool:
    """Whether a name lies in a part that is each rank's own: random states, a position in the data."""
    return any(is_within(name, own) for own in _own_names(ck))


def _own_names(ck: Checkpoint) -> list[str]:
    return [fqn_of(section.path) for section in sections_of(ck) if section.path and is_own(section)]


def lost_with_files(ck: Checkpoint, problems: Iterable[Problem]) -> tuple[str, ...]:
    """Name what was only in lost files of ranks: `what rank 2 had for itself: rng`."""
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
    """Whether what is at a key path may have been in the part of the tree that a problem is about."""
    name, part = fqn_of(path), problem.tensor
    return part is None or is_within(name, part) or is_within(part, name)


def is_alone(ck: Checkpoint) -> bool:
    """Whether one rank's file was opened by name and no other rank's is beside it: nothing is wrong with that file."""
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


# -- problems of optimizer state, param groups and step counters -------------------------------------------------------


ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "acc_delta")
"""Slots that have one number for each number of the parameter, in every optimizer that uses the name."""


def optimizer_problems(ck: Checkpoint) -> Iterator[Problem]:
    """Find parameters without state or in two groups, state of other shapes, and state without a sure name.

    Where a file is lost, or ranks list other parameters, missing state proves nothing.
    """
    lost = any(p.severity == "error" and p.kind.lacks in ("file", "part") for p in ck.problems)
    unlike = any(p.kind is Code.COPIES_DIFFER and p.tensor and ".param_groups." in p.tensor for p in ck.problems)
    for optimizer in optimizers_of(ck).values():
        if optimizer.state:
            yield from () if lost or unlike else _grouped(ck, optimizer)
            yield from _shaped(ck, optimizer)
        elif not lost:
            keeping = [group for group in optimizer.param_groups if _keeps_state(group)]
            count = sum(len(group.names) for group in keeping)
            if count and type(ck.step.value) is int and ck.step.value > 0:
                listed = f"its groups list {plural(count, 'parameter')} and there is no state of any"
                text = f"{listed}, at step {ck.step.value}: all moments would begin at zero"
                yield Problem(Code.NO_OPTIMIZER_STATE, text, None, fqn_of(optimizer.path))
        if optimizer.state and optimizer.naming.unnamed:
            text = f"{optimizer.naming.note}; what has no name is not compared with its parameter"
            yield Problem(Code.OPTIMIZER_STATE_UNNAMED, text, None, fqn_of(optimizer.path))


def step_problems(ck: Checkpoint) -> Iterator[Problem]:
    """Find contradicting steps: of the name and a counter, or of two ranks."""
    if RANKS_DIFFER in ck.step.sources:
        if not any(p.kind is Code.MIXED_SAVES for p in ck.problems):
            yield Problem(Code.STEPS_DISAGREE, contradiction(ck.step))
    elif not ck.step.agree:
        yield Problem(Code.NAME_CONTRADICTS, contradiction(ck.step))


STATEFUL = ("betas", "beta1", "beta2", "rho", "etas", "lambd", "history_size", "lr_decay", "beta2_decay", "decay_rate")
"""Hyperparameters of optimizers that keep state for each parameter from their first step on.

Sources: torch/optim: adam.py, adadelta.py, rprop.py, asgd.py, lbfgs.py, adagrad.py, _adafactor.py;
transformers/optimization.py (`Adafactor`). SGD and RMSprop have others.
"""


def _keeps_state(group: ParamGroup) -> bool:
    """Whether an optimizer with such hyperparameters keeps state: SGD without momentum does not."""
    if any(name in group for name in STATEFUL) or ("alpha" in group and "centered" in group):
        return True
    momentum = scalar(group.get("momentum"))
    return isinstance(momentum, (int, float)) and momentum != 0


def _grouped(ck: Checkpoint, optimizer: Optimizer) -> Iterator[Problem]:
    groups = [n for group in optimizer.param_groups for n in group.names]
    if not groups or any(isinstance(group.values_.get("params"), Lost) for group in optimizer.param_groups):
        return
    keys = {k if isinstance(k, str) else f"?{k}" for k in optimizer.state}
    twice = sorted({n for n in groups if groups.count(n) > 1}) if len(set(groups)) < len(groups) else []
    model = model_of(ck)
    for fqn in twice:
        parameter = model.get(fqn)
        if isinstance(parameter, Tensor) and not parameter.numel:
            continue  # DeepSpeed's groups are found by runs of elements, and it has none
        yield Problem(Code.PARAM_GROUPS, "is in two param groups", None, fqn)
    for fqn in sorted(keys - set(groups)):
        yield Problem(Code.PARAM_GROUPS, "has optimizer state and is in no param group", None, fqn)
    for fqn in dict.fromkeys(n for n in groups if n not in keys) if not is_lbfgs(optimizer.state) else ():
        yield Problem(
            Code.NO_OPTIMIZER_STATE, "is in a param group and has no state: frozen, or never had a gradient", None, fqn
        )


def is_lbfgs(state: Mapping[Any, Any]) -> bool:
    """Whether a state is of LBFGS, which keeps all of it under its first parameter.

    Source: torch/optim/lbfgs.py, `step`: `state = self.state[self._params[0]]`.
    """
    slots = next(iter(state.values())) if len(state) == 1 else None
    return isinstance(slots, Mapping) and {"func_evals", "n_iter"} <= slots.keys()


def _shaped(ck: Checkpoint, optimizer: Optimizer) -> Iterator[Problem]:
    model = model_of(ck)
    rank_of = {fqn: group.get("rank") for group in optimizer.param_groups for fqn in group.names if "rank" in group}
    for fqn, slots in optimizer.state.items():
        parameter = model.get(fqn) if isinstance(fqn, str) else None
        if not isinstance(parameter, Tensor) or not isinstance(slots, Mapping):
            continue
        for slot, moment in slots.items():
            comparable = isinstance(moment, Tensor) and not moment.note and not parameter.note
            if not comparable or slot not in ELEMENTWISE or _is_projected(moment, parameter, rank_of.get(fqn)):
                continue
            if moment.shape != parameter.shape:
                text = f"{slot} has shape {list(moment.shape)}, its parameter {list(parameter.shape)}"
                yield Problem(Code.OPTIMIZER_STATE_SHAPE, text, None, fqn)


def _is_projected(moment: Tensor, parameter: Tensor, rank: Any) -> bool:
    """Whether a moment is of the gradient's projection to the `rank` of its param group, as GaLore and APOLLO keep it.

    Source: galore_torch/adamw.py, galore_projector.py (`project`): one dimension of the gradient becomes the rank, or
    both (`proj_type="full"`).
    """
    sizes = zip(moment.shape, parameter.shape, strict=False)
    return len(moment.shape) == len(parameter.shape) and all(own in (whole, rank) for own, whole in sizes)


# -- stated copies -----------------------------------------------------------------------------------------------------


def copy_problems(ck: Checkpoint) -> Iterator[Problem]:
    """Tensors that ranks should share, and whose copies differ by the CRC-32 that each file states of its own."""
    if any(p.kind is Code.ONE_OF_SEVERAL for p in ck.problems):
        return  # files that are slices of tensors look like copies that differ
    shared = Shared(sections_of(ck))
    for section in sections_of(ck):
        found = [p for path, tensor in tensors_of([section]) if shared.holds(path) for p in _of_tensor(path, tensor)]
        for odd in dict.fromkeys(p.ranks for p in found):
            first, *others = (p for p in found if p.ranks == odd)
            more = f"; and {len(others)} more regions or tensors of {section.name or 'it'}" if others else ""
            yield replace(first, message=f"{first.message}{more}")


def _of_tensor(path: KeyPath, tensor: Tensor) -> Iterator[Problem]:
    if not tensor.note and not states_one_crc(tensor.shards) and tensor.has_copies:
        by_box = grouped(tensor.found, lambda shard: shard.box)
        yield from (p for box, shards in by_box.items() for p in _differing(fqn_of(path), box, shards))


def _differing(fqn: str, box: Box, shards: Sequence[Shard]) -> Iterator[Problem]:
    stated = [(shard.rank, crc) for shard in shards if shard.rank is not None and (crc := _stated(shard))]
    found = vote(stated, lambda a, b: a == b)
    if not found.agree:
        text = f"{box}: copies differ by the CRC-32 that their files state ({found.by_rank(_in_hex)})"
        rank, own = found.odd[0] if found.odd else None, found.differing("stated CRC-32", _in_hex, plain=False)
        yield Problem(Code.COPIES_DIFFER, text, rank, fqn, ranks=found.odd, differing=own)


def _in_hex(crc: int) -> str:
    return f"{crc:08x}"


def _stated(shard: Shard) -> int:
    """The CRC-32 of a shard that is all of its record; 0 where none is stated of it alone."""
    source = shard.source
    if source is None or shard.encoded is not None or not source.contiguous:
        return 0
    return source.crc if source.record_span[1] == shard.box.numel * ITEMSIZE[source.dtype] else 0
