"""Does the training state fit together: optimizer and model, step counters, learning rates, RNG of the ranks?"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptools.checks.results import judged, skipped
from ckptools.dtypes import ITEMSIZE
from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.rank_vote import named
from ckptools.model.tensor import Shard, Tensor
from ckptools.model.tree import KeyPath, nodes_in
from ckptools.model.values import NumpyArray
from ckptools.model.verification import Check
from ckptools.tensor_io.coverage import cover_problem
from ckptools.text import plural
from ckptools.training_state.learning_rates import learning_rates as compared_rates
from ckptools.training_state.optimizers import Optimizer, optimizers_of
from ckptools.training_state.sections import Section, is_gathered, model_of, sections_of_kind, stream_of
from ckptools.training_state.steps import contradiction

ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "acc_delta")
"""Slots that have one number for each number of the parameter, in every optimizer that uses the name."""

MAX_RATES = 4
"""Learning rates that a line names."""


def optimizer_covers(ck: Checkpoint) -> Check:
    """State for every parameter in a group, each in one group, moments of the parameter's shape."""
    name = "optimizer covers params"
    optimizers = [o for o in optimizers_of(ck).values() if o.state]
    if not optimizers:
        return skipped(name, "no optimizer state")
    problems = [p for o in optimizers for p in (*_grouped(o), *_shaped(ck, o), *_unnamed(o))]
    with_state = sum(len(o.state) for o in optimizers)
    grouped = sum(len({n for group in o.param_groups for n in group.names}) for o in optimizers)
    assumed = sum(len(o.naming.assumed) for o in optimizers)
    more = f"; {assumed} names are assumed by order" if assumed else ""
    return judged(name, problems, f"{with_state} of {max(grouped, with_state)} have state{more}")


def _unnamed(optimizer: Optimizer) -> Iterator[Problem]:
    """States that belong to nobody knows which parameter, so that nothing can be compared."""
    if optimizer.naming.unnamed:
        text = f"{optimizer.naming.note}; what has no name is not compared with its parameter"
        yield Problem(Code.OPTIMIZER_STATE_UNNAMED, text, None, optimizer.name)


def _grouped(optimizer: Optimizer) -> Iterator[Problem]:
    groups = [n for group in optimizer.param_groups for n in group.names]
    if not groups:
        return
    keys = {k if isinstance(k, str) else f"?{k}" for k in optimizer.state}
    twice = sorted({n for n in groups if groups.count(n) > 1}) if len(set(groups)) < len(groups) else []
    for fqn in twice:
        yield Problem(Code.PARAM_GROUPS, "is in two param groups", None, fqn)
    for fqn in sorted(keys - set(groups)):
        yield Problem(Code.PARAM_GROUPS, "has optimizer state and is in no param group", None, fqn)
    for fqn in dict.fromkeys(n for n in groups if n not in keys):
        yield Problem(
            Code.NO_OPTIMIZER_STATE, "is in a param group and has no state: frozen, or never had a gradient", None, fqn
        )


def _shaped(ck: Checkpoint, optimizer: Optimizer) -> Iterator[Problem]:
    model = model_of(ck)
    for fqn, slots in optimizer.state.items():
        parameter = model.get(fqn) if isinstance(fqn, str) else None
        if not isinstance(parameter, Tensor) or not isinstance(slots, Mapping):
            continue
        for slot, moment in slots.items():
            told = isinstance(moment, Tensor) and not moment.note and not parameter.note
            if told and slot in ELEMENTWISE and moment.shape != parameter.shape:
                text = f"{slot} has shape {list(moment.shape)}, its parameter {list(parameter.shape)}"
                yield Problem(Code.OPTIMIZER_STATE_SHAPE, text, None, fqn)


