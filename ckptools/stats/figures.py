"""Figures of tensors: root mean square, norm, extremes, mean, standard deviation, zeros, NaN and infinities.

They follow from sums, taken band by band and merged: mean and squared deviations as by Chan, Golub and LeVeque
("Updating formulae and a pairwise algorithm for computing sample variances", 1979). A sum of squares minus a squared
mean loses every digit if the mean is large; it is used only if the deviations outweigh the mean, where it loses at most
one bit and saves a pass. Squares of float64 may overflow or vanish even if the elements do not, so such bands are
scaled by a power of two.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import inf, ldexp, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from ckptools.dtypes import is_floating
from ckptools.model.tensor import Tensor
from ckptools.stats.passes import Values, numbers, over
from ckptools.stats.reading import MeasuredPart, ReadableSources, of_rank, readable
from ckptools.stats.record import BINS, Statistics, Stats, with_totals
from ckptools.stats.suspects import suspects
from ckptools.tensor_io.elements import BAND, Piece, buffer
from ckptools.tensor_io.numbers import sum_of_squares
from ckptools.tensor_io.threads import Progress


def tensor_stats(tensor: Tensor, name: str = "", histogram: bool = False, rank: int | None = None) -> Stats:
    """Compute the figures of one tensor, or of one rank's part of it; a histogram reads it twice."""
    whole = MeasuredPart(name, "", tensor)
    part = whole if rank is None else of_rank(whole, rank, tensor.on_rank(rank))
    return statistics(Path(), [part], histogram, 1, look=False).rows[0]


def statistics(
    path: Path,
    parts: Sequence[MeasuredPart],
    histogram: bool,
    jobs: int | None = None,
    progress: Progress | None = None,
    look: bool = True,
) -> Statistics[Stats]:
    """Compute the figures of tensors or parts of them, tied ones once; each row says what cannot be read.

    A histogram reads them twice, and `look` reads what stands out again, to say where. `progress` is called with bytes
    read and the tensor they are of.
    """
    started = time.perf_counter()
    readables = [readable(part) for part in parts]
    names = {one: part.name for one, part in zip(reversed(readables), reversed(parts), strict=True)}
    arrays, titles = [one.sources for one in names], list(names.values())
    found = over(arrays, titles, lambda _, p, bands: summed(bands, p.source.dtype).repeated(p.times), jobs, progress)
    sums = [reduce(merged, one.results, NOTHING) for one in found]
    counts: list[tuple[int, ...] | None] = [None] * len(arrays)
    if histogram:
        counted = over(arrays, titles, lambda n, p, bands: _counts(bands, p, sums[n]), jobs, progress)
        counts = [tuple(map(sum, zip(*one.results, strict=True))) or (0,) * BINS for one in counted]
    taken = dict(zip(names, zip(sums, counts, (one.problem for one in found), strict=True), strict=True))
    rows = [_row(part, one, *taken[one]) for part, one in zip(parts, readables, strict=True)]
    whole = not any(row.problem or row.rank is not None for row in rows)
    floats = [s for s, a in zip(sums, arrays, strict=True) if a and is_floating(a[0].dtype)]
    l2 = (reduce(merged, floats, NOTHING).l2 or 0.0) if whole else None
    elements, nonfinite = sum(row.elements for row in rows), sum(row.nonfinite for row in rows)
    odd = suspects(parts, rows, [taken[one][0].peaks for one in readables]) if look else None
    return with_totals(path, "values", rows, started, sum(one.nbytes for one in found), elements, nonfinite, l2, odd)


def _row(part: MeasuredPart, one: ReadableSources, sums: Sums, counts: tuple[int, ...] | None, problem: str) -> Stats:
    tensor = part.tensor
    return Stats(
        part.name,
        part.section,
        part.rank,
        tensor.dtype,
        tensor.shape,
        part.numel,
        sums.elements,
        sums.rms,
        sums.l2,
        sums.low,
        sums.high,
        sums.average,
        sums.std,
        sums.zeros,
        sums.nan,
        sums.inf,
        counts,
        problem or one.problem,
        sums.denormal,
    )


