"""Checks of the training state: the optimizer against the model, its steps, learning rates, and random generators."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptools.files.opening import OpenFiles
from ckptools.keys.random_states import ByRank, Owner, random_states
from ckptools.keys.value_digests import NUMBERS
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem
from ckptools.model.problems import Code, Problem
from ckptools.model.records import grouped
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.tensor_io.stream import shard_bytes
from ckptools.text import first_few, plural
from ckptools.training_state.judgement import is_lbfgs, optimizer_problems
from ckptools.training_state.optimizers import nested, optimizers_of
from ckptools.training_state.sections import sections_of_kind
from ckptools.training_state.steps import WHY_OUT_OF_STEP, SchedulerCount, scheduler_counts
from ckptools.training_state.steps import learning_rates as compared_rates
from ckptools.verify.record import Check, judged, not_judged

LOST_STATE = "the state of the others may be in files that are not here, or damaged"
"""Reason why not every parameter's state is compared with the parameter."""

OTHER_RATES = "the others list no rates, or others than there are param groups"
"""Reason why not every scheduler's rates are compared with those of the param groups."""

LOST = "the steps that the optimizer counts are in files that are not here, or damaged"
"""Reason why steps cannot be compared, although the optimizer counts them."""

MAX_RATES = 4
"""At most this many learning rates in a line."""

MAY = "; only ranks that share one copy of the model should"
"""Files may not show whether they do: in a DCP folder a tensor-parallel matrix looks like one sharded by FSDP."""


def state_covers_parameters(ck: Checkpoint) -> Check:
    """Whether every parameter has state and is in one param group, and its moments have its shape."""
    name = "optimizer covers params"
    problems = list(optimizer_problems(ck))
    optimizers = [o for o in optimizers_of(ck).values() if o.state]
    if not optimizers and not problems:
        return not_judged(name, "no optimizer state")
    with_state = sum(len(o.state) for o in optimizers)
    grouped = sum(len({n for group in o.param_groups for n in group.names}) for o in optimizers)
    assumed = sum(len(o.naming.assumed) for o in optimizers)
    more = f"; {assumed} names are assumed by order" if assumed else ""
    known = max(grouped, with_state)
    # A parameter without state is a problem, unless its state may be in a file that is not here.
    looked_at = known if any(p.kind is Code.NO_OPTIMIZER_STATE for p in problems) else with_state
    lone = [o for o in optimizers if is_lbfgs(o.state)]
    detail = f"{with_state} of {known} have state{more}"
    if lone:
        detail, looked_at = f"{detail}; LBFGS keeps all of it under its first parameter", known
    return judged(name, problems, detail, looked_at=looked_at, of=known, rest=LOST_STATE)


def step_counters(ck: Checkpoint) -> Check:
    """Whether the training, the optimizers for each parameter, and the schedulers count the same steps."""
    name = "step counters"
    slots = _step_slots(ck)
    found = {key: step for key, slot in slots.items() if (step := counted_steps(slot)) is not None}
    counted = {key: int(step) for key, step in found.items() if math.isfinite(step)}
    trained = [source for source in ck.step.sources if ".last_epoch" not in source]
    steps = {*counted.values(), *([ck.step.value] if trained else [])}
    schedulers = scheduler_counts(ck, steps)
    problems = [*_unlike_steps(ck, found, counted, trained), *_out_of_step(ck, schedulers, counted, trained)]
    problems += [p for p in ck.problems if p.kind is Code.STEPS_DISAGREE]
    in_step = [one for one in schedulers if one.in_step is not None]
    where = [*trained, *([f"{plural(len(counted), 'optimizer step')}"] if counted else [])]
    where += [one.name if one.value in steps else one.words for one in in_step]
    unsure = [f"{one.words}: {WHY_OUT_OF_STEP}" for one in schedulers if one.in_step is None]
    counter = ck.step.value if trained else min(counted.values(), default=None)
    detail = f"{counter} in {', '.join(where)}" if where else ""
    if not problems and (bool(trained) + bool(counted) + bool(in_step) < 2):
        why = LOST if slots and not counted else "no optimizer counts steps" if not counted else ""
        alone = "" if len(where) != 1 else "nothing else counts them"
        return not_judged(name, "; ".join(filter(None, [why, detail, alone, *unsure])), len(slots) + len(schedulers))
    looked_at, of = len(counted) + len(in_step), len(slots) + len(schedulers)
    rest = [LOST] if len(counted) < len(slots) else []
    return judged(name, problems, detail, looked_at=looked_at, of=of, rest="; ".join([*rest, *unsure]))


