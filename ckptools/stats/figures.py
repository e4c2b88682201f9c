"""Statistics of tensors (rms, norm, extremes, mean, standard deviation, zeros, NaN), of Adam's moments, and dead rows.

They follow from sums, taken band by band and merged: mean and squared deviations as by Chan, Golub and LeVeque
("Updating formulae and a pairwise algorithm for computing sample variances", 1979). A sum of squares minus a squared
mean loses every digit if the mean is large; it is used only if the deviations outweigh the mean, where it loses at most
one bit and saves a pass. Squares of float64 may overflow or vanish even if the elements do not, so such bands are
scaled by a power of two.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import inf, ldexp, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptools.dtypes import is_floating
from ckptools.errors import CkptoolsError, UsageError
from ckptools.keys.entries import ALL, Entry, Selection, tensor_entries
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.model.tree import scalar
from ckptools.option import spelled
from ckptools.stats.passes import (
    MeasuredPart,
    PassResult,
    ReadableSources,
    SharedRegion,
    Values,
    by_parameter,
    numbers,
    of_rank,
    over,
    over_regions,
    readable,
    readable_regions,
    shared_regions,
    tensors_chosen,
    together,
)
from ckptools.stats.record import BINS, NOT_LOOKED, DeadRows, Moments, Statistics, Stats, with_totals
from ckptools.stats.suspects import suspects
from ckptools.tensor_io import read
from ckptools.tensor_io.elements import BAND, Piece, buffer
from ckptools.tensor_io.fetch_ahead import Progress, begin_stage
from ckptools.tensor_io.numbers import sum_of_squares
from ckptools.text import shape
from ckptools.training_state.models import chosen_models
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.sections import sections_of_kind


def tensor_stats(tensor: Tensor, name: str = "", histogram: bool = False, rank: int | None = None) -> Stats:
    """Compute the statistics of one tensor, or of the shards of one rank; a histogram reads the bytes twice."""
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
    """Compute the statistics of tensors or parts of them, tied ones once; a row reports values that cannot be read.

    A histogram reads everything twice. With `look`, tensors with oddities are read again, to locate the oddities.
    `progress` is called with a number of bytes read and the name of their tensor.
    """
    started = time.perf_counter()
    readables = [readable(part) for part in parts]
    names = {one: part.name for one, part in zip(reversed(readables), reversed(parts), strict=True)}
    arrays, titles = [one.sources for one in names], list(names.values())
    found = over(arrays, titles, lambda _, p, bands: summed(bands, p.source.dtype).repeated(p.times), jobs, progress)
    sums = [reduce(merged, one.results, NOTHING) for one in found]
    counts: list[tuple[int, ...] | None] = [None] * len(arrays)
    if histogram:
        begin_stage(progress, "histograms")
        counted = over(arrays, titles, lambda n, p, bands: _counts(bands, p, sums[n]), jobs, progress)
        counts = [tuple(map(sum, zip(*one.results, strict=True))) or (0,) * BINS for one in counted]
    taken = dict(zip(names, zip(sums, counts, (one.problem for one in found), strict=True), strict=True))
    rows = [_stats_row(part, one, *taken[one]) for part, one in zip(parts, readables, strict=True)]
    whole = not any(row.problem or row.rank is not None for row in rows)
    floats = [s for s, a in zip(sums, arrays, strict=True) if a and is_floating(a[0].dtype)]
    several = len({part.section for part in parts if part.kind == "model"}) > 1  # a norm of two models means nothing
    l2 = (reduce(merged, floats, NOTHING).l2 or 0.0) if whole and not several else None
    elements, nonfinite = sum(row.elements for row in rows), sum(row.nonfinite for row in rows)
    odd = suspects(parts, rows, [taken[one][0].peaks for one in readables]) if look else NOT_LOOKED
    return with_totals(path, "values", rows, started, sum(one.nbytes for one in found), elements, nonfinite, l2, odd)


def _stats_row(
    part: MeasuredPart, one: ReadableSources, sums: Sums, counts: tuple[int, ...] | None, problem: str
) -> Stats:
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
    """Count the finite elements of a piece in equally wide bins between the minimum and maximum of its tensor."""
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


# -- sums --------------------------------------------------------------------------------------------------------------


CHUNKS = 16
"""Number of parts of a band whose largest magnitude is recorded."""

LARGE, SMALL, SHIFT = 2.0**400, 2.0**-400, 600
"""Magnitudes whose squares never overflow float64 in a sum, and the power of two that scales others."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over elements; NaN and infinite elements are only counted.

    Attributes:
        count: number of finite elements.
        mean: their mean, times two to the power of -`scale`.
        m2: sum of their squared deviations from the mean, times two to the power of -2 * `scale`.
        low: smallest element; None without finite elements.
        denormal: number of nonzero float32 and float64 elements below the smallest normal number.
        peaks: number of parts of bands by the binary exponent of their largest magnitude; all-zero parts are left out.
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
        """Number of elements, finite or not."""
        return self.count + self.nan + self.inf

    @property
    def rms(self) -> float | None:
        """Root of the mean square; None without finite elements."""
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
        return finite if not other.elements else replace(finite, nan=finite.nan + other.nan, inf=finite.inf + other.inf)
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
    """Convert mean and squared deviations to a scale at least as large as their own."""
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
    """Reduce each of the `CHUNKS` parts of a band, and the remainder; costs no more than reducing the whole band."""
    width = len(values) // CHUNKS
    if not width:
        alone: Values = of.reduce(values, keepdims=True)
        return alone
    whole: Values = of.reduce(values[: width * CHUNKS].reshape(CHUNKS, width), axis=1)
    rest = values[width * CHUNKS :]
    return np.append(whole, of.reduce(rest)) if len(rest) else whole


