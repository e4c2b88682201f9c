"""Draw the values of one tensor as a histogram, and the largest and smallest norms of tensors as bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptools.display.drawing import (
    CHARACTER,
    WIDTH,
    Picture,
    Rect,
    label,
    legend,
    line,
    mark,
    name_text,
    rect,
    svg,
    text_lines,
)
from ckptools.dtypes import is_floating
from ckptools.pictures.heat_map import NOT_FINITE
from ckptools.stats.record import Statistics, Stats
from ckptools.text import count, number, plural

HIGH = 150.0
LEFT = 52.0
"""Width of the counts on the left of a histogram."""

MOST_TICKS = 6
ENDS = 10
"""Number of largest norms to draw, and of smallest norms."""

BAR = 30.0
"""Height of a name with its bar."""


class Bin(NamedTuple):
    """The limits of a bar, and the number of values between them."""

    low: float
    high: float
    members: int


def value_bins(found: Stats) -> tuple[Bin, ...]:
    """Make the bins of a tensor's values, equally wide from smallest to largest; none if they were not counted."""
    counts = found.histogram or ()
    if found.min is None or found.max is None or not sum(counts):
        return ()
    low, high = float(found.min), float(found.max)
    # Scale before subtracting, since the difference of two float64 may be infinite.
    edges = [low * (1 - n / len(counts)) + high * (n / len(counts)) for n in range(len(counts) + 1)]
    return tuple(Bin(edges[n], edges[n + 1], found_here) for n, found_here in enumerate(counts))


def value_histogram(found: Stats) -> Picture:
    """Draw the distribution of a tensor's values, counts on a logarithmic scale; a constant becomes a sentence."""
    bins = value_bins(found)
    title = f"values of {name_text(found.name) or 'a tensor'}"
    odd = f"{found.nan} NaN and {found.inf} infinite left out" if found.nonfinite else "all finite"
    facts = [f"{count(found.elements)} of {count(found.numel)} elements read, {odd}"]
    facts += [found.problem] if found.problem else []
    if not bins or found.min == found.max:
        facts.append(f"every value is {_short(float(found.min or 0))}" if bins else "nothing to draw")
        return _sentences(title, facts)
    facts.append(f"from {number(bins[0].low)} to {number(bins[-1].high)}, {found.zeros} zero; counts are logarithmic")
    text = "\n".join([title, *facts, *(f"{_range(one)}: {one.members}" for one in bins if one.members)])
    parts, top = text_lines(facts)
    top += 12
    parts += [*_counts(bins, top), *_values(found, bins, top)]
    for one, at in zip(bins, bar_rects(bins, top), strict=True):
        if one.members:
            bar = at.inset(0.5)._replace(height=at.height)
            parts.append(rect(bar, "sky", f"{_range(one)}: {one.members} elements"))
    parts.append(line([(LEFT, top + HIGH), (WIDTH, top + HIGH)], "edge"))
    return Picture(title, svg(title, text, [*parts, *_deviations(found, bins, top)], top + HIGH + 34), text)


def _sentences(title: str, facts: Sequence[str]) -> Picture:
    parts, bottom = text_lines(facts, "ink")
    text = "\n".join([title, *facts])
    return Picture(title, svg(title, text, parts, bottom), text)


def bar_rects(bins: Sequence[Bin], top: float = 0.0) -> Iterator[Rect]:
    """Yield the bars: side by side, with the logarithm of the count as height, and never invisible."""
    most = math.log1p(max((one.members for one in bins), default=0))
    width = (WIDTH - LEFT) / max(1, len(bins))
    for n, one in enumerate(bins):
        height = max(math.log1p(one.members) / most * HIGH, 1.0) if one.members else 0.0
        yield Rect(LEFT + n * width, top + HIGH - height, width, height)


def round_ticks(low: float, high: float) -> list[float]:
    """Find round numbers between two limits: multiples of 1, 2 or 5 times a power of ten, 0 among them."""
    span = high / MOST_TICKS - low / MOST_TICKS
    if not max(1e-290, 1e-9 * abs(low), 1e-9 * abs(high)) < span < math.inf:
        return []
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= span)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def _x(value: float, bins: Sequence[Bin]) -> float:
    low, high = bins[0].low, bins[-1].high
    return LEFT + (value / 2 - low / 2) / (high / 2 - low / 2) * (WIDTH - LEFT)


