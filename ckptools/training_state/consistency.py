"""What a training saved beside its model, held against it: optimizer state, param groups, step counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import fqn_of
from ckptools.model.values import Lost
from ckptools.training_state.optimizers import Optimizer, optimizers_of
from ckptools.training_state.sections import model_of
from ckptools.training_state.steps import RANKS_DIFFER, contradiction

ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "acc_delta")
"""Slots that have one number for each number of the parameter, in every optimizer that uses the name."""


def optimizer_problems(ck: Checkpoint) -> Iterator[Problem]:
    """Parameters without state or in two groups, state of other shapes, and state that has no sure name.

    Where a file is lost, or ranks list other parameters, what is not there tells nothing.
    """
    lost = any(p.severity == "error" and p.kind.lacks in ("file", "part") for p in ck.problems)
    unlike = any(p.kind is Code.COPIES_DIFFER and p.tensor and ".param_groups." in p.tensor for p in ck.problems)
    for optimizer in optimizers_of(ck).values():
        if optimizer.state:
            yield from () if lost or unlike else _grouped(ck, optimizer)
            yield from _shaped(ck, optimizer)
            yield from _unnamed(optimizer)


def step_problems(ck: Checkpoint) -> Iterator[Problem]:
    """That what tells the step, such as the name and a counter, or two ranks, does not tell the same."""
    if RANKS_DIFFER in ck.step.sources:
        if not any(p.kind is Code.MIXED_SAVES for p in ck.problems):
            yield Problem(Code.STEPS_DISAGREE, contradiction(ck.step))
    elif not ck.step.agree:
        yield Problem(Code.NAME_CONTRADICTS, contradiction(ck.step))


def _unnamed(optimizer: Optimizer) -> Iterator[Problem]:
    """States that belong to nobody knows which parameter, so that nothing can be compared."""
    if optimizer.naming.unnamed:
        text = f"{optimizer.naming.note}; what has no name is not compared with its parameter"
        yield Problem(Code.OPTIMIZER_STATE_UNNAMED, text, None, fqn_of(optimizer.path))


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
            continue  # DeepSpeed's groups are told by runs of elements, and it has none
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
            comparable = isinstance(moment, Tensor) and not moment.note and not parameter.note
            if comparable and slot in ELEMENTWISE and moment.shape != parameter.shape:
                text = f"{slot} has shape {list(moment.shape)}, its parameter {list(parameter.shape)}"
                yield Problem(Code.OPTIMIZER_STATE_SHAPE, text, None, fqn)
