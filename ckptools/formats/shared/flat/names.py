"""How a flat parameter is recognised, which every rank file is asked."""

from __future__ import annotations

from typing import Any

from ckptools.model.tensor import Tensor

LEAVES = ("_flat_param", "flat_param")


def is_flat(key: Any) -> bool:
    """Whether a key of a model is a flat parameter's."""
    return str(key).rpartition(".")[2] in LEAVES


def is_ragged(tensor: Tensor) -> bool:
    """Whether ranks hold different lengths under one key, so that it cannot be one replicated value."""
    return len({s.box for s in tensor.shards}) > 1