def _counts(bins: Sequence[Bin], top: float) -> Iterator[str]:
    """Draw grid lines and labels for counts of 1, 10, 100 and so on."""
    most = max(one.members for one in bins)
    powers = [10**n for n in range(len(str(most))) if 10**n <= most]
    apart = -(-len(powers) // 6)
    for power in powers[::apart]:
        y = top + HIGH - math.log1p(power) / math.log1p(most) * HIGH
        yield line([(LEFT, y), (WIDTH, y)], "grid") + label(LEFT - 6, y + 4, count(power), "faint", "end")


def _values(found: Stats, bins: Sequence[Bin], top: float) -> Iterator[str]:
    """Draw grid lines and labels for round values; a label that would touch the previous one is left out."""
    free = 0.0
    for tick in round_ticks(bins[0].low, bins[-1].high):
        x, text = _x(tick, bins), _short(tick)
        yield line([(x, top), (x, top + HIGH)], "grid")
        half = len(text) * CHARACTER / 2
        if x - half >= free and x + half <= WIDTH + 10:
            yield label(x, top + HIGH + 14, text, "faint", "middle")
            free = x + half + 8


def _deviations(found: Stats, bins: Sequence[Bin], top: float) -> Iterator[str]:
    """Mark the mean and three standard deviations on both sides of it, if within the range of values."""
    if not found.std or found.mean is None:
        return
    for times, name in ((-3, "-3\u03c3"), (0, "mean"), (3, "+3\u03c3")):
        value = found.mean + times * found.std
        if bins[0].low <= value <= bins[-1].high:
            x = _x(value, bins)
            yield line([(x, top - 4), (x, top + HIGH)], "edge dash") + label(x, top + HIGH + 28, name, "ink", "middle")


# -- norms -------------------------------------------------------------------------------------------------------------


def norm_rows(found: Statistics[Stats]) -> tuple[list[Stats], list[Stats]]:
    """Find the tensors with the largest norms and, among the rest, with the smallest."""
    known = [row for row in found.rows if is_floating(row.dtype) and row.l2 and math.isfinite(row.l2)]
    ordered = sorted(known, key=lambda row: -(row.l2 or 0))
    return ordered[:ENDS], ordered[max(ENDS, len(ordered) - ENDS) :]


def norm_bars(title: str, found: Statistics[Stats]) -> Picture:
    """Draw the ten largest and the ten smallest l2 norms of tensors, by name, on a logarithmic scale."""
    largest, smallest = norm_rows(found)
    facts = list(_norm_facts(found, len(largest) + len(smallest)))
    title = name_text(title)
    if not largest:
        return _sentences(title, [*facts, "nothing to draw"])
    shown = [*largest, *smallest]
    lines = [f"{name_text(row.name)}: {_short(row.l2 or 0)}" for row in shown]
    text = "\n".join([title, *facts, "largest:", *lines[: len(largest)], *(["smallest:"] if smallest else []),
                      *lines[len(largest) :]])  # fmt: skip
    parts, y = text_lines(facts)
    low = math.floor(math.log10(min(row.l2 or 1 for row in shown)) - 0.05)
    high = max(math.ceil(math.log10(max(row.l2 or 1 for row in shown))), low + 1)
    for n, row in enumerate(shown):
        y += 10 if n == len(largest) else 0
        parts += _norm_bar(row, y, low, high)
        y += BAR
    keys, bottom = legend([NOT_FINITE] * any(row.nonfinite for row in shown), y + 30)
    return Picture(title, svg(title, text, [*parts, *_decades(low, high, y), keys], max(y + 22, bottom)), text)


def _norm_facts(found: Statistics[Stats], drawn: int) -> Iterator[str]:
    rows = [row for row in found.rows if is_floating(row.dtype)]
    normed = [row for row in rows if row.l2 and math.isfinite(row.l2)]
    zero = sum(row.l2 == 0 for row in rows)
    left = f", of which the {drawn} at both ends are drawn" if drawn < len(normed) else ""
    yield f"{plural(len(normed), 'tensor')} with an l2 norm{left}"
    others = (
        (zero, "all zero"),
        (len(rows) - len(normed) - zero, "without a finite norm"),
        (sum(bool(row.nonfinite) for row in rows), "with NaN or infinities, which are left out of their norms"),
        (
            sum(row.l2 is not None and row.elements < row.numel for row in rows),
            "read in part, whose norm is of that part",
        ),
        (len(found.rows) - len(rows), "of integers or flags left out"),
    )
    yield from (f"{plural(n, 'tensor')} {what}" for n, what in others if n)


def _norm_x(power: float, low: int, high: int) -> float:
    return (power - low) / (high - low) * (WIDTH - 70)


def _norm_bar(row: Stats, y: float, low: int, high: int) -> Iterator[str]:
    """Draw a name, and its bar below: names of layers differ in the middle, so that none may be cut there."""
    norm = row.l2 or 1.0
    end = _norm_x(math.log10(norm), low, high)
    part = "; read in part" if row.elements < row.numel else ""
    yield label(0, y + 11, name_text(row.name, int(WIDTH / CHARACTER)))
    at, hover = Rect(0, y + 15, end, BAR - 18), f"{name_text(row.name)}: l2 {_short(norm)}{part}"
    yield rect(at, NOT_FINITE.kind, hover) + mark(at, NOT_FINITE.letter) if row.nonfinite else rect(at, "sky", hover)
    yield label(end + 6, y + 25, _short(norm), "faint")


def _decades(low: int, high: int, y: float) -> Iterator[str]:
    """Label powers of ten below the bars."""
    apart = -(-(high - low) // 5)
    for power in range(low, high + 1, apart):
        x = _norm_x(power, low, high)
        yield line([(x, y + 2), (x, y + 6)], "edge")
        yield label(x, y + 18, _short(10.0**power), "faint", "start" if power == low else "middle")


def _range(one: Bin) -> str:
    return f"{_short(one.low)} to {_short(one.high)}"


def _short(value: float) -> str:
    return number(float(f"{value:.4g}"))