def _smallest(values: Values, low: Any, high: Any) -> tuple[int, int]:
    """Count zeros and denormal floats, which are smaller than any normal number of their dtype."""
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
    """Compute the mean, the sum of squared deviations from it, and the power of two that scales both."""
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


# -- compare an optimizer's moments with the model's weights: their size, and the size of a step ----------------------
# torch.optim.Adam and AdamW compute this update (`_single_tensor_adam`), here without learning rate and weight decay:
# `exp_avg / (sqrt(exp_avg_sq) + eps)`, both moments first divided by `1 - beta**step` if step and betas are known.


FIRST, SECOND, LARGEST = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
"""Names of Adam's moments in the optimizer state; the last is the divisor of AMSGrad."""


class Pair(NamedTuple):
    """The moments of one parameter, and hyperparameters that determine the size of its update; None if unknown.

    Attributes:
        second: the divisor; with AMSGrad the largest second moment so far.
        eps: added to the root of the second moment.
        corrections: divisors of the moments.
    """

    name: str
    optimizer: str
    first: Tensor | None
    second: Tensor | None
    lr: float | None
    eps: float | None
    step: float | None
    corrections: tuple[float, ...] | None

    @property
    def nbytes(self) -> int:
        """Bytes of both moments."""
        return sum(tensor.nbytes for tensor in (self.first, self.second) if tensor is not None)


def moments(
    ck: Checkpoint, pairs: Sequence[Pair], jobs: int | None = None, progress: Progress | None = None
) -> Statistics[Moments]:
    """Compare moments with their parameters; a row reports values that cannot be read.

    The checkpoint was opened with all ranks, and `pairs` come from `pairs_of`. `progress` is called with a number of
    bytes read and the name of their parameter.
    """
    started = time.perf_counter()
    begin_stage(progress, "parameters")
    weights = statistics(ck.path, _weights(ck, {pair.name for pair in pairs}), False, jobs, progress)
    begin_stage(progress, "moments")
    of_weight = {row.name: row for row in weights.rows}
    sides = [_sides(pair) for pair in pairs]
    regions = [shared_regions(tensors) if tensors else [] for tensors, _ in sides]
    names = [pair.name for pair in pairs]
    found = over_regions(regions, names, lambda n, _, bands: _update_sums_of(bands, pairs[n]), jobs, progress)
    rows = [
        _moments_row(pair, problems, one, of_weight.get(pair.name))
        for pair, (_, problems), one in zip(pairs, sides, found, strict=True)
    ]
    nbytes = weights.bytes_read + sum(one.nbytes for one in found)
    elements = weights.elements + 2 * sum(row.elements for row in rows)
    nonfinite = weights.nonfinite + sum(row.nonfinite for row in rows)
    return with_totals(ck.path, "moments", rows, started, nbytes, elements, nonfinite)


