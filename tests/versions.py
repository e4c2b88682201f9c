"""What the torch that is here lacks, where tests need more than the oldest one that is promised."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptools

TORCH = f"torch {torch.__version__}"


def torch_with(name: str, inside: Any = torch) -> None:
    """Skip where torch, or a class of it, has no such name; the reason is one that `tests/conftest.py` lists."""
    if not hasattr(inside, name):
        pytest.skip(f"{TORCH} has no {name}")


def torch_that_trains(strategy: str) -> None:
    """Skip where torch cannot train so on a CPU: up to 2.6 FSDP2 asks for streams, which a CPU does not have."""
    if strategy in ("fsdp2", "hsdp", "fsdp2-tp", "hsdp-tp"):
        torch_with("record_event", torch.cpu.Stream)


def torch_that_loads(path: Path) -> None:
    """Skip where a file holds device meshes of a newer torch, which has a module of its own for their layout."""
    module = "torch.distributed._mesh_layout"
    if find_spec(module) is None and any(name.startswith(module) for name in ckptools.open(path).names):
        pytest.skip(f"{TORCH} has no _mesh_layout")
