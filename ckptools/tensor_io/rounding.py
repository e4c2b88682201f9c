"""Do fp32 copies of weights round to the half-precision weights beside them? It proves a layout that was found.

An optimizer that keeps fp32 copies rounds them into the model's weights after each step, to the nearest even value.
Some elements of each piece are compared: enough to tell one parameter from another.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from ckptools.errors import NotWholeError, ReadError
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.tensor import Rounded

SAMPLE = 4096
"""Elements of each piece that are compared, or a row of it where that is longer."""


def mismatch(pair: Rounded) -> Problem | None:
    """What is wrong with one pair; None when nothing is.

    Raises:
        NotWholeError, ReadError: nothing that could be compared is, and some of it is in no file that can be read.
    """
    from ckptools.tensor_io import read  # brings numpy, and few checkpoints have pairs

    unread = None
    for box in sorted({s.box for s in pair.weight.shards}, key=lambda box: box.offsets):
        try:
            sample = _first_rows(box)
            same = _same(read.read_box(pair.copy, sample), read.read_box(pair.weight, sample), pair.weight.dtype)
        except (NotWholeError, ReadError) as error:
            unread = error
            continue
        if not same:
            text = (
                f"{sample}: its fp32 copy does not round to the {pair.weight.dtype} weight, so the layout that was "
                "found is not the one that was saved, or one of both is damaged; --only model --weights module writes "
                "the model"
            )
            return Problem(Code.COPIES_DIFFER, text, None, pair.fqn)
    if unread is not None:
        raise unread
    return None


def compare(pairs: Iterable[Rounded]) -> tuple[list[Problem], int]:
    """What is wrong with pairs, and how many of them were compared in full."""
    problems: list[Problem] = []
    compared = 0
    for pair in pairs:
        try:
            problem = mismatch(pair)
        except (NotWholeError, ReadError):
            # What is missing or cannot be read is told by others.
            continue
        problems += [problem] if problem else []
        compared += 1
    return problems, compared


def _first_rows(box: Box) -> Box:
    if not box.sizes:
        return box
    rows = max(1, SAMPLE // max(prod(box.sizes[1:]), 1))
    return Box(box.offsets, (min(rows, box.sizes[0]), *box.sizes[1:]))


def _same(copy: Any, weight: Any, dtype: str) -> bool:
    """Whether fp32 elements round to those of a weight; NaN is NaN whatever its bits."""
    import numpy as np

    values = copy.view("<f4")
    if dtype == "float16":
        with np.errstate(over="ignore"):
            rounded, nan = values.astype("<f2").view("<u2"), np.isnan(weight.view("<f2"))
    else:
        bits = copy.view("<u4").astype("<u8")
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        nan = (weight.view("<u2") & 0x7FFF) > 0x7F80
    return bool(np.all((rounded == weight.view("<u2")) | (np.isnan(values) & nan)))