def step_counters(ck: Checkpoint) -> Check:
    """The training step, and the steps that the optimizers count for each parameter."""
    name, problems = "step counters", []
    found = {(o.name, fqn): step for o in optimizers_of(ck).values() for fqn, step in _steps(o)}
    counted = {key: step for key, step in found.items() if math.isfinite(step)}
    odd = {key: step for key, step in found.items() if key not in counted}
    for (_, fqn), step in list(odd.items())[:1]:
        text = f"the optimizer counts {step} steps (of {len(found)} parameters {len(odd)} have no number)"
        problems.append(Problem(Code.STEPS_DISAGREE, text, None, str(fqn)))
    values = sorted(set(counted.values()))
    if len(values) > 1:
        few = min(values, key=list(counted.values()).count)
        who = next(str(fqn) for (_, fqn), step in counted.items() if step == few)
        text = f"the optimizer counts {len(values)} different steps, from {values[0]} to {values[-1]}; here {few}"
        problems.append(Problem(Code.STEPS_DISAGREE, text, None, who))
    if len(values) == 1 and ck.step.value is not None and values[0] != ck.step.value:
        text = f"the optimizer counts {values[0]} steps, {ck.step.sources[0]} says {ck.step.value}"
        problems.append(Problem(Code.STEPS_DISAGREE, text))
    if not ck.step.agree:
        problems.append(Problem(Code.STEPS_DISAGREE, contradiction(ck.step)))
    if ck.step.value is None and not found:
        return skipped(name, "nothing counts steps")
    where = [*ck.step.sources, *([f"{plural(len(counted), 'optimizer step')}"] if counted else [])]
    told = ck.step.value if ck.step.value is not None else next(iter(values), None)
    return judged(name, problems, f"{told} in {', '.join(where)}" if where else "")


def _steps(optimizer: Optimizer) -> Iterator[tuple[Any, float]]:
    """What the optimizer counts for each parameter: a number, or a tensor with one; its bytes are few.

    One that is in no file here is told by the check of the layout.
    """
    with OpenFiles() as files:
        for fqn, slots in optimizer.state.items():
            step = slots.get("step") if isinstance(slots, Mapping) else None
            if isinstance(step, Tensor) and step.numel == 1 and cover_problem(step, "") is None:
                yield fqn, _number(step, files)
            elif type(step) is int:
                yield fqn, step


NUMBERS = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}
"""Dtypes of step counters, as `struct` has them."""


def _number(tensor: Tensor, files: OpenFiles) -> float:
    """The one element of a tensor, of one with copies the last; an integer where it is one."""
    code = NUMBERS.get(tensor.dtype)
    if code is not None:
        number = struct.unpack(code, _bytes_of(next(s for s in reversed(tensor.found) if s.box.numel), files))[0]
    else:
        from ckptools.tensor_io import read

        number = read.to_numpy(tensor).reshape(-1)[0]
    return int(number) if math.isfinite(number) else float(number)


def learning_rates(ck: Checkpoint) -> Check:
    """The rates that the schedulers computed last, against those in the param groups."""
    name, rates, problems = "lr: scheduler = groups", set[float](), []
    for section, told in zip(sections_of_kind(ck, "scheduler"), compared_rates(ck), strict=True):
        rates.update(told.scheduler if told else ())
        if told and not told.agree:
            text = (
                f"its last learning rates are {_rates(told.scheduler)}, those of the param groups {_rates(told.groups)}"
            )
            problems.append(Problem(Code.LEARNING_RATES_DISAGREE, text, None, section.name))
    if not rates:
        return skipped(name, "no scheduler whose rates could be compared")
    return judged(name, problems, _rates(rates))


def _rates(rates: Iterable[float]) -> str:
    told = sorted(set(rates))
    return ", ".join(f"{rate:.4g}" for rate in told[:MAX_RATES]) + (", ..." if len(told) > MAX_RATES else "")