def pairs_of(ck: Checkpoint, selection: Selection) -> list[Pair]:
    """Find the selected moments of a checkpoint opened with all ranks; a selected section must be an optimizer's.

    Raises:
        UsageError: no optimizer has Adam's moments, or the selected section is not an optimizer's.
    """
    if selection.section not in ("", ALL, "optimizer", *(s.name for s in sections_of_kind(ck, "optimizer"))):
        raise UsageError(
            None, f"{spelled('moments')} shows optimizers: {spelled('section')} {selection.section} is none"
        )
    found = [pair for pair in _all_pairs(ck) if selection.section in ("", ALL, "optimizer", pair.optimizer)]
    if not found:
        raise UsageError(ck.path, f"no optimizer in it has {FIRST} and {SECOND}; see {spelled('section')} optimizer")
    return [pair for pair in found if selection.takes(pair.name)]


def _all_pairs(ck: Checkpoint) -> Iterator[Pair]:
    sections = {section.path: section.name for section in sections_of_kind(ck, "optimizer")}
    for optimizer in optimizers_of(ck).values() if sections else ():
        groups = {name: group for group in optimizer.param_groups for name in group.names}
        for key, slots in optimizer.state.items():
            name = key if isinstance(key, str) else f"?{key}"
            if isinstance(slots, Mapping):
                pair = _pair(name, sections[optimizer.path], slots, groups.get(name) or {})
                if pair.first is not None or pair.second is not None:
                    yield pair


def _pair(name: str, optimizer: str, slots: Mapping[Any, Any], group: Mapping[str, Any]) -> Pair:
    second = LARGEST if group.get("amsgrad") is True and LARGEST in slots else SECOND
    pair = [slots.get(slot) if isinstance(slots.get(slot), Tensor) else None for slot in (FIRST, second)]
    step, betas = _number(slots.get("step", group.get("step"))), group.get("betas")
    two = list(map(_number, betas)) if isinstance(betas, (list, tuple)) and len(betas) == 2 else []
    # Adam itself refuses other betas, whose powers may be complex or overflow.
    usable = [beta for beta in two if beta is not None and 0 <= beta < 1]
    corrections = tuple(1 - beta**step for beta in usable) if step is not None and step > 0 else ()
    known = corrections if len(corrections) == 2 and all(corrections) else None
    return Pair(name, optimizer, pair[0], pair[1], _number(group.get("lr")), _number(group.get("eps")), step, known)


def _number(value: Any) -> float | None:
    """Return a finite number, also from a one-element tensor; None for other values, or if it cannot be read."""
    value = scalar(value)
    if isinstance(value, Tensor):
        try:
            value = read.to_numpy(value).reshape(-1)[0].item() if value.numel == 1 else None
        except CkptoolsError:
            return None
    plain = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if plain else None


def _weights(ck: Checkpoint, names: set[str]) -> list[MeasuredPart]:
    """Find the tensors of given names in the model to look at; without one, names that occur in one model only."""
    chosen = {section.name for section in chosen_models(ck) or sections_of_kind(ck, "model")}
    mine = (e for e in tensor_entries(ck) if e.kind == "model" and e.section in chosen)
    found = by_parameter(e for e in mine if e.parameter in names)
    return [MeasuredPart(name, entry.section, entry.value) for name, entry in found.items()]


