"""Compare arrays: count elements whose bits differ, and measure differences in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptools.diff.record import Measures, Tolerance
from ckptools.model.regions import Box
from ckptools.tensor_io.elements import BAND, buffer
from ckptools.tensor_io.numbers import as_numbers, digits_of, is_number, parts_of, sum_of_squares

Raw = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Comparing:
    """Compare the elements of one region of two tensors, band by band; `found` accumulates the measures."""

    def __init__(self, dtypes: Sequence[str], box: Box, tolerance: Tolerance | None) -> None:
        self.found = Measures()
        self._dtypes, self._box, self._tolerance = dtypes, box, tolerance
        self._parts = max(map(parts_of, dtypes))
        self._numbers = all(map(is_number, dtypes))

    def add(self, a: Raw, b: Raw, start: int) -> None:
        """Compare a band of flat raw elements, consecutive in row-major order from element `start` of the region."""
        self.found.compared += len(a)
        if not self._numbers:
            # Packed elements cannot be read as numbers, so only their bits are compared.
            unlike = np.flatnonzero(a != b) if a.dtype == b.dtype else np.arange(len(a))
            self.found.differing += len(unlike)
            self.found.outside += len(unlike)
            if len(unlike) and self.found.first is None:
                at = int(unlike[0])
                self.found.first, self.found.values = self._box.index_of(start + at), (f"0x{a[at]:x}", f"0x{b[at]:x}")
            return
        for low in range(0, len(a), BAND):
            self._block(a[low : low + BAND], b[low : low + BAND], start + low)

    def _block(self, a: Raw, b: Raw, start: int) -> None:
        found, (of_a, of_b) = self.found, self._dtypes
        x, y = as_numbers(a, of_a), as_numbers(b, of_b)
        unlike = self._unlike(a, b, x, y)
        count = int(np.count_nonzero(unlike))
        xs = _as_floats(x, "A")
        if not count:
            _add_norms(xs, xs, parts_of(of_a), found)
            return
        found.differing += count
        if found.first is None:
            at = int(unlike.argmax())
            found.first, found.values = self._box.index_of(start + at), (digits_of(x, at, of_a), digits_of(y, at, of_b))
        ys = _as_floats(y, "B")
        if self._parts > 1:
            xs, ys = self._both_parts(xs, of_a), self._both_parts(ys, of_b)
            unlike = np.repeat(unlike, self._parts)
        xs, ys, odd = _add_norms(xs, ys, self._parts, found)
        if odd is not None:
            found.outside += int((odd & unlike).sum())
            unlike &= ~odd
        apart = _apart(xs, ys, x, y)
        found.dd += sum_of_squares(apart)
        found.max = max(found.max, float(apart.max()))
        if self._tolerance is not None:
            within = self._tolerance.atol + self._tolerance.rtol * np.abs(ys)
            found.outside += int(np.count_nonzero((apart > within) & unlike))

    def _unlike(self, a: Raw, b: Raw, x: Raw, y: Raw) -> Flags:
        """Flag the elements that differ: in any bit, or in value if the dtypes differ."""
        of_a, of_b = self._dtypes
        if of_a != of_b:
            xs, ys = self._both_parts(x.astype("f8"), of_a), self._both_parts(y.astype("f8"), of_b)
            return np.asarray((xs != ys).reshape(len(a), -1).any(axis=1))
        if a.dtype.kind != "V":
            return np.asarray(a != b)
        bits = a.view("<u8").reshape(-1, 2) != b.view("<u8").reshape(-1, 2)
        return np.asarray(bits.any(axis=1))

    def _both_parts(self, values: Floats, dtype: str) -> Floats:
        """Split complex numbers into parts; give real numbers an imaginary part of 0 if the other side is complex."""
        if parts_of(dtype) == self._parts:
            return values
        return np.stack([values, np.zeros_like(values)], axis=1).reshape(-1)


def _as_floats(numbers: Raw, side: str) -> Floats:
    floats = buffer(f"wide {side}", len(numbers), "f8")
    np.copyto(floats, numbers)
    return floats


def _add_norms(xs: Floats, ys: Floats, parts: int, found: Measures) -> tuple[Floats, Floats, Flags | None]:
    """Add the norms of a block, and return its numbers, `parts` of an element each, with 0 for NaN and infinities.

    The flags mark the numbers that were replaced on both sides; None if there are none.
    """
    odd = None
    aa = sum_of_squares(xs)
    bb = aa if ys is xs else sum_of_squares(ys)
    if not math.isfinite(aa + bb):
        of_a, of_b = ~np.isfinite(xs), ~np.isfinite(ys)
        odd = of_a | of_b
        found.nonfinite += _elements(odd, parts)
        found.nonfinite_a += _elements(of_a, parts)
        found.nonfinite_b += _elements(of_b, parts)
        xs, ys = np.where(odd, 0.0, xs), np.where(odd, 0.0, ys)
        aa, bb = sum_of_squares(xs), sum_of_squares(ys)
    found.aa, found.bb = found.aa + aa, found.bb + bb
    return xs, ys, odd


def _elements(flags: Flags, parts: int) -> int:
    """Count the elements of which some part is flagged."""
    return int(flags.reshape(-1, parts).any(axis=1).sum())


def _apart(xs: Floats, ys: Floats, x: Raw, y: Raw) -> Floats:
    """Absolute differences; 64-bit integers are subtracted as integers, since float64 cannot represent them all."""
    if x.dtype == y.dtype and x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        left, right = x.view("<u8"), y.view("<u8")
        exact: Floats = np.where(x > y, left - right, right - left).astype(np.float64)
        return exact
    apart = np.subtract(xs, ys, out=xs)
    return np.abs(apart, out=apart)