Steps = Mapping[tuple[str, Any], float]
"""The steps that an optimizer counts for a parameter, by the names of both."""


def _out_of_step(
    ck: Checkpoint, schedulers: Iterable[SchedulerCount], counted: Mapping[tuple[str, Any], int], trained: Sequence[str]
) -> Iterator[Problem]:
    """Schedulers whose count no other counter explains."""
    others = [f"{trained[-1]} {ck.step.value}"] if trained else []
    others += [f"the optimizer's steps {first_few(sorted(set(counted.values())))}"] if counted else []
    for one in schedulers:
        if one.in_step is False:
            text = f"{one.words} beside {', '.join(others)}: {WHY_OUT_OF_STEP}"
            yield Problem(Code.STEPS_DISAGREE, text)


def _unlike_steps(
    ck: Checkpoint, found: Steps, counted: Mapping[tuple[str, Any], int], trained: Sequence[str]
) -> Iterator[Problem]:
    """Counters that are no numbers, or differ between parameters or from the step of the training."""
    not_numbers = [(fqn, step) for (name, fqn), step in found.items() if (name, fqn) not in counted]
    for fqn, step in not_numbers[:1]:
        text = f"the optimizer counts {step} steps (of {len(found)} parameters {len(not_numbers)} have no number)"
        yield Problem(Code.STEPS_DISAGREE, text, None, str(fqn))
    values = set[int]()
    for name in dict.fromkeys(name for name, _ in counted):
        own = {fqn: step for (optimizer, fqn), step in counted.items() if optimizer == name}
        different = sorted(set(own.values()))
        values |= set(different)
        if len(different) > 1:
            few = min(different, key=list(own.values()).count)
            who = next(str(fqn) for fqn, step in own.items() if step == few)
            text = f"the optimizer counts {len(different)} different steps, from {different[0]} to {different[-1]}"
            yield Problem(Code.STEPS_DISAGREE, f"{text}; here {few}", None, who)
    several = len({name for name, _ in counted}) > 1
    # Optimizers that take turns count their own steps, and a trainer may count those of all.
    known = {*values, sum(values)} if several else values
    if trained and values and ck.step.value not in known and (several or len(values) == 1):
        who = "optimizers count" if several else "optimizer counts"
        text = f"the {who} {first_few(sorted(values))} steps, {trained[0]} says {ck.step.value}"
        yield Problem(Code.STEPS_DISAGREE, text)


def _step_slots(ck: Checkpoint) -> dict[tuple[str, Any], Any]:
    """The step counter of each parameter: a number, or a tensor with one."""
    states = [(name, fqn, slots) for name, o in optimizers_of(ck).items() for fqn, slots in o.state.items()]
    found = {(name, fqn): slots.get("step") for name, fqn, slots in states if isinstance(slots, Mapping)}
    one = {key: step for key, step in found.items() if isinstance(step, Tensor) and step.numel == 1}
    return one | {key: step for key, step in found.items() if type(step) is int}


def step_counter(ck: Checkpoint) -> Any:
    """The counter of the first parameter whose steps an optimizer counts: a number, or a tensor with one; else None."""
    for section in sections_of_kind(ck, "optimizer"):
        state = nested(section.value).get("state")
        for slots in state.values() if isinstance(state, Mapping) else ():
            step = slots.get("step") if isinstance(slots, Mapping) else None
            if type(step) is int or (isinstance(step, Tensor) and step.numel == 1):
                return step
    return None


def counted_steps(slot: Any) -> float | None:
    """The number in a step counter, an integer if it is finite; None if its file is missing or damaged."""
    if not isinstance(slot, Tensor):
        return int(slot)
    if cover_problem(slot, "") is not None:
        return None
    code = NUMBERS.get(slot.dtype)
    if code is not None:
        last = next(shard for shard in reversed(slot.shards) if shard.was_read and shard.box.numel)
        with OpenFiles() as files:
            number = struct.unpack(code, shard_bytes(last, files))[0]
    else:
        from ckptools.tensor_io import read

        number = read.to_numpy(slot).reshape(-1)[0]
    return int(number) if math.isfinite(number) else float(number)


def learning_rates(ck: Checkpoint) -> Check:
    """Whether the last rates of a scheduler are those in the param groups."""
    name, rates, problems = "lr: scheduler = groups", set[float](), []
    schedulers, compared = sections_of_kind(ck, "scheduler"), 0
    for section, pair in zip(schedulers, compared_rates(ck), strict=True):
        compared += pair is not None
        rates.update(pair.scheduler if pair else ())
        if pair and not pair.agree:
            theirs = _rates(pair.groups)
            text = f"its last learning rates are {_rates(pair.scheduler)}, those of the param groups {theirs}"
            problems.append(Problem(Code.LEARNING_RATES_DISAGREE, text, None, section.name))
    if not rates:
        return not_judged(name, "no scheduler whose rates could be compared")
    return judged(name, problems, _rates(rates), looked_at=compared, of=len(schedulers), rest=OTHER_RATES)


