"""Learning rates: what a scheduler computed last, beside what the param groups have that it drives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.values import scalar
from ckptools.training_state.optimizers import nested, optimizers_of
from ckptools.training_state.sections import sections_of_kind


class LearningRates(NamedTuple):
    """The rates of one scheduler and of its optimizer, one for each param group.

    Attributes:
        scheduler: those that the scheduler computed last, its `_last_lr`.
        groups: the `lr` of each param group.
    """

    scheduler: tuple[float, ...]
    groups: tuple[float, ...]

    @property
    def agree(self) -> bool:
        """Whether both are the same."""
        return self.scheduler == self.groups


def learning_rates(ck: Checkpoint) -> list[LearningRates | None]:
    """The rates of each scheduler, in the order of the sections; None where nothing can be compared."""
    schedulers, optimizers = sections_of_kind(ck, "scheduler"), list(optimizers_of(ck).values())
    # With several schedulers nothing tells which optimizer each one drives.
    if not len(schedulers) == len(optimizers) == 1:
        return [None] * len(schedulers)
    return [_compared(schedulers[0].value, [group.get("lr") for group in optimizers[0].param_groups])]


def group_rates(ck: Checkpoint) -> tuple[float, ...]:
    """The `lr` of each param group of each optimizer, in the order of the file; none where one of them tells none."""
    groups = [nested(s.value).get("param_groups", ()) for s in sections_of_kind(ck, "optimizer")]
    listed = [one for of in groups if isinstance(of, (list, tuple)) for one in of]
    rates = _rates([group.get("lr") for group in listed if isinstance(group, Mapping)])
    return rates if len(rates) == len(listed) else ()


def _compared(state: Any, groups: Sequence[Any]) -> LearningRates | None:
    last = state.get("_last_lr") if isinstance(state, Mapping) else None
    if not isinstance(last, (list, tuple)):
        return None
    told, known = _rates(last), _rates(groups)
    return LearningRates(told, known) if len(told) == len(known) == len(last) == len(groups) else None


def _rates(values: Sequence[Any]) -> tuple[float, ...]:
    """The values that are rates: floats, and integers that a float can hold."""
    found = map(scalar, values)
    return tuple(float(v) for v in found if isinstance(v, float) or (isinstance(v, int) and abs(v) < 1 << 64))
