"""The optimizer that a user's function makes beside a module: its groups by name, and the state that it will keep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptools.model.regions import Ints


@dataclass(frozen=True)
class OptimizerShapes:
    """An optimizer as it will expect its state.

    Attributes:
        name: its class.
        groups: of each param group the names of its parameters, in order.
        settings: of each param group the names of its hyperparameters.
        slots: shape of every slot by parameter, such as `exp_avg`; None where they are not known.
    """

    name: str
    groups: tuple[tuple[str, ...], ...] = field(repr=False)
    settings: tuple[frozenset[str], ...] = field(repr=False)
    slots: Mapping[str, Mapping[str, Ints]] | None = field(default=None, repr=False)


def optimizer_shapes(module: Any, optimizer: Any) -> OptimizerShapes:
    """Describe an optimizer of a module on torch's meta device; parameters of another module are called `?`."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = tuple(tuple(names.get(id(p), "?") for p in group["params"]) for group in optimizer.param_groups)
    settings = tuple(frozenset(str(key) for key in group if key != "params") for group in optimizer.param_groups)
    return OptimizerShapes(type(optimizer).__name__, groups, settings, _slots(optimizer, names))


def _slots(optimizer: Any, names: Mapping[int, str]) -> dict[str, dict[str, Ints]] | None:
    """The slots after one step, as torch's `_init_optim_state` makes them; None where the optimizer makes none so."""
    with contextlib.suppress(Exception), _gradients(optimizer):
        optimizer.step()
        found = {names.get(id(p), "?"): dict(_shapes(state)) for p, state in optimizer.state.items()}
        return found if all(found.values()) or not found else None
    return None


def _shapes(state: Mapping[str, Any]) -> Iterator[tuple[str, Ints]]:
    for slot, value in state.items():
        if value is not None:
            yield str(slot), tuple(getattr(value, "shape", ()))


@contextlib.contextmanager
def _gradients(optimizer: Any) -> Iterator[None]:
    """Gradients of zero, which have no memory on the meta device."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    yield
