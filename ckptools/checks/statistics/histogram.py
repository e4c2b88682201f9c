"""How the elements of a tensor are spread between the smallest and the largest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptools.checks.statistics.sums import SHIFT, Sums, Values, numbers
from ckptools.model.statistics import BINS
from ckptools.tensor_io.elements import BAND


class Counting:
    """Counts finite raw elements of one dtype in equally wide bins, band after band.

    Args:
        dtype: of the elements.
        sums: over all of them: where the first bin begins, and the last one ends.
    """

    def __init__(self, dtype: str, sums: Sums) -> None:
        self._dtype, self._counts = dtype, np.zeros(BINS, np.int64)
        self._low, self._high = float(sums.low or 0), float(sums.high or 0)
        # Differences of float64 may overflow or vanish where the elements do not.
        self._factor = 2.0**-sums.scale if abs(sums.scale) == SHIFT else 1.0
        self._wide = np.empty(BAND)

    def add(self, raw: Values) -> None:
        """Take in at most `BAND` elements."""
        values = numbers(raw, self._dtype)
        wide = self._wide[: len(values)]
        # A factor that float32 cannot hold is not to be made one: zeros times infinity are no numbers.
        np.multiply(values, self._factor, out=wide, dtype=np.float64, casting="unsafe")
        if self._low == self._high:
            self._counts[BINS // 2] += np.count_nonzero(np.isfinite(wide))
        else:
            within = self._low * self._factor, self._high * self._factor
            self._counts += np.histogram(wide[np.isfinite(wide)], BINS, within)[0]

    def result(self, times: int) -> tuple[int, ...]:
        """Elements in each bin, where every one is there so many times."""
        return tuple(n * times for n in self._counts.tolist())


def joined(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The counts of several pieces together."""
    return tuple(map(sum, zip(*counts, strict=True))) if counts else (0,) * BINS
