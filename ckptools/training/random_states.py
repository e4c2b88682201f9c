"""The random number generators that a run draws from: Python's, NumPy's and torch's, on every rank its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

RandomState = dict[str, Any]


def seed_all(seed: int) -> None:
    """Seed every generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture(device: torch.device) -> RandomState:
    """Take the state of this rank's generators: `{"python": tuple, "numpy": tuple, "torch": uint8 (5056,)}`.

    On a GPU also `cuda`, the state of that device.
    """
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def gather(device: torch.device) -> list[RandomState]:
    """Collect the states of every rank and its device on every rank, in the order of the ranks; a collective."""
    everyone: list[RandomState] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, capture(device))
    return everyone


def restore(state: RandomState, device: torch.device) -> None:
    """Go on drawing where `capture` was; a generator that `state` does not have is left alone."""
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
