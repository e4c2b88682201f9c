"""Modules that wrap one other and are no part of a parameter's name.

Source: torch/distributed/fsdp/_common_utils.py (`FSDP_WRAPPED_MODULE`; `_fpw_module` up to torch 1.13),
torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py, torch/_dynamo/eval_frame.py. DDP's `module` is a name
that others use as well, so it is not one of them.
"""

from __future__ import annotations

WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_orig_mod")


def without_wrappers(name: str) -> str:
    """A name without the modules that only wrap another."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
