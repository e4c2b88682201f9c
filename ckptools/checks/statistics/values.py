"""Figures of tensors: root mean square, norm, extremes, mean, standard deviation, zeros, NaN and infinities."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

from ckptools.checks.statistics.histogram import Counting, joined
from ckptools.checks.statistics.passes import Array, over
from ckptools.checks.statistics.reading import Part, Readable, of_rank, readable
from ckptools.checks.statistics.sums import NOTHING, Summing, Sums, merged
from ckptools.dtypes import is_floating
from ckptools.model.rows import Rows
from ckptools.model.statistics import Statistics, Stats
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.progress import Progress


def tensor_stats(tensor: Tensor, name: str = "", histogram: bool = False, rank: int | None = None) -> Stats:
    """Figures of one tensor.

    Args:
        tensor: with a source, or an item, for every shard that is to be read.
        name: what it is called.
        histogram: count also how many elements lie in each of equal parts of their range, which reads them twice.
        rank: whose part of it alone; None for all of it.
    """
    whole = Part(name, "", tensor)
    part = whole if rank is None else of_rank(whole, rank, tensor.on_rank(rank))
    return statistics(Path(), [part], histogram, 1).rows[0]


def statistics(
    path: Path, parts: Sequence[Part], histogram: bool, jobs: int | None = None, progress: Progress | None = None
) -> Statistics[Stats]:
    """Figures of some tensors, or parts of them, those of tied ones taken once. What cannot be read is said in its row.

    Args:
        path: of the checkpoint.
        parts: of what.
        histogram: count also how many elements lie in each of equal parts of their range, which reads them twice.
        jobs: threads.
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


def _row(part: Part, one: Readable, sums: Sums, counts: tuple[int, ...] | None, problem: str) -> Stats:
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