def _sides(pair: Pair) -> tuple[list[Tensor], list[tuple[str, str]]]:
    """Return both moments with located shards, or none if they cannot be read together; and their problems."""
    if pair.first is None or pair.second is None:
        return [], [("optimizer", f"has no {FIRST if pair.first is None else SECOND} for it")]
    if pair.first.shape != pair.second.shape:
        return [], [("shapes", f"{FIRST} is {shape(pair.first.shape)}, {SECOND} {shape(pair.second.shape)}")]
    found = {
        slot: readable_regions(MeasuredPart(slot, "", tensor))
        for slot, tensor in ((FIRST, pair.first), (SECOND, pair.second))
    }
    tensors = [tensor for tensor, _ in found.values() if tensor is not None]
    return tensors if len(tensors) == 2 else [], [(slot, problem) for slot, (_, problem) in found.items()]


def _update_sums_of(bands: Iterable[tuple[int, list[Values]]], pair: Pair) -> UpdateSums:
    """Sum a parameter's moments and its update, band by band."""
    sums = np.zeros(len(UpdateSums._fields))
    for _, values in bands:
        first, second = (one.astype("f8") for one in values)
        finite = np.isfinite(first) & np.isfinite(second)
        negative = finite & (second < 0)
        usable = finite & ~negative
        first, second = first[usable], second[usable]
        update = _update(first, second, pair)
        sums += UpdateSums(
            len(finite), len(first), float(first @ first), float(second.sum()), len(update), float(update @ update),
            int(negative.sum()), int((~finite).sum()),
        )  # fmt: skip
    return UpdateSums(*sums.tolist())


def _update(first: Values, second: Values, pair: Pair) -> Values:
    """Compute the updates and keep the finite ones; none if eps is unknown."""
    if pair.eps is None:
        return np.empty(0)
    one, two = pair.corrections or (1.0, 1.0)
    with np.errstate(all="ignore"):
        found: Values = (first / one) / (np.sqrt(second / two) + pair.eps)
    return found[np.isfinite(found)]


class UpdateSums(NamedTuple):
    """Sums over the elements of both moments, and numbers of elements.

    Attributes:
        usable: number of elements that are finite in both moments, with a second moment of at least 0; the sums are
            over these elements.
        first: sum of squares of the first moment; `update` likewise of the update.
        updated: number of elements with a finite update.
        nonfinite: number of elements that are NaN or infinite in one of the moments.
    """

    elements: float = 0
    usable: float = 0
    first: float = 0
    second: float = 0
    updated: float = 0
    update: float = 0
    negative: float = 0
    nonfinite: float = 0


def _moments_row(
    pair: Pair, problems: Sequence[tuple[str, str]], found: PassResult[UpdateSums], weight: Stats | None
) -> Moments:
    sums = UpdateSums(*map(math.fsum, zip(*found.results, strict=True))) if found.results else UpdateSums()
    tensor = pair.second if pair.first is None else pair.first
    assert tensor is not None
    update = _rms(sums.update, sums.updated)
    size = weight.rms if weight else None
    ratio = update * pair.lr / size if update is not None and pair.lr is not None and size else None
    return Moments(
        pair.name,
        pair.optimizer,
        tensor.shape,
        tensor.numel,
        int(sums.elements),
        size,
        _rms(sums.first, sums.usable),
        _rms(sums.second, sums.usable),
        update,
        ratio,
        pair.lr,
        pair.eps,
        pair.step,
        pair.corrections is not None,
        int(sums.negative),
        int(sums.nonfinite),
        together([("parameter", weight.problem if weight else ""), *problems, ("moments", found.problem)]),
    )


def _rms(total: float, count: float) -> float | None:
    return math.sqrt(total / count) if count else None


# -- dead rows of matrices: all zero, or never got a gradient, such as untrained tokens of an embedding ---------------


FIRST_FEW = 8
"""At most this many rows are listed."""

MAX_ROWS = 100_000_000
"""Matrices with more rows are not examined; each row takes more than a byte."""

Flags = npt.NDArray[np.bool_]


