"""Arrays of elements held against each other: differences counted by bits, and measured in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptools.checks.difference.measures import Measures, Tolerance
from ckptools.model.regions import Box
from ckptools.tensor_io.numbers import as_numbers, is_number, parts_of

Raw = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

BLOCK = 1 << 15
"""Numbers that are computed with at once: more would not stay in the processor's cache."""


def measure(a: Raw, b: Raw, dtypes: Sequence[str], box: Box, tolerance: Tolerance | None) -> Measures:
    """Compare the elements of one region.

    Args:
        a: raw elements of A, of the region's shape and contiguous.
        b: those of B.
        dtypes: torch's names of their dtypes.
        box: the region.
        tolerance: how far values may be apart; None where nobody asked.
    """
    found = Measures(compared=box.numel)
    if not (is_number(dtypes[0]) and is_number(dtypes[1])):
        _by_bits(a, b, dtypes, box, found)
        return found
    pair = [raw.reshape(-1) for raw in (a, b)]
    scratch = _scratch()
    for low in range(0, box.numel, BLOCK):
        left, right = (raw[low : low + BLOCK] for raw in pair)
        _block(left, right, dtypes, low, box, tolerance, found, scratch)
    return found


_OF_THREAD = local()


def _scratch() -> Floats:
    """Room for both sides of a block and their difference, once for each thread: to get it anew costs as much time."""
    if not hasattr(_OF_THREAD, "scratch"):
        _OF_THREAD.scratch = np.empty((3, 2 * BLOCK))
    room: Floats = _OF_THREAD.scratch
    return room


def _by_bits(a: Raw, b: Raw, dtypes: Sequence[str], box: Box, found: Measures) -> None:
    """Elements that are no numbers each for itself are the same or they are not."""
    unlike = np.flatnonzero(a.reshape(-1) != b.reshape(-1)) if a.dtype == b.dtype else np.arange(box.numel)
    found.differing = found.outside = len(unlike)
    if len(unlike):
        found.first = box.index_of(int(unlike[0]))
        found.values = f"0x{int(a.reshape(-1)[unlike[0]]):x}", f"0x{int(b.reshape(-1)[unlike[0]]):x}"


def _block(
    a: Raw,
    b: Raw,
    dtypes: Sequence[str],
    low: int,
    box: Box,
    tolerance: Tolerance | None,
    found: Measures,
    scratch: Floats,
) -> None:
    """Compare the elements from `low` on; `scratch` has room for both as float64, and for their difference."""
    x, y = (as_numbers(raw, dtype) for raw, dtype in zip((a, b), dtypes, strict=True))
    unlike = _unlike(a, b, x, y, dtypes)
    count = int(np.count_nonzero(unlike))
    xs = _as_floats(x, scratch[0])
    if not count:
        _equal(xs, parts_of(dtypes[0]), found)
        return
    found.differing += count
    if found.first is None:
        at = int(unlike.argmax())
        found.first, found.values = box.index_of(low + at), (_digits(x, at, dtypes[0]), _digits(y, at, dtypes[1]))
    xs, ys = _of_one_length(xs, _as_floats(y, scratch[1]), dtypes)
    parts = len(xs) // len(unlike)
    unlike = np.repeat(unlike, parts) if parts > 1 else unlike
    xs, ys, unlike = _finite_alone(xs, ys, unlike, found)
    apart = _apart(xs, ys, x, y, scratch[2])
    found.dd += _square(apart)
    found.max = max(found.max, float(apart.max()))
    if tolerance is not None:
        found.outside += int(np.count_nonzero((apart > tolerance.atol + tolerance.rtol * np.abs(ys)) & unlike))


def _as_floats(numbers: Raw, room: Floats) -> Floats:
    floats = room[: len(numbers)]
    np.copyto(floats, numbers)
    return floats


def _unlike(a: Raw, b: Raw, x: Raw, y: Raw, dtypes: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which elements differ: in any bit, or of two dtypes in value."""
    if dtypes[0] == dtypes[1]:
        if a.dtype.kind != "V":
            return np.asarray(a != b)
        bits = a.view("<u8").reshape(-1, 2) != b.view("<u8").reshape(-1, 2)
        return np.asarray(bits.any(axis=1))
    xs, ys = _of_one_length(x.astype(np.float64), y.astype(np.float64), dtypes)
    return np.asarray((xs != ys).reshape(len(a), -1).any(axis=1))


def _of_one_length(x: Floats, y: Floats, dtypes: Sequence[str]) -> tuple[Floats, Floats]:
    """Parts of complex numbers beside real ones, which have an imaginary part of 0."""
    most = max(map(parts_of, dtypes))
    both = [
        v if parts_of(d) == most else np.stack([v, np.zeros_like(v)], axis=1).reshape(-1)
        for v, d in zip((x, y), dtypes, strict=True)
    ]
    return both[0], both[1]


def _equal(xs: Floats, parts: int, found: Measures) -> None:
    """A block without a difference counts for the norms alone."""
    square = _square(xs)
    if not math.isfinite(square):
        odd = ~np.isfinite(xs)
        found.nonfinite += int(odd.reshape(-1, parts).any(axis=1).sum())
        square = _square(np.where(odd, 0.0, xs))
    found.aa += square
    found.bb += square


def _finite_alone(
    xs: Floats, ys: Floats, unlike: npt.NDArray[np.bool_], found: Measures
) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Both sides with 0 in the place of what is not finite on one of them, which is counted; norms are added."""
    aa, bb = _square(xs), _square(ys)
    if not math.isfinite(aa + bb):
        odd = ~(np.isfinite(xs) & np.isfinite(ys))
        found.nonfinite += int(odd.sum())
        found.outside += int((odd & unlike).sum())
        xs, ys, unlike = np.where(odd, 0.0, xs), np.where(odd, 0.0, ys), unlike & ~odd
        aa, bb = _square(xs), _square(ys)
    found.aa, found.bb = found.aa + aa, found.bb + bb
    return xs, ys, unlike


def _square(values: Floats) -> float:
    # Not np.dot, which starts threads of its own for every block.
    return float(np.einsum("i,i->", values, values))


def _apart(xs: Floats, ys: Floats, x: Raw, y: Raw, room: Floats) -> Floats:
    """Absolute differences; of 64-bit integers, which float64 does not hold, from the integers themselves."""
    if x.dtype == y.dtype and x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        left, right = x.view("<u8"), y.view("<u8")
        exact: Floats = np.where(x > y, left - right, right - left).astype(np.float64)
        return exact
    apart = np.subtract(xs, ys, out=room[: len(xs)])
    return np.abs(apart, out=apart)


def _digits(numbers: Raw, at: int, dtype: str) -> str:
    """An element with as many digits as tell it from others of its dtype."""
    if parts_of(dtype) == 2:
        return str(complex(float(numbers[2 * at]), float(numbers[2 * at + 1])))
    return str(bool(numbers[at])) if dtype == "bool" else str(numbers[at])