def _counts(bands: Iterable[Values], piece: Piece, sums: Sums) -> tuple[int, ...]:
    """Count the finite elements of a piece in equally wide bins between the limits of the sums over its array."""
    counts, wide = np.zeros(BINS, np.int64), np.empty(BAND)
    low, high = float(sums.low or 0), float(sums.high or 0)
    # Differences of float64 may overflow or vanish even if the elements do not.
    factor = 2.0**-sums.scale if abs(sums.scale) == SHIFT else 1.0
    for raw in bands:
        values = numbers(raw, piece.source.dtype)
        # A factor beyond float32 must not be cast to it: zero times infinity is NaN.
        scaled = np.multiply(values, factor, out=wide[: len(values)], dtype=np.float64, casting="unsafe")
        finite = scaled[np.isfinite(scaled)]
        if low == high:
            counts[BINS // 2] += len(finite)
        else:
            counts += np.histogram(finite, BINS, (low * factor, high * factor))[0]
    return tuple(n * piece.times for n in counts.tolist())


# -- sums -------------------------------------------------------------------------------------------------------------


CHUNKS = 16
"""Chunks of a band of which the largest magnitude is noted."""

LARGE, SMALL, SHIFT = 2.0**400, 2.0**-400, 600
"""Magnitudes whose squares never overflow float64 in a sum, and the power of two that scales others."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over elements; those that are not finite are only counted.

    Attributes:
        count: finite elements.
        mean: their mean, times two to the power of -`scale`.
        m2: sum of their squared deviations from the mean, times two to the power of -2 * `scale`.
        low: the smallest; None if there is none.
        denormal: those of float32 and float64 that are smaller than any normal number, and not zero.
        peaks: how many chunks of the bands have a largest magnitude of each binary exponent; none of chunks of zeros.
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
    denormal: int = 0
    peaks: Mapping[int, int] = field(default_factory=dict)

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
        counts = {name: getattr(self, name) * times for name in ("count", "zeros", "nan", "inf", "denormal", "m2")}
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
        a.denormal + b.denormal,
        {exponent: a.peaks.get(exponent, 0) + b.peaks.get(exponent, 0) for exponent in {*a.peaks, *b.peaks}},
    )


def _at(sums: Sums, scale: int) -> tuple[float, float]:
    """Mean and squared deviations at a scale at least as large as their own."""
    apart = sums.scale - scale
    return ldexp(sums.mean, apart), ldexp(sums.m2, 2 * apart)


def summed(bands: Iterable[Values], dtype: str) -> Sums:
    """Sum the raw elements of one dtype, band after band of at most `BAND`."""
    return reduce(merged, (_sums_of(numbers(raw, dtype)) for raw in bands), NOTHING)


def _sums_of(values: Values) -> Sums:
    nan = infinite = 0
    lows, highs = _by_chunk(np.minimum, values), _by_chunk(np.maximum, values)
    low, high = np.minimum.reduce(lows), np.maximum.reduce(highs)
    if not (-inf < low and high < inf):
        finite = values[np.isfinite(values)]
        nan = int(np.isnan(values).sum())
        infinite, values = len(values) - len(finite) - nan, finite
        if not len(values):
            return Sums(nan=nan, inf=infinite)
        lows, highs = _by_chunk(np.minimum, values), _by_chunk(np.maximum, values)
        low, high = lows.min(), highs.max()
    zeros, denormal = _smallest(values, low, high)
    mean, m2, scale = _deviations(values, float(low), float(high))
    peaks = np.maximum(-lows.astype("f8"), highs)
    exponents = Counter(np.frexp(peaks[peaks > 0])[1].tolist())
    return Sums(len(values), mean, m2, scale, low.item(), high.item(), zeros, nan, infinite, denormal, exponents)


def _by_chunk(of: np.ufunc, values: Values) -> Values:
    """Reduce each of `CHUNKS` runs of a band, and what is left behind them; costs no more than the band as a whole."""
    width = len(values) // CHUNKS
    if not width:
        alone: Values = of.reduce(values, keepdims=True)
        return alone
    whole: Values = of.reduce(values[: width * CHUNKS].reshape(CHUNKS, width), axis=1)
    rest = values[width * CHUNKS :]
    return np.append(whole, of.reduce(rest)) if len(rest) else whole


def _smallest(values: Values, low: Any, high: Any) -> tuple[int, int]:
    """Count zeros, and floats that are smaller than any normal number of their dtype."""
    flags = buffer("flags", len(values), "?")
    if values.dtype.kind != "f":
        return int(np.count_nonzero(np.equal(values, 0, out=flags))) if low <= 0 <= high else 0, 0
    normal = np.finfo(values.dtype).tiny
    if low >= normal or high <= -normal:
        return 0, 0
    np.less(np.abs(values, out=buffer("sizes", len(values), values.dtype.str[1:])), normal, out=flags)
    small = int(np.count_nonzero(flags))
    zeros = int(np.count_nonzero(np.equal(values, 0, out=flags))) if small else 0
    return zeros, small - zeros


def _deviations(values: Values, low: float, high: float) -> tuple[float, float, int]:
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
