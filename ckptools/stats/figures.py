"""Figures of tensors: root mean square, norm, extremes, mean, standard deviation, zeros, NaN and infinities."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import numpy as np

from ckptools.dtypes import is_floating
from ckptools.model.records import Rows
from ckptools.model.tensor import Tensor
from ckptools.stats.passes import Array, over
from ckptools.stats.reading import MeasuredPart, ReadableSources, of_rank, readable
from ckptools.stats.record import BINS, Statistics, Stats
from ckptools.stats.sums import NOTHING, SHIFT, Summing, Sums, Values, merged, numbers
from ckptools.tensor_io.elements import BAND
from ckptools.tensor_io.threads import Progress


def tensor_stats(tensor: Tensor, name: str = "", histogram: bool = False, rank: int | None = None) -> Stats:
    """Compute the figures of one tensor.

    Args:
        tensor: with a source, or an item, for every shard to read.
        name: its name.
        histogram: also count the elements in each of equal parts of their range, which reads them twice.
        rank: rank whose part to use; None for the whole tensor.
    """
    whole = MeasuredPart(name, "", tensor)
    part = whole if rank is None else of_rank(whole, rank, tensor.on_rank(rank))
    return statistics(Path(), [part], histogram, 1).rows[0]


def statistics(
    path: Path,
    parts: Sequence[MeasuredPart],
    histogram: bool,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Statistics[Stats]:
    """Compute the figures of tensors or parts of them, tied ones once; each row says what cannot be read.

    Args:
        path: of the checkpoint.
        parts: the tensors or parts.
        histogram: also count the elements in each of equal parts of their range, which reads them twice.
        jobs: number of threads.
        progress: called with bytes read and the tensor they are of.
    """
    started = time.perf_counter()
    readables = [readable(part) for part in parts]
    names = {one: part.name for one, part in zip(reversed(readables), reversed(parts), strict=True)}
    arrays = [Array(name, one.sources) for one, name in names.items()]
    found = over(arrays, lambda _, dtype: Summing(dtype), jobs, progress)
    sums = [reduce(merged, one.results, NOTHING) for one in found]
    counts: list[tuple[int, ...] | None] = [None] * len(arrays)
    if histogram:
        counted = over(arrays, lambda n, dtype: Counting(dtype, sums[n]), jobs, progress)
        counts = [joined(one.results) for one in counted]
    taken = dict(zip(names, zip(sums, counts, (one.problem for one in found), strict=True), strict=True))
    rows = [_row(part, one, *taken[one]) for part, one in zip(parts, readables, strict=True)]
    whole = not any(row.problem or row.rank is not None for row in rows)
    floats = [s for s, a in zip(sums, arrays, strict=True) if a.sources and is_floating(a.sources[0].dtype)]
    return Statistics(
        path,
        "values",
        len(rows),
        sum(row.elements for row in rows),
        (reduce(merged, floats, NOTHING).l2 or 0.0) if whole else None,
        sum(row.nonfinite for row in rows),
        sum(bool(row.problem) for row in rows),
        sum(one.nbytes for one in found),
        time.perf_counter() - started,
        Rows(rows),
    )


def _row(part: MeasuredPart, one: ReadableSources, sums: Sums, counts: tuple[int, ...] | None, problem: str) -> Stats:
    tensor = part.tensor
    return Stats(
        part.name,
        part.section,
        part.rank,
        tensor.dtype,
        tensor.shape,
        one.numel,
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
    )


# -- histogram --------------------------------------------------------------------------------------------------------


class Counting:
    """Count finite raw elements of one dtype in equally wide bins, band after band.

    Args:
        dtype: of the elements.
        sums: over all of them, for the limits of the bins.
    """

    def __init__(self, dtype: str, sums: Sums) -> None:
        self._dtype, self._counts = dtype, np.zeros(BINS, np.int64)
        self._low, self._high = float(sums.low or 0), float(sums.high or 0)
        # Differences of float64 may overflow or vanish even if the elements do not.
        self._factor = 2.0**-sums.scale if abs(sums.scale) == SHIFT else 1.0
        self._wide = np.empty(BAND)

    def add(self, raw: Values) -> None:
        """Add at most `BAND` elements."""
        values = numbers(raw, self._dtype)
        wide = self._wide[: len(values)]
        # A factor beyond float32 must not be cast to it: zero times infinity is NaN.
        np.multiply(values, self._factor, out=wide, dtype=np.float64, casting="unsafe")
        if self._low == self._high:
            self._counts[BINS // 2] += np.count_nonzero(np.isfinite(wide))
        else:
            within = self._low * self._factor, self._high * self._factor
            self._counts += np.histogram(wide[np.isfinite(wide)], BINS, within)[0]

    def result(self, times: int) -> tuple[int, ...]:
        """Elements in each bin, each counted `times` times."""
        return tuple(n * times for n in self._counts.tolist())


def joined(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Add the counts of several pieces."""
    return tuple(map(sum, zip(*counts, strict=True))) if counts else (0,) * BINS
