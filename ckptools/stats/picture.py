"""Histograms: the values of one tensor, and the norms of all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptools.display.drawing import WIDTH, Picture, Rect, label, line, name_text, rect, svg
from ckptools.dtypes import is_floating
from ckptools.stats.record import Statistics, Stats
from ckptools.text import count, number, plural

HIGH = 150.0
MAX_BINS = 160


class Bin(NamedTuple):
    """The limits of a bar, and the number of values between them."""

    low: float
    high: float
    members: int


def value_bins(found: Stats) -> tuple[Bin, ...]:
    """The bins of a tensor's values, equally wide from smallest to largest; none if they were not counted."""
    counts = found.histogram or ()
    if found.min is None or found.max is None or not sum(counts):
        return ()
    low, high = float(found.min), float(found.max)
    # Halves, since the difference of two float64 may be infinite.
    edges = [low * (1 - n / len(counts)) + high * (n / len(counts)) for n in range(len(counts) + 1)]
    return tuple(Bin(edges[n], edges[n + 1], found_here) for n, found_here in enumerate(counts))


def value_histogram(found: Stats) -> Picture:
    """Draw the distribution of a tensor's values between its extremes, from figures with a histogram."""
    bins = value_bins(found)
    title = f"values of {name_text(found.name) or 'a tensor'}"
    odd = f"{found.nan} NaN and {found.inf} infinite left out" if found.nonfinite else "all finite"
    facts = [f"{count(found.elements)} of {count(found.numel)} elements read, {odd}"]
    if bins:
        facts.append(f"from {number(bins[0].low)} to {number(bins[-1].high)}, {found.zeros} zero")
    facts += [found.problem] if found.problem else []
    return _picture(title, facts, bins, "elements")


def norm_bins(found: Statistics[Stats]) -> tuple[Bin, ...]:
    """Count the floating-point tensors with an l2 norm in each power of two, including empty bins between others."""
    norms = [row.l2 for row in _floating(found) if row.l2 and math.isfinite(row.l2)]
    powers = Counter(math.frexp(norm)[1] - 1 for norm in norms)
    if not powers:
        return ()
    return tuple(
        Bin(math.ldexp(1.0, p), 2 * math.ldexp(1.0, p), powers[p]) for p in range(min(powers), max(powers) + 1)
    )


def _floating(found: Statistics[Stats]) -> list[Stats]:
    """The tensors with a meaningful norm, without counters and masks."""
    return [row for row in found.rows if is_floating(row.dtype)]


def norm_histogram(title: str, found: Statistics[Stats]) -> Picture:
    """Draw the number of tensors with an l2 norm between each power of two and the next."""
    bins, rows = norm_bins(found), _floating(found)
    zero = sum(row.l2 == 0 for row in rows)
    counted = sum(one.members for one in bins)
    facts = [f"{plural(counted, 'tensor')} with an l2 norm; a bar for each power of two"]
    partly = sum(row.l2 is not None and row.elements < row.numel for row in rows)
    others = (
        (zero, "all zero"),
        (len(rows) - counted - zero, "without a finite norm"),
        (sum(bool(row.nonfinite) for row in rows), "with NaN or infinities, which are left out of their norms"),
        (partly, "read in part, whose norm is of that part"),
        (len(found.rows) - len(rows), "of integers or flags left out"),
    )
    facts += [f"{plural(n, 'tensor')} {what}" for n, what in others if n]
    return _picture(name_text(title), facts, bins, "tensors")


def bar_rects(bins: Sequence[Bin], top: float = 0.0) -> Iterator[Rect]:
    """The places of the bars: side by side, height relative to the fullest bin, and never invisible."""
    most = max((one.members for one in bins), default=0)
    width = WIDTH / max(1, len(bins))
    for n, one in enumerate(bins):
        height = max(one.members / most * HIGH, 1.0) if one.members else 0.0
        yield Rect(n * width, top + HIGH - height, width, height)


def _picture(title: str, facts: Sequence[str], bins: Sequence[Bin], what: str) -> Picture:
    left_out = len(bins) - MAX_BINS
    bins = bins[-MAX_BINS:]
    facts = [*facts, *([f"{plural(left_out, 'lower bin')} not drawn"] if left_out > 0 else [])]
    counts = [f"{_range(one)}: {one.members}" for one in bins if one.members]
    text = "\n".join([title, *facts, *counts])
    parts = [label(0, 12 + 16 * n, name_text(fact, 100), "faint") for n, fact in enumerate(facts)]
    y = 16.0 * len(facts) + 20
    if not bins:
        parts.append(label(0, y, "nothing to draw", "ink"))
        return Picture(title, svg(title, text, parts, y + 10), text)
    most = max(one.members for one in bins)
    parts.append(label(0, y - 6, f"highest bar: {most} {what}", "faint"))
    for one, at in zip(bins, bar_rects(bins, y), strict=True):
        if one.members:
            parts.append(rect(at.inset(0.5)._replace(height=at.height), "sky", f"{_range(one)}: {one.members} {what}"))
    parts.append(line([(0, y + HIGH), (WIDTH, y + HIGH)], "edge"))
    parts += _axis(bins, y + HIGH + 14)
    return Picture(title, svg(title, text, parts, y + HIGH + 20), text)


def _range(one: Bin) -> str:
    return f"{_short(one.low)} to {_short(one.high)}"


def _short(value: float) -> str:
    return number(float(f"{value:.4g}"))


def _axis(bins: Sequence[Bin], y: float) -> Iterator[str]:
    """Labels for the start of the first bar, the end of the last, and some between."""
    steps = max(1, len(bins) // 5)
    width = WIDTH / len(bins)
    for n in range(0, len(bins), steps):
        if n * width < WIDTH - 150 or n == 0:
            yield label(n * width, y, _short(bins[n].low), "faint", "start" if n == 0 else "middle")
    yield label(WIDTH, y, _short(bins[-1].high), "faint", "end")
