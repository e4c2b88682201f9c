"""Sums over elements, taken band by band and merged: count, mean and squared deviations, extremes, zeros, NaN.

Mean and deviations are merged as by Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for
computing sample variances", 1979). A sum of squares minus a squared mean loses every digit if the mean is large; it is
used only if the deviations outweigh the mean, where it loses at most one bit and saves a pass. Squares of float64 may
overflow or vanish even if the elements do not, so such bands are scaled by a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, ldexp, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptools.tensor_io.elements import buffer
from ckptools.tensor_io.numbers import decoded, halves, sum_of_squares

Values = npt.NDArray[Any]

LARGE, SMALL, SHIFT = 2.0**400, 2.0**-400, 600
"""Magnitudes whose squares never overflow float64 in a sum, and the power of two that scales others."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over elements; those that are not finite are only counted.

    Attributes:
        count: finite elements.
        mean: their mean, times two to the power of -`scale`.
        m2: sum of their squared deviations from the mean, times two to the power of -2 * `scale`.
        scale: that power.
        low: the smallest; None if there is none.
        high: the largest.
        zeros: number of zeros.
        nan: elements that are NaN.
        inf: elements that are infinite.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    scale: int = 0
    low: float | None = None
    high: float | None = None
    zeros: int = 0
    nan: int = 0
    inf: int = 0

    @property
    def elements(self) -> int:
        """All elements, finite or not."""
        return self.count + self.nan + self.inf

    @property
    def rms(self) -> float | None:
        """Root of the mean square; None if there is no finite element."""
        return self._unscaled(sqrt(self.mean**2 + self.m2 / self.count)) if self.count else None

    @property
    def l2(self) -> float | None:
        """Root of the sum of squares."""
        return self._unscaled(sqrt(self.count * self.mean**2 + self.m2)) if self.count else None

    @property
    def average(self) -> float | None:
        """The mean."""
        return self._unscaled(self.mean) if self.count else None

    @property
    def std(self) -> float | None:
        """Population standard deviation."""
        return self._unscaled(sqrt(self.m2 / self.count)) if self.count else None

    def repeated(self, times: int) -> Sums:
        """Scale the sums as if each element occurred `times` times."""
        if times == 1:
            return self
        counts = {name: getattr(self, name) * times for name in ("count", "zeros", "nan", "inf", "m2")}
        return replace(self, **counts)

    def _unscaled(self, value: float) -> float:
        try:
            return ldexp(value, self.scale)
        except OverflowError:
            return inf if value > 0 else -inf


NOTHING = Sums()


def merged(a: Sums, b: Sums) -> Sums:
    """Merge the sums of two sets of elements."""
    if not a.count or not b.count:
        finite, other = (a, b) if a.count else (b, a)
        return replace(finite, nan=finite.nan + other.nan, inf=finite.inf + other.inf)
    scale = max(a.scale, b.scale)
    (mean_a, m2_a), (mean_b, m2_b) = _at(a, scale), _at(b, scale)
    count, apart = a.count + b.count, mean_b - mean_a
    return Sums(
        count,
        mean_a + apart * (b.count / count),
        m2_a + m2_b + apart * apart * (a.count * (b.count / count)),
        scale,
        min(a.low, b.low),  # type: ignore[type-var]
        max(a.high, b.high),  # type: ignore[type-var]
        a.zeros + b.zeros,
        a.nan + b.nan,
        a.inf + b.inf,
    )


def _at(sums: Sums, scale: int) -> tuple[float, float]:
    """Mean and squared deviations at a scale at least as large as their own."""
    apart = sums.scale - scale
    return ldexp(sums.mean, apart), ldexp(sums.m2, 2 * apart)


class Summing:
    """Sum raw elements of one dtype, band after band.

    Attributes:
        sums: over all of them so far.
    """

    def __init__(self, dtype: str) -> None:
        self.sums = NOTHING
        self._dtype = dtype

    def add(self, raw: Values) -> None:
        """Add at most `BAND` elements."""
        self.sums = merged(self.sums, self._of(numbers(raw, self._dtype)))

    def result(self, times: int) -> Sums:
        """The sums, each element counted `times` times."""
        return self.sums.repeated(times)

    def _of(self, values: Values) -> Sums:
        nan = infinite = 0
        low, high = np.minimum.reduce(values), np.maximum.reduce(values)
        if not (-inf < low and high < inf):
            finite = values[np.isfinite(values)]
            nan = int(np.isnan(values).sum())
            infinite, values = len(values) - len(finite) - nan, finite
            if not len(values):
                return Sums(nan=nan, inf=infinite)
            low, high = values.min(), values.max()
        zeros = 0
        if low <= 0 <= high:
            zeros = int(np.count_nonzero(np.equal(values, 0, out=buffer("flags", len(values), "?"))))
        mean, m2, scale = self._moments(values, float(low), float(high))
        return Sums(len(values), mean, m2, scale, low.item(), high.item(), zeros, nan, infinite)

    def _moments(self, values: Values, low: float, high: float) -> tuple[float, float, int]:
        """Mean, sum of squared deviations from it, and the power of two that scales them."""
        largest = max(-low, high)
        scale = SHIFT if largest > LARGE else -SHIFT if largest < SMALL else 0
        if low == high:
            return low * 2.0**-scale, 0.0, scale
        wide = buffer("wide", len(values), "f8")
        np.copyto(wide, values)
        if scale:
            wide *= 2.0**-scale
        mean = float(wide.sum()) / len(wide)
        square = mean * mean * len(wide)
        m2 = sum_of_squares(wide) - square
        if m2 < square:
            wide -= mean
            m2 = sum_of_squares(wide)
        return mean, m2, scale


def numbers(raw: Values, dtype: str) -> Values:
    """Raw elements as numbers that can be summed: complex ones as their magnitudes, flags as 0 and 1."""
    if dtype == "bool":
        flags: Values = raw != 0
        return flags.view("u1")
    if dtype == "complex32":
        return _magnitudes(raw.view("<f2").astype("<f4").view("<c8"))
    if dtype == "float16":
        return halves(raw)
    values: Values = decoded(raw, dtype)
    return _magnitudes(values) if values.dtype.kind == "c" else values


def _magnitudes(values: Values) -> Values:
    """Magnitudes of complex numbers; NaN if a part is NaN, even if the other is infinite."""
    found: Values = np.hypot(values.real.astype("f8"), values.imag.astype("f8"))
    found[np.isnan(values.real) | np.isnan(values.imag)] = np.nan
    return found
