"""The random number generators that a run draws from: Python's, NumPy's and torch's, on every rank its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

RandomState = dict[str, Any]


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
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


def find(tree: Any) -> RandomState:
    """Find one rank's states in nested dicts, lists and tuples, whatever their keys are: by what they look like."""
    kind = _kind_of(tree)
    if kind:
        return {kind: tree}
    found: RandomState = {}
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ():
        found = find(child) | found
    return found


def _kind_of(value: Any) -> str:
    """The generator that a value is a state of: `python`, `numpy`, `torch`, `cuda`; nothing for none.

    Python's is `(3, 624 numbers and a place, None or a number)`, NumPy's `("MT19937", 624 numbers, a place, ...)`,
    torch's uint8, 5056 on the CPU and 16 on a GPU.
    """
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], tuple) and len(value[1]) == 625:
        return "python"
    if isinstance(value, tuple) and len(value) == 5 and value[0] == "MT19937":
        return "numpy"
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
        return {5056: "torch", 16: "cuda"}.get(value.numel(), "")
    return ""


def first_of_shares(states: list[RandomState]) -> list[int]:
    """Say which ranks are the first of their share of the data, given the states of all.

    Ranks that hold pieces of one copy of the model see the same data, and draw the noise in it alike: from Python's and
    NumPy's generators. torch's may differ, as a stage of a pipeline drops features of its own blocks only.
    """
    of_noise = [{kind: value for kind, value in state.items() if kind in ("python", "numpy")} for state in states]
    prints = [fingerprint(noise or state) for noise, state in zip(of_noise, states, strict=True)]
    return [rank for rank, each in enumerate(prints) if prints.index(each) == rank]


def own(states: list[RandomState], share: int, shares: int, rank: int | None = None) -> RandomState | None:
    """Choose which of the saved states a rank goes on with: that of its share of the data; None for a new share.

    With `rank`, for ranks of a share that draw apart where as many saved: its own, if shares are as before.
    """
    first = first_of_shares(states)
    if rank is not None and len(first) == shares:
        return states[rank]
    return states[first[share]] if share < len(first) else None


def fingerprint(state: RandomState) -> str:
    """Make a text that two states share only where they are equal."""
    values = (value.tolist() if isinstance(value, torch.Tensor) else value for _, value in sorted(state.items()))
    return "".join(map(repr, values))


def restore(state: RandomState, device: torch.device) -> None:
    """Go on drawing where `capture` was; a generator that `state` does not have is left alone."""
    put: dict[str, Callable[[Any], Any]] = {
        "python": random.setstate,
        "numpy": np.random.set_state,
        "torch": torch.set_rng_state,
    }
    for kind in put.keys() & state.keys():
        put[kind](state[kind])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
