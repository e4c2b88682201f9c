"""Rules on optimizer state, param groups, and a checkpoint's training steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Lost, scalar
from ckptools.text import fqn_of, plural
from ckptools.training_state.models import models_of, trained_model
from ckptools.training_state.optimizers import Optimizer, ParamGroup, name_before, optimizers_of
from ckptools.training_state.role_words import APART
from ckptools.training_state.steps import RANKS_DIFFER, contradiction

ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "acc_delta")
"""State tensors that have the parameter's shape, in every optimizer that uses the name."""


def optimizer_problems(ck: Checkpoint) -> Iterator[Problem]:
    """Find parameters without state or in two groups, and state of another shape or of an uncertain parameter.

    If a file is lost, or ranks list different parameters, missing state proves nothing.
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
    """Find contradicting steps: between the name and a counter, or between two ranks."""
    if RANKS_DIFFER in ck.step.sources:
        if not any(p.kind is Code.MIXED_SAVES for p in ck.problems):
            yield Problem(Code.STEPS_DISAGREE, contradiction(ck.step))
    elif not ck.step.agree:
        yield Problem(Code.NAME_CONTRADICTS, contradiction(ck.step))


STATEFUL = ("betas", "beta1", "beta2", "rho", "etas", "lambd", "history_size", "lr_decay", "beta2_decay", "decay_rate")
"""Hyperparameters of optimizers that keep state for each parameter from their first step on.

Sources: torch/optim: adam.py, adadelta.py, rprop.py, asgd.py, lbfgs.py, adagrad.py, _adafactor.py;
transformers/optimization.py (`Adafactor`). SGD and RMSprop have other hyperparameters.
"""


def _keeps_state(group: ParamGroup) -> bool:
    """Whether an optimizer with these hyperparameters keeps state: SGD without momentum does not."""
    if any(name in group for name in STATEFUL) or ("alpha" in group and "centered" in group):
        return True
    momentum = scalar(group.get("momentum"))
    return isinstance(momentum, (int, float)) and momentum != 0


def _parameters(ck: Checkpoint) -> dict[str, Any]:
    """The values of the trained model, and of the models that have optimizers of their own, as optimizers name them."""
    trained = trained_model(ck)
    models = [one.section for one in models_of(ck) if one.role in APART] + ([trained] if trained is not None else [])
    return {name_before(model, ck) + str(name): value for model in models for name, value in model.value.items()}


def _grouped(ck: Checkpoint, optimizer: Optimizer) -> Iterator[Problem]:
    groups = [n for group in optimizer.param_groups for n in group.names]
    if not groups or any(isinstance(group.values_.get("params"), Lost) for group in optimizer.param_groups):
        return
    keys = {k if isinstance(k, str) else f"?{k}" for k in optimizer.state}
    twice = sorted({n for n in groups if groups.count(n) > 1}) if len(set(groups)) < len(groups) else []
    model = _parameters(ck)
    for fqn in twice:
        parameter = model.get(fqn)
        if isinstance(parameter, Tensor) and not parameter.numel:
            continue  # DeepSpeed's groups are found by runs of elements, and an empty parameter has none
        yield Problem(Code.PARAM_GROUPS, "is in two param groups", None, fqn)
    for fqn in sorted(keys - set(groups)):
        yield Problem(Code.PARAM_GROUPS, "has optimizer state and is in no param group", None, fqn)
    for fqn in dict.fromkeys(n for n in groups if n not in keys) if not is_lbfgs(optimizer.state) else ():
        yield Problem(
            Code.NO_OPTIMIZER_STATE, "is in a param group and has no state: frozen, or never had a gradient", None, fqn
        )


def is_lbfgs(state: Mapping[Any, Any]) -> bool:
    """Whether the state is of LBFGS, which keeps all of its state under its first parameter.

    Source: torch/optim/lbfgs.py, `step`: `state = self.state[self._params[0]]`.
    """
    slots = next(iter(state.values())) if len(state) == 1 else None
    return isinstance(slots, Mapping) and {"func_evals", "n_iter"} <= slots.keys()


def _shaped(ck: Checkpoint, optimizer: Optimizer) -> Iterator[Problem]:
    model = _parameters(ck)
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
    """Whether a moment has the shape of a gradient projected to the group's `rank`, as GaLore and APOLLO keep it.

    Source: galore_torch/adamw.py, galore_projector.py (`project`): one dimension of the gradient becomes the rank, or
    both (`proj_type="full"`).
    """
    sizes = zip(moment.shape, parameter.shape, strict=False)
    return len(moment.shape) == len(parameter.shape) and all(own in (whole, rank) for own, whole in sizes)
