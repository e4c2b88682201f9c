"""Recognise the saved states of random generators: whose they are, and whether they are those of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath
from ckptools.model.values import NumpyArray

STREAMS = {
    "torch": "torch", "cpu": "torch", "cuda": "cuda", "numpy": "numpy", "python": "python", "random": "python",
    "random_state": "python", "numpy_random_seed": "numpy",
    "torch_manual_seed": "torch", "torch_cuda_manual_seed": "cuda",
    "random_rng_state": "python", "np_rng_state": "numpy", "torch_rng_state": "torch", "cuda_rng_state": "cuda",
}  # fmt: skip
"""Generators by the keys of their states; `..._seed` are Accelerate's, `..._rng_state` Megatron's and many others'."""


def stream_of(path: KeyPath) -> str:
    """Which generator a piece of RNG state is of: the first known word on its path; empty where none is."""
    return next((STREAMS[str(key).lower()] for key in path if str(key).lower() in STREAMS), "")


def generator_of(node: Any) -> str:
    """Recognise the state of a generator by its form: `python`, `numpy`, or "" for any other value.

    Sources: CPython's Lib/random.py `getstate`; numpy/random/mtrand.pyx `get_state`, as a tuple and as a dict.
    """
    if isinstance(node, (list, tuple)) and len(node) == 3:
        first = type(node[0]) is int and (node[2] is None or isinstance(node[2], float))
        return "python" if first and twister_of(node[1]) == "python" else ""
    if isinstance(node, (list, tuple)) and len(node) == 5:
        return "numpy" if isinstance(node[0], str) and twister_of(node[1]) == "numpy" else ""
    if isinstance(node, Mapping) and isinstance(node.get("state"), Mapping):
        return "numpy" if isinstance(node.get("bit_generator"), str) else ""
    return ""


TWISTERS = {625: "python", 624: "numpy"}
"""Numbers of a Mersenne Twister, whose state has 624; Python's own has the place among them as one more."""


def twister_of(value: Any) -> str:
    """Recognise a Mersenne Twister by the form of its numbers: `python`, `numpy`, or "" for any other value."""
    if isinstance(value, (NumpyArray, Tensor)):
        return TWISTERS.get(value.shape[0], "") if len(value.shape) == 1 and value.dtype in INTEGERS else ""
    ints = isinstance(value, (list, tuple)) and all(type(v) is int for v in value[:8])
    return TWISTERS.get(len(value), "") if ints else ""


INTEGERS = ("<u4", "uint32", "<i8", "int64", "<u8", "uint64")
"""Dtypes, as numpy and as torch call them, in which such numbers are saved."""


def is_gathered(states: Any) -> bool:
    """Whether RNG states are a list of every rank's, as Composer gathers them, and not one of a rank's devices."""
    return isinstance(states, (list, tuple)) and len(states) > 1 and all(isinstance(s, Mapping) for s in states)
