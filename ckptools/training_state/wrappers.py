"""The names that FSDP, DDP, activation checkpointing and torch.compile put between a module and its parameters.

A wrapper is a module that holds one other, so its name is no part of a parameter's. DDP's is `module`, a name that
others use as well: it is taken for DDP's only at the front. FSDP1 also joins the parameters of a wrapped module into
`_flat_param`. Source: torch/distributed/fsdp/_common_utils.py (`FSDP_WRAPPED_MODULE`, `FLAT_PARAM`; `_fpw_module` and
`flat_param` up to torch 1.13), torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py,
torch/_dynamo/eval_frame.py, torch/nn/parallel/distributed.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_orig_mod")
FLAT_PARAMETERS = ("_flat_param", "flat_param")
DDP = "module."


def without_wrappers(name: str) -> str:
    """A name without the modules that only wrap another; DDP's `module` stays."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def without_ddp(name: str) -> str:
    """A name without the modules that only wrap another, DDP's leading `module` included."""
    return without_wrappers(name).removeprefix(DDP)


def ddp_prefix(names: Sequence[str]) -> str:
    """`module.` where every name of a model begins with it behind its wrappers, as in DDP's state dict; else empty."""
    return DDP if names and all(without_wrappers(name).startswith(DDP) for name in names) else ""


def is_flat_parameter(key: Any) -> bool:
    """Whether a key of a model is that of an FSDP1 flat parameter."""
    return str(key).rpartition(".")[2] in FLAT_PARAMETERS