def _rates(rates: Iterable[float]) -> str:
    distinct = sorted(set(rates))
    return ", ".join(f"{rate:.4g}" for rate in distinct[:MAX_RATES]) + (", ..." if len(distinct) > MAX_RATES else "")


Prints = Mapping[Owner, str]
"""Fingerprint of a generator's state by rank."""


def distinct_states(ck: Checkpoint) -> Check:
    """Whether every rank has a state of its own for each generator."""
    with OpenFiles() as files:
        states = random_states(ck, files)
    shared = {stream: by_rank for stream, by_rank in states.items() if len(by_rank) > 1}
    unread = list(_unreadable(states))
    if not shared and not unread:
        return not_judged("rng", "no RNG state" if not states else "RNG state of one rank", len(states))
    prints = {s: {rank: c.fingerprint for rank, c in by_rank.items() if not c.problem} for s, by_rank in shared.items()}
    counts = ", ".join(f"{stream} {len(set(p.values()))} distinct of {len(p)}" for stream, p in prints.items())
    # Ranks of one grid share one copy of the model, and may draw the same numbers.
    ranked = {s: by_rank for s, by_rank in prints.items() if not any(isinstance(owner, str) for owner in by_rank)}
    problems = [*_equal_for_all(ranked), *_equal_for_some(ranked)]
    if problems and _share_a_model(ck):
        problems, counts = [], f"{counts}; ranks that share one copy of the model may draw alike"
    lost = len({f.rank for f in ck.files if not f.is_here and f.rank is not None}) * len(ranked)
    of, looked_at = sum(map(len, states.values())) + lost, sum(map(len, prints.values()))
    rest = "the others are in files that are not here, or damaged" if lost else "the others are of one rank"
    return judged("rng", [*unread, *problems], counts, looked_at=looked_at, of=of, rest=rest)


def _unreadable(states: Mapping[str, ByRank]) -> Iterator[Problem]:
    for stream, by_rank in states.items():
        for owner, content in by_rank.items():
            rank = owner if isinstance(owner, int) else None
            if content.problem:
                yield Problem(Code.VALUE_LOST, f"its {stream} state cannot be read: {content.problem}", rank)


def _equal_for_all(states: Mapping[str, Prints]) -> Iterator[Problem]:
    """Generators whose state all ranks share: one problem, as one copied file or one seed is behind all of them."""
    streams: dict[int, dict[str, str]] = {}
    for stream, prints in states.items():
        if len(prints) > 1 and len(set(prints.values())) == 1:
            streams.setdefault(len(prints), {})[stream] = next(iter(prints.values()))
    for ranks, same in streams.items():
        s = "s" if len(same) > 1 else ""
        which = f"{', '.join(same)} state{s}, fingerprint{s} {', '.join(same.values())}"
        yield Problem(Code.RNG_STATES_EQUAL, f"all {ranks} ranks have the same {which}{MAY}")


def _share_a_model(ck: Checkpoint) -> bool:
    """Whether all ranks work on one copy of the model, and so on the same data.

    Stages of a pipeline do, and so does a mesh of one dimension with a replicated parameter: FSDP shards every
    parameter, while tensor parallelism leaves biases whole.
    """
    model = (t for s in sections_of_kind(ck, "model") for _, t in tensors_in(s.value))
    return ck.in_parts or any(t.placements == ("Replicate()",) and t.mesh == (ck.world_size.value,) for t in model)


def _equal_for_some(states: Mapping[str, Prints]) -> Iterator[Problem]:
    """Ranks that share a state while others have their own.

    Groups of equal size, such as the data-parallel copies of each tensor-parallel rank, may share one.
    """
    streams: dict[tuple[Any, ...], list[str]] = {}
    for stream, prints in states.items():
        groups = grouped(prints, prints.__getitem__)
        if len({len(ranks) for ranks in groups.values()}) > 1:
            for fingerprint, members in groups.items():
                if len(members) > 1:
                    streams.setdefault(tuple(members), []).append(f"{stream} state ({fingerprint})")
    for ranks, same in streams.items():
        text = f"ranks {first_few(ranks)} have the same {', '.join(same)}, other ranks have their own"
        why = f"{text}; a file may have been copied, or restored on the wrong rank"
        yield Problem(Code.RNG_STATES_EQUAL, why, ranks=ranks)