def dead_rows(
    ck: Checkpoint, entries: Sequence[Entry], jobs: int | None = None, progress: Progress | None = None
) -> Statistics[DeadRows]:
    """Find the dead rows of matrices that `matrices` selected; a matrix's row reports values that cannot be read.

    The checkpoint was opened with all ranks. `progress` is called with a number of bytes read and the name of their
    matrix.
    """
    started = time.perf_counter()
    seconds = by_parameter(entry for entry in tensor_entries(ck) if entry.slot == SECOND)
    pairs = [(e.value, seconds[e.parameter].value if e.parameter in seconds else NONE) for e in entries]
    tensors = [tensor for a, b in pairs for tensor in (a, b if b.shape == a.shape else NONE)]
    sides = [_side(tensor) for tensor in tensors]
    names = [entry.name for entry in entries for _ in range(2)]
    found = over_regions([regions for regions, _ in sides], names, _alive, jobs, progress)
    looked = [_looked(t, problem, one) for t, (_, problem), one in zip(tensors, sides, found, strict=True)]
    rows = [_dead_rows_row(*each) for each in zip(entries, looked[::2], looked[1::2], strict=True)]
    elements = sum(region.box.numel for regions, _ in sides for region in regions)
    return with_totals(ck.path, "dead rows", rows, started, sum(one.nbytes for one in found), elements)


NONE = Tensor((0, 0), "float32", ())
"""Stands for a missing second moment."""


def matrices(ck: Checkpoint, selection: Selection) -> list[Entry]:
    """Select the 2-D floating-point tensors, without quantization codes."""
    chosen = [entry for entry in tensors_chosen(ck, selection) if not entry.value.are_codes]
    return [e for e in chosen if len(e.value.shape) == 2 and e.value.numel and is_floating(e.value.dtype)]


def _side(tensor: Tensor) -> tuple[list[SharedRegion], str]:
    """Return the readable regions of a matrix, and why others cannot be read."""
    if tensor.shape[0] > MAX_ROWS:
        return [], f"it has {tensor.shape[0]} rows; at most {MAX_ROWS} are looked at"
    found, problem = readable_regions(MeasuredPart("", "", tensor))
    return shared_regions([found]) if found is not None else [], problem


def _alive(_: int, region: SharedRegion, bands: Iterable[tuple[int, list[Values]]]) -> tuple[Box, Flags]:
    """Return a region, and for each of its rows whether any element is nonzero."""
    rows, width = region.box.sizes
    alive = np.zeros(rows, np.bool_)
    for start, (values,) in bands:
        row, within = divmod(start, width)  # the first row may have begun in the band before
        edges = np.maximum(np.arange(-within, len(values), width), 0)
        alive[row : row + len(edges)] |= np.logical_or.reduceat(values != 0, edges)
    return region.box, alive


Looked = tuple[int | None, Values, str]
"""Number of rows read in full (None if no region was read), indices of dead rows, and why some rows were not read."""


def _looked(tensor: Tensor, problem: str, found: PassResult[tuple[Box, Flags]]) -> Looked:
    rows = tensor.shape[0] if found.results else 0
    seen, alive = np.zeros(rows, np.int64), np.zeros(rows, np.bool_)
    for box, flags in found.results:
        own = slice(box.offsets[0], box.offsets[0] + box.sizes[0])
        seen[own] += box.sizes[1]
        alive[own] |= flags
    whole = seen == tensor.shape[1]
    count = int(whole.sum()) if found.results else None
    return count, np.flatnonzero(whole & ~alive), problem or found.problem


def _dead_rows_row(entry: Entry, weight: Looked, second: Looked) -> DeadRows:
    (rows, zero, problem), (known, idle, unread) = weight, second
    return DeadRows(
        entry.name,
        entry.section,
        entry.value.shape,
        rows or 0,
        len(zero),
        tuple(zero[:FIRST_FEW].tolist()),
        None if known is None else len(idle),
        tuple(idle[:FIRST_FEW].tolist()),
        together([("parameter", problem), (SECOND, unread)]),
    )