def rng(ck: Checkpoint) -> Check:
    """One state of each generator for each rank, all different."""
    states: dict[str, dict[Any, int]] = {}
    for section in sections_of_kind(ck, "rng"):
        for stream, rank, digest in _states_of(ck, section):
            states.setdefault(stream, {})[rank] = zlib.crc32(b"%d" % digest, states.get(stream, {}).get(rank, 0))
    shared = {s: d for s, d in states.items() if len(d) > 1}
    if not shared:
        return skipped("rng", "no RNG state" if not states else "RNG state of one rank")
    told = ", ".join(f"{stream} {len(set(d.values()))} distinct of {len(d)}" for stream, d in shared.items())
    problems = [
        Problem(Code.RNG_STATES_EQUAL, f"all {len(d)} ranks have the same {stream} state")
        for stream, d in shared.items()
        if len(set(d.values())) == 1
    ]
    return judged("rng", [*problems, *_equal_for_some(shared)], told)


def _equal_for_some(states: Mapping[str, Mapping[Any, int]]) -> Iterator[Problem]:
    """Ranks that have one state where others have their own.

    Groups of one size, such as the data-parallel copies of each tensor-parallel rank, are meant to be equal.
    """
    streams: dict[tuple[Any, ...], list[str]] = {}
    for stream, digests in states.items():
        groups: dict[int, list[Any]] = {}
        for rank, digest in digests.items():
            groups.setdefault(digest, []).append(rank)
        if len({len(ranks) for ranks in groups.values()}) > 1:
            for members in (m for m in groups.values() if len(m) > 1):
                streams.setdefault(tuple(members), []).append(stream)
    for ranks, same in streams.items():
        text = f"ranks {named(ranks)} have the same {', '.join(same)} state, other ranks have their own"
        yield Problem(Code.RNG_STATES_EQUAL, f"{text}; a file may have been copied, or restored on the wrong rank")


def _states_of(ck: Checkpoint, section: Section) -> Iterator[tuple[str, Any, int]]:
    """The states of a section: from what each rank has there where that was kept, else from the tree."""
    of_ranks = {} if is_gathered(section.value) else ck.per_rank.get(section.path, {})
    for rank, tree in of_ranks.items():
        yield from ((stream, rank, digest) for stream, _, digest in _states(tree, rank))
    if not of_ranks:
        yield from _states(section.value)


def _states(tree: Any, owner: int | None = None) -> Iterator[tuple[str, Any, int]]:
    """`(stream, rank, digest)` of every piece of state: by place in a list, by a key that is a rank, or by shard."""
    # A list of all ranks' states is the same in every file: one copy tells, and N files have N × N of them.
    copies = 1 if is_gathered(tree) else None
    for path, leaf in nodes_in(tree, (Tensor, NumpyArray)):
        for rank, digest in _digests(leaf, copies):
            yield _stream(path, "torch"), _listed(path, rank), digest
    for path, numbers in _runs(tree):
        rank = _listed(path, owner)
        if rank is not None:
            yield _stream(path, "python"), rank, zlib.crc32(repr(numbers).encode())


def _stream(path: KeyPath, otherwise: str) -> str:
    return stream_of(path) or next((str(key) for key in path if not _is_rank(key)), otherwise)


def _listed(path: KeyPath, otherwise: Any) -> Any:
    """The rank that the first keys of a path name."""
    return next((key for key in path[:2] if _is_rank(key)), otherwise)


def _is_rank(key: Any) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.isdigit())


def _digests(leaf: Tensor | NumpyArray, copies: int | None) -> Iterable[tuple[Any, int]]:
    if isinstance(leaf, NumpyArray):
        return [(None, zlib.crc32(leaf.data))]
    with OpenFiles() as files:
        return [(shard.rank, zlib.crc32(_bytes_of(shard, files))) for shard in leaf.found[:copies]]


def _bytes_of(shard: Shard, files: OpenFiles) -> bytes:
    """The elements of a shard; without numpy where that can be, for its import takes longer than reading these few."""
    source = shard.source
    if source is not None and source.contiguous:
        with files.open(source.path) as file:
            return file.read(source.offset, shard.box.numel * ITEMSIZE[source.dtype])
    from ckptools.tensor_io.read import read_shard

    return read_shard(shard, files).tobytes()


def _runs(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Python's own states: long sequences of ints."""
    for path, node in nodes_in(tree, (list, tuple)):
        if len(node) > 100 and all(type(v) is int for v in node[:100]):
            yield path, node
