"""Half-precision weights and the optimizer's fp32 master copies of them: which of the two the model section holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptools.formats.options import Weights
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor

HALF = ("float16", "bfloat16")
MASTER = "fp32_param"
"""The slot of the optimizer's state that holds the master copy."""


@dataclass(frozen=True)
class ChosenWeights:
    """The weights that were asked for.

    Attributes:
        weights: the model's state dict.
        masters_whole: whether every half-precision weight has a master copy; true where there are none of them.
        masters_taken: whether the master copies are in `weights`.
        problems: a note on which copy it is, where there are two.
    """

    weights: dict[str, Any]
    masters_whole: bool = True
    masters_taken: bool = False
    problems: tuple[Problem, ...] = ()


def choose_weights(weights: Mapping[str, Any], masters: Mapping[str, Tensor], wanted: Weights) -> ChosenWeights:
    """The master copies where they are wanted and there is one of every half-precision weight; else the module's own.

    Args:
        weights: the module's own, by name.
        masters: the master copies, by name.
        wanted: `fp32` for the master copies, `module` for the module's own.
    """
    half = [name for name, value in weights.items() if isinstance(value, Tensor) and value.dtype in HALF]
    if not half:
        return ChosenWeights({**weights})
    whole = all(name in masters and not masters[name].note for name in half)
    taken = whole and wanted == "fp32"
    chosen = {name: masters.get(name, value) if taken else value for name, value in weights.items()}
    return ChosenWeights(chosen, whole, taken, (_note(wanted, whole, len(half)),))


def _note(wanted: Weights, whole: bool, count: int) -> Problem:
    if not whole:
        text = f"{count} half-precision weights have no fp32 master copy here that is sure; the module's own are taken"
    elif wanted == "module":
        text = f"{count} half-precision weights as the module had them; --weights fp32 takes the master copies"
    else:
        text = f"{count} half-precision weights in their fp32 master copies; --weights module takes the module's own"
    return Problem(Code.KEPT_AS_SAVED, text)


def masters_of(tree: Any) -> dict[str, Tensor]:
    """The joined master copies in a merged optimizer, by parameter."""
    found: dict[str, Tensor] = {}
    for one in tree if isinstance(tree, list) else [tree]:
        inner = one.get("optimizer", one) if isinstance(one, Mapping) else {}
        state = inner.get("state", {}) if isinstance(inner, Mapping) else {}
        for fqn, slots in state.items():
            master = slots.get(MASTER) if isinstance(slots, Mapping) else None
            if isinstance(master, Tensor):
                found[fqn] = master
    return found
