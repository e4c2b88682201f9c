"""Draw a run: learning rate by step, and step by time; a bad resume shows as a break in the line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ckptools.display.drawing import WIDTH, Key, Picture, Rect, label, legend, line, mark, name_text, rect, svg
from ckptools.ls.record import CheckpointRow, RunFolder, seconds_of
from ckptools.text import few, moment_utc, number, plural

HIGH = 130.0
LEFT = 70.0
"""Height of a graph, and width of the labels on its left."""

JUMP = 10.0
"""A learning rate that changes by more than this factor between two checkpoints is a break."""

MAX_POINTS = 1000
MAX_LINES = 6
"""The last `MAX_POINTS` checkpoints are drawn, and at most `MAX_LINES` learning rates of each."""


class Point(NamedTuple):
    """One checkpoint of a run; `saved` is the time of its last file, `rates` its distinct learning rates by group."""

    name: str
    step: int | None
    saved: float | None
    rates: tuple[float, ...]
    whole: bool | None


class Break(NamedTuple):
    """Two successive checkpoints, where `after` does not continue `before`."""

    before: Point
    after: Point
    words: str


def points_of(run: RunFolder) -> tuple[Point, ...]:
    """Make points of the checkpoints of a run, in the order of saving; checkpoints without a time come last."""
    found = [_point(row) for row in run.rows]
    return tuple(sorted(found, key=lambda p: (p.saved is None, p.saved or 0.0, p.step or 0)))


def _point(row: CheckpointRow) -> Point:
    saved = None if row.saved is None else seconds_of(row.saved)
    return Point(row.name, row.step, saved, tuple(dict.fromkeys(row.lr)), row.whole)


def breaks_of(points: Sequence[Point]) -> tuple[Break, ...]:
    """Find pairs of successive checkpoints where the step goes back or stays, or a learning rate jumps."""
    timed = [point for point in points if point.saved is not None]
    stepped = [point for point in timed if point.step is not None]
    pairs = [(a, b) for a, b in pairwise(stepped) if (b.step or 0) <= (a.step or 0) and a.saved != b.saved]
    found = [Break(a, b, f"step {a.step}, then {b.step}") for a, b in pairs]
    rated = [point for point in timed if point.rates]
    found += [Break(a, b, _jump(a, b)) for a, b in pairwise(rated) if _jump(a, b)]
    return tuple(found)


def _jump(a: Point, b: Point) -> str:
    """Describe a learning rate that changes more than tenfold between two checkpoints; "" if none does."""
    if len(a.rates) != len(b.rates):
        return f"{plural(len(a.rates), 'different lr')}, then {len(b.rates)}"
    for old, new in zip(a.rates, b.rates, strict=True):
        low, high = sorted((abs(old), abs(new)))
        if low and high / low >= JUMP:
            return f"lr {number(old)}, then {number(new)}"
    return ""


def run_steps(run: RunFolder) -> Picture:
    """Draw learning rate and step of every checkpoint of a run."""
    points = points_of(run)
    breaks = breaks_of(points)
    title = f"steps and learning rates of {name_text(run.path.name or str(run.path))}"
    text = "\n".join([title, *_words(points, breaks)])
    drawn, height = _drawn(points, breaks)
    return Picture(title, svg(title, text, drawn, height), text)


def values_by_step(name: str, values: Mapping[str, float], run: RunFolder) -> Picture:
    """Draw a number of the checkpoints of a run by their steps; `values` are by the name of the checkpoint."""
    known = [point._replace(rates=(values[point.name],)) for point in points_of(run) if point.name in values]
    shown = [point for point in known if point.step is not None and math.isfinite(point.rates[0])][-MAX_POINTS:]
    shown.sort(key=lambda point: point.step or 0)
    title = f"{name_text(name, 60)} by step"
    odd = [point for point in known if not math.isfinite(point.rates[0])]
    lines = [f"  {_name(point)}: step {point.step}, {number(point.rates[0])}" for point in shown]
    lines += [f"not drawn: {few([f'{_name(point)}: {number(point.rates[0])}' for point in odd])}"] if odd else []
    text = "\n".join([title, *lines])
    if not shown:
        return Picture(title, svg(title, text, [label(0, 16, "nothing to draw: no step is known")], 24), text)
    steps = axis([point.step or 0 for point in shown], LEFT, WIDTH - 8)
    down = axis([point.rates[0] for point in shown], 18 + HIGH, 18)
    parts = [
        *_frame(0, lines[-1] if odd else "", (str(steps.low), str(steps.high)), (f"{down.low:.4g}", f"{down.high:.4g}"))
    ]
    placed = [(steps.at(point.step or 0), down.at(point.rates[0])) for point in shown]
    parts += _course(placed, shown, (), [number(point.rates[0]) for point in shown])
    keys = [Key("sky", "", "a checkpoint")] + [Key("yellow", "X", "not whole")] * any(p.whole is False for p in shown)
    made, bottom = legend(keys, HIGH + 46)
    return Picture(title, svg(title, text, [*parts, made], bottom), text)


def _words(points: Sequence[Point], breaks: Sequence[Break]) -> Iterator[str]:
    steps = [point.step for point in points if point.step is not None]
    yield plural(len(points), "checkpoint") + (f", steps {min(steps)} to {max(steps)}" if steps else ", no step known")
    if len(steps) < len(points):
        yield f"{plural(len(points) - len(steps), 'checkpoint')} without a step, not drawn"
    rates = [(point, rate) for point in points for rate in point.rates]
    if rates:
        yield f"lr {number(min(r for _, r in rates))} to {number(max(r for _, r in rates))}"
    else:
        yield "no checkpoint has a learning rate"
    for found in breaks[:8]:
        yield f"BREAK: {found.words}: {_name(found.before)} to {_name(found.after)}"
    if len(breaks) > 8:
        yield f"{len(breaks) - 8} more breaks"
    if not breaks and len(steps) > 1:
        yield "in the order of their file times the steps go up"
    odd = [_name(point) for point in points if point.whole is False]
    if odd:
        yield f"not whole: {few(odd, 8)}"
    for point in points[-12:]:
        lr = ", ".join(map(number, point.rates[:MAX_LINES])) or "unknown"
        yield f"  {_name(point)}: step {'unknown' if point.step is None else point.step}, lr {lr}"
    if len(points) > 12:
        yield f"  {len(points) - 12} before these"


def _name(point: Point) -> str:
    return name_text(point.name, 80)


class Axis(NamedTuple):
    """A range of values, and the coordinates of its ends."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Coordinate of a value; the middle if all values are equal."""
        if self.high == self.low:
            return (self.start + self.end) / 2
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Make an axis for the range of some values."""
    return Axis(min(values), max(values), start, end)


def _drawn(points: Sequence[Point], breaks: Sequence[Break]) -> tuple[list[str], float]:
    shown = [point for point in points if point.step is not None][-MAX_POINTS:]
    parts = [label(0, 12 + 16 * n, f"{found.words} ({_name(found.after)})") for n, found in enumerate(breaks[:4])]
    y = 16.0 * len(parts) + 4
    rated = [p for p in shown if p.rates and all(map(math.isfinite, p.rates))]
    if rated:
        parts += _rates(rated, breaks, y)
        y += HIGH + 46
    timed = [point for point in shown if point.saved is not None]
    if timed:
        parts += _steps(timed, breaks, y)
        y += HIGH + 46
    if not (rated or timed):
        parts.append(label(0, y + 12, "nothing to draw: no step is known"))
        y += 20
    keys = [Key("sky", "", "a checkpoint"), Key("yellow", "X", "not whole"), Key("bad", "B", "a break before it")]
    used = [True, any(p.whole is False for p in shown), bool(breaks)]
    made, bottom = legend([key for key, there in zip(keys, used, strict=True) if there and shown], y + 4)
    return [*parts, made], bottom


def _frame(top: float, title: str, across: tuple[str, str], down: tuple[str, str]) -> Iterator[str]:
    low, high = top + 18, top + 18 + HIGH
    yield label(LEFT, top + 12, title, "faint")
    yield line([(LEFT - 6, low), (LEFT - 6, high + 6), (WIDTH, high + 6)], "grid")
    yield label(LEFT - 10, low + 8, down[1], "faint", "end") + label(LEFT - 10, high + 4, down[0], "faint", "end")
    yield label(LEFT, high + 19, across[0], "faint") + label(WIDTH, high + 19, across[1], "faint", "end")


def _rates(points: Sequence[Point], breaks: Sequence[Break], top: float) -> Iterator[str]:
    """Draw every learning rate by step, in the order of saving, so that a step back is a line back."""
    steps = axis([p.step or 0 for p in points], LEFT, WIDTH - 8)
    rates = axis([rate for p in points for rate in p.rates], top + 18 + HIGH, top + 18)
    ends = f"{rates.low:.4g}", f"{rates.high:.4g}"
    yield from _frame(top, "learning rate by step", (str(steps.low), str(steps.high)), ends)
    for n in range(min(MAX_LINES, max(len(p.rates) for p in points))):
        having = [p for p in points if n < len(p.rates)]
        placed = [(steps.at(p.step or 0), rates.at(p.rates[n])) for p in having]
        yield from _course(placed, having, breaks, [f"lr {number(p.rates[n])}" for p in having])


def _course(
    placed: Sequence[tuple[float, float]], points: Sequence[Point], breaks: Sequence[Break], words: Sequence[str]
) -> Iterator[str]:
    """Draw checkpoints in the order of saving, joined by lines; a dashed line marks a break."""
    broken = {found.after for found in breaks}
    for (a, b), after in zip(pairwise(placed), points[1:], strict=True):
        yield line([a, b], "edge dash" if after in broken else "edge")
    for (x, y), p, text in zip(placed, points, words, strict=True):
        kind, letter = ("bad", "B") if p in broken else ("yellow", "X") if p.whole is False else ("sky", "")
        half = 6.5 if letter else 3.0
        at = Rect(x - half, y - half, 2 * half, 2 * half)
        yield rect(at, kind, f"{_name(p)}: step {p.step}, {text}") + mark(at, letter)


def _steps(points: Sequence[Point], breaks: Sequence[Break], top: float) -> Iterator[str]:
    times = axis([p.saved or 0.0 for p in points], LEFT, WIDTH - 8)
    steps = axis([p.step or 0 for p in points], top + 18 + HIGH, top + 18)
    when = (_moment(times.low), _moment(times.high))
    yield from _frame(top, "step by the time of its last file (UTC)", when, (str(steps.low), str(steps.high)))
    placed = [(times.at(p.saved or 0.0), steps.at(p.step or 0)) for p in points]
    yield from _course(placed, points, breaks, [_moment(p.saved or 0.0) for p in points])


def _moment(seconds: float) -> str:
    return moment_utc(seconds).replace("T", " ").rstrip("Z")
