"""Checks of optimizers: their state against the model, the steps they count, the learning rates of their groups."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptools.checks.results import judged, skipped
from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.verification import Check
from ckptools.tensor_io.coverage import cover_problem
from ckptools.tensor_io.stream import shard_bytes
from ckptools.text import plural
from ckptools.training_state.consistency import optimizer_problems
from ckptools.training_state.learning_rates import learning_rates as compared_rates
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.sections import sections_of_kind

LOST = "the steps that the optimizer counts are in files that are not here, or damaged"
"""Why steps cannot be compared, although the optimizer counts them."""

MAX_RATES = 4
"""Learning rates that a line names."""


def state_covers_parameters(ck: Checkpoint) -> Check:
    """Whether every parameter has state and is in one param group, and its moments have its shape."""
    name = "optimizer covers params"
    optimizers = [o for o in optimizers_of(ck).values() if o.state]
    if not optimizers:
        return skipped(name, "no optimizer state")
    problems = list(optimizer_problems(ck))
    with_state = sum(len(o.state) for o in optimizers)
    grouped = sum(len({n for group in o.param_groups for n in group.names}) for o in optimizers)
    assumed = sum(len(o.naming.assumed) for o in optimizers)
    more = f"; {assumed} names are assumed by order" if assumed else ""
    return judged(name, problems, f"{with_state} of {max(grouped, with_state)} have state{more}")


def step_counters(ck: Checkpoint) -> Check:
    """Whether the optimizers count as many steps for each parameter as the training did."""
    name = "step counters"
    slots = _step_slots(ck)
    found = {key: step for key, slot in slots.items() if (step := _step(slot)) is not None}
    counted = {key: int(step) for key, step in found.items() if math.isfinite(step)}
    problems = [*_unlike_steps(ck, found, counted), *(p for p in ck.problems if p.kind is Code.STEPS_DISAGREE)]
    where = [*ck.step.sources, *([f"{plural(len(counted), 'optimizer step')}"] if counted else [])]
    if not problems and not counted:
        why = LOST if slots else "no optimizer counts steps"
        return skipped(name, "; ".join([why, *([f"{ck.step.value} in {', '.join(where)}"] if where else [])]))
    if not problems and ck.step.value is None:
        return skipped(name, f"{next(iter(counted.values()))} in {where[0]}; nothing else counts them")
    counter = ck.step.value if ck.step.value is not None else min(counted.values(), default=None)
    return judged(name, problems, f"{counter} in {', '.join(where)}" if where else "")


Steps = Mapping[tuple[str, Any], float]
"""What an optimizer of a name counts for a parameter."""


def _unlike_steps(ck: Checkpoint, found: Steps, counted: Mapping[tuple[str, Any], int]) -> Iterator[Problem]:
    """Counters that are no numbers, or differ: between parameters, from the step of the training."""
    not_numbers = [(fqn, step) for (name, fqn), step in found.items() if (name, fqn) not in counted]
    for fqn, step in not_numbers[:1]:
        text = f"the optimizer counts {step} steps (of {len(found)} parameters {len(not_numbers)} have no number)"
        yield Problem(Code.STEPS_DISAGREE, text, None, str(fqn))
    values = sorted(set(counted.values()))
    if len(values) > 1:
        few = min(values, key=list(counted.values()).count)
        who = next(str(fqn) for (_, fqn), step in counted.items() if step == few)
        text = f"the optimizer counts {len(values)} different steps, from {values[0]} to {values[-1]}; here {few}"
        yield Problem(Code.STEPS_DISAGREE, text, None, who)
    if len(values) == 1 and ck.step.value is not None and values[0] != ck.step.value:
        text = f"the optimizer counts {values[0]} steps, {ck.step.sources[0]} says {ck.step.value}"
        yield Problem(Code.STEPS_DISAGREE, text)


def _step_slots(ck: Checkpoint) -> dict[tuple[str, Any], Any]:
    """What stands for the number of steps of each parameter: a number, or a tensor with one."""
    states = [(o.name, fqn, slots) for o in optimizers_of(ck).values() for fqn, slots in o.state.items()]
    found = {(name, fqn): slots.get("step") for name, fqn, slots in states if isinstance(slots, Mapping)}
    one = {key: step for key, step in found.items() if isinstance(step, Tensor) and step.numel == 1}
    return one | {key: step for key, step in found.items() if type(step) is int}


def _step(slot: Any) -> float | None:
    """The number; None where its file is missing or damaged, as the check of the layout tells."""
    if not isinstance(slot, Tensor):
        return int(slot)
    with OpenFiles() as files:
        return _number(slot, files) if cover_problem(slot, "") is None else None


NUMBERS = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}
"""Dtypes of step counters, as `struct` has them."""


def _number(tensor: Tensor, files: OpenFiles) -> float:
    """The one element of a tensor, of one with copies the last; an integer where it is one."""
    code = NUMBERS.get(tensor.dtype)
    if code is not None:
        number = struct.unpack(code, shard_bytes(next(s for s in reversed(tensor.found) if s.box.numel), files))[0]
    else:
        from ckptools.tensor_io import read

        number = read.to_numpy(tensor).reshape(-1)[0]
    return int(number) if math.isfinite(number) else float(number)


def learning_rates(ck: Checkpoint) -> Check:
    """Whether the rates that a scheduler computed last are those in the param groups."""
    name, rates, problems = "lr: scheduler = groups", set[float](), []
    for section, pair in zip(sections_of_kind(ck, "scheduler"), compared_rates(ck), strict=True):
        rates.update(pair.scheduler if pair else ())
        if pair and not pair.agree:
            text = (
                f"its last learning rates are {_rates(pair.scheduler)}, those of the param groups {_rates(pair.groups)}"
            )
            problems.append(Problem(Code.LEARNING_RATES_DISAGREE, text, None, section.name))
    if not rates:
        return skipped(name, "no scheduler whose rates could be compared")
    return judged(name, problems, _rates(rates))


def _rates(rates: Iterable[float]) -> str:
    distinct = sorted(set(rates))
    return ", ".join(f"{rate:.4g}" for rate in distinct[:MAX_RATES]) + (", ..." if len(distinct) > MAX_RATES else "")
