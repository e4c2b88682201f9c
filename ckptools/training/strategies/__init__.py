"""One file per way to spread a model over ranks; each provides what `Strategy` lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import nn, optim

from ckptools.training.strategies import ddp, fsdp1, fsdp2
from ckptools.training_state.wrappers import without_ddp

StateDict = dict[str, Any]


class Strategy(Protocol):
    """What every module in this folder provides."""

    def wrap(self, model: nn.Module, as_dtensor: bool = False) -> nn.Module:
        """Spread the model; `as_dtensor` asks for DTensor in the state dict where there is a choice."""

    def model_state(self, model: nn.Module) -> StateDict:
        """State of the model as this rank saves it, under plain fqns. A collective: every rank must call it."""

    def optimizer_state(self, model: nn.Module, optimizer: optim.Optimizer) -> StateDict:
        """State of the optimizer as this rank saves it. A collective: every rank must call it."""


BY_NAME: dict[str, Strategy] = {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2}


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the wrapped model's parameters under the fqns that they had before."""
    for name, param in model.named_parameters():
        yield without_ddp(name), param
