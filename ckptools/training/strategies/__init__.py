"""The ways to spread a model over ranks, a file for each kind. None of them knows a layout."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ckptools.training.strategies import expert_parallel, fsdp, pipeline, tensor_parallel
from ckptools.training.strategies.strategy import DDP, Strategy
from ckptools.training_state.parameter_names import without_ddp

BY_NAME: dict[str, Strategy] = {
    "ddp": DDP,
    "fsdp1": fsdp.FSDP1,
    "fsdp2": fsdp.FSDP2,
    "hsdp": fsdp.HSDP,
    "tp": tensor_parallel.TP,
    "fsdp2-tp": tensor_parallel.FSDP2_TP,
    "hsdp-tp": tensor_parallel.HSDP_TP,
    "pipeline": pipeline.STRATEGY,
    "moe": expert_parallel.STRATEGY,
}


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the wrapped model's parameters under the fqns that they had before."""
    for name, param in model.named_parameters():
        yield without_ddp(name), param
