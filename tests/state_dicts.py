"""State dicts as `nn.Module.state_dict()` makes them, and their tensors bit by bit, to compare."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch


def state_dict(values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """`values` in their order, with the `_metadata` that a module whose parameters stand so gives its state dict."""
    modules: dict[str, Any] = {"": {"version": 1}}
    for name in values:
        path = name.split(".")[:-1]
        modules.update({".".join(path[: n + 1]): {"version": 1} for n in range(len(path))})
    made = OrderedDict(values)
    made._metadata = OrderedDict(modules)  # type: ignore[attr-defined]
    return made


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """All that two equal tensors share."""
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
