"""The heat map: a value of every tensor as a colour.

Rectangles, lines and text need no library: importing a plotting library would take hundreds of times longer, and its
files would be ten times larger. A picture is made in two steps, from records to cells and from cells to SVG; neither
reads files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from statistics import median
from typing import Any, Literal, NamedTuple

from ckptools.diff.record import Difference
from ckptools.display.drawing import (
    CHARACTER,
    DIVERGING,
    VIRIDIS,
    WIDTH,
    Key,
    Picture,
    Rect,
    colored,
    hatched,
    label,
    legend,
    mark,
    name_text,
    rect,
    svg,
)
from ckptools.dtypes import is_floating
from ckptools.keys.entries import layer_and_role
from ckptools.stats.record import Moments, Statistics, Stats
from ckptools.text import clip_middle, number, plural, told_apart

# -- colours of values: absolute, or relative to the other values of their row ----------------------------------------


def figure_text(value: float | None) -> str:
    """Render a number in four digits."""
    return "not known" if value is None else number(float(f"{value:.4g}"))


class Scale(NamedTuple):
    """A logarithmic colour scale for positive finite values, from dark to bright."""

    low: float
    high: float

    @classmethod
    def of(cls, figures: Iterable[float | None]) -> Scale | None:
        """Make a scale for some values; None if none is positive and finite."""
        values = [value for value in figures if value is not None and drawable(value)]
        return cls(min(values), max(values)) if values else None

    def color(self, value: float, role: str = "") -> str:
        """Return the colour of a value: one of viridis's ten steps; `role` is ignored."""
        whole = math.log(self.high) - math.log(self.low)
        if not whole:
            return VIRIDIS[len(VIRIDIS) // 2]
        part = (math.log(value) - math.log(self.low)) / whole
        return VIRIDIS[min(int(part * len(VIRIDIS)), len(VIRIDIS) - 1)]

    @property
    def ramp(self) -> tuple[str, Sequence[str], str]:
        """The text before the colours, the colours, and the text after them."""
        return figure_text(self.low), VIRIDIS, figure_text(self.high)

    @property
    def usual(self) -> str:
        """The meaning of the colour in the middle; "" if it has none."""
        return ""

    @property
    def words(self) -> str:
        """Describe the scale."""
        return f"colours from {figure_text(self.low)} to {figure_text(self.high)}, logarithmic"


class RowScale(NamedTuple):
    """A colour scale for values relative to the median of their row: each step is a factor of two."""

    medians: Mapping[str, float]

    @classmethod
    def of(cls, figures: Iterable[tuple[str, float | None]]) -> RowScale | None:
        """Make a scale for values, each with its role; None if none is positive and finite."""
        rows: dict[str, list[float]] = {}
        for role, value in figures:
            if value is not None and drawable(value):
                rows.setdefault(role, []).append(value)
        return cls({role: median(values) for role, values in rows.items()}) if rows else None

    def color(self, value: float, role: str = "") -> str:
        """Return the colour of a value, relative to the median of its row (`role`)."""
        middle = len(DIVERGING) // 2
        steps = round(math.log2(value) - math.log2(self.medians[role]))
        return DIVERGING[max(0, min(len(DIVERGING) - 1, middle + steps))]

    @property
    def ramp(self) -> tuple[str, Sequence[str], str]:
        """The text before the colours, the colours, and the text after them."""
        most = 2 ** (len(DIVERGING) // 2)
        return f"1/{most} or less", DIVERGING, f"{most} x or more"

    @property
    def usual(self) -> str:
        """The meaning of the colour in the middle."""
        return "median of the row"

    @property
    def words(self) -> str:
        """Describe the scale."""
        return "colours relative to the median of the row, a step for each factor of two"


def drawable(value: float) -> bool:
    """Whether a value fits a logarithmic scale: positive and finite."""
    return value > 0 and math.isfinite(value)


# -- heat maps: a value of every tensor as a colour, layers across and roles (names without the layer number) down ----


ACROSS = 32
"""At most this many layers side by side; further ones follow below."""

MAX_ROLES = 120
MAX_CELLS = 2000
"""At most this many cells are drawn; the text covers all."""

NARROWEST, WIDEST = 160.0, 260.0
"""Narrowest and widest column of roles; it is as wide as the cells let it be."""

CELL = 17.0

Letter = Literal["", "N", "0", "=", "~", "A", "B", "?"]
MEANS: dict[Letter, str] = {
    "N": "NaN or infinities in it",
    "0": "all zero",
    "=": "equal",
    "~": "same stated checksum",
    "A": "only in A",
    "B": "only in B",
    "?": "not known",
}
"""Letters of cells that are more than a number, and their meaning."""

NOT_FINITE = Key("bad", "N", MEANS["N"])
"""The entry of the legend for a tensor with NaN, in every picture of values."""


class HeatCell(NamedTuple):
    """One tensor: its name, a value of at least 0, and a letter shown in the cell.

    `words` follow the name when the pointer is over the cell.
    """

    name: str
    value: float | None
    letter: Letter
    words: str


# -- records to cells --------------------------------------------------------------------------------------------------


def rms_cells(found: Statistics[Stats]) -> list[HeatCell]:
    """Make cells of the root mean square of every floating-point tensor, over the finite elements that were read."""
    return [_rms_cell(row) for row in found.rows if row.numel and is_floating(row.dtype)]


def _rms_cell(row: Stats) -> HeatCell:
    parts = [f"rms {figure_text(row.rms)}"]
    parts += [f"{row.nan} NaN, {row.inf} infinite of {row.elements}"] if row.nonfinite else []
    parts += [f"only {row.elements} of {row.numel} elements read"] if row.elements != row.numel else []
    unknown = row.rms is None or row.elements != row.numel
    letter: Letter = "N" if row.nonfinite else "?" if unknown else "0" if not row.rms else ""
    return HeatCell(row.name, row.rms, letter, "; ".join(parts))


def moment_cells(found: Statistics[Moments], field: Literal["update", "ratio"]) -> list[HeatCell]:
    """Make cells of the size of every parameter's next step: absolute (`update`), or relative to it (`ratio`)."""
    words = {"update": "update", "ratio": "lr*update/weight"}[field]
    return [_moment_cell(row, getattr(row, field), words) for row in found.rows if row.numel]


def _moment_cell(row: Moments, value: float | None, words: str) -> HeatCell:
    parts = [f"{words} {figure_text(value)}"]
    parts += [f"{row.nonfinite} elements not finite"] if row.nonfinite else []
    parts += [f"{row.negative} negative second moments"] if row.negative else []
    unknown = value is None or row.problem or row.elements != row.numel
    letter: Letter = "N" if row.nonfinite or row.negative else "?" if unknown else "0" if not value else ""
    return HeatCell(row.name, value, letter, "; ".join(parts))


def change_cells(difference: Difference) -> list[HeatCell]:
    """Make cells of the change of every floating-point weight relative to its norm."""
    weights = [row for row in difference.tensors if row.subject == "weights"]
    return [_change_cell(row) for row in weights if is_floating(row.dtype_a or row.dtype_b or "")]


def _change_cell(row: Any) -> HeatCell:
    letters: Mapping[str, Letter] = {
        "only in A": "A", "only in B": "B", "same": "=", "not compared": "?", "cannot be compared": "?",
        "same checksum": "~", "in neither": "?",
    }  # fmt: skip
    value = row.change if row.verdict in ("differs", "within tolerance") else None
    letter: Letter = letters.get(row.verdict, "" if value is not None else "?")
    if value is not None and not math.isfinite(value):
        letter = "N"
    words = f"change {figure_text(value)}" if value is not None else row.verdict
    return HeatCell(row.name, value, letter, f"{words}; {row.detail}" if row.detail else words)


# -- cells to a grid ---------------------------------------------------------------------------------------------------


class HeatGrid(NamedTuple):
    """Cells by role and layer.

    Attributes:
        roles: in order of appearance; roles outside of layers come last.
        layers: numbers in ascending order, after None if some tensor is outside of layers.
        cells: cell by role and layer.
    """

    roles: tuple[str, ...]
    layers: tuple[str | None, ...]
    cells: Mapping[tuple[str, str | None], HeatCell]


def heat_grid(cells: Iterable[HeatCell]) -> HeatGrid:
    """Place every cell by role and layer; if two names have the same place, the later gets a row of its own."""
    found: dict[tuple[str, str | None], HeatCell] = {}
    for cell in cells:
        layer, role = layer_and_role(cell.name)
        taken = (role, layer) in found
        found[(cell.name, None) if taken else (role, layer)] = cell
    roles = dict.fromkeys(role for role, layer in found if layer is not None)
    roles |= dict.fromkeys(role for role, layer in found if layer is None)
    layers = sorted({layer for _, layer in found}, key=lambda n: (n is not None, int(n or 0), n or ""))
    return HeatGrid(tuple(roles), tuple(layers), found)


# -- drawing -----------------------------------------------------------------------------------------------------------


def heat_map(title: str, cells: Sequence[HeatCell], absolute: bool = False) -> Picture:
    """Draw a value of every tensor: layers across, roles down. The title names the value and its subject.

    Colours are relative to the median of each row, which shows outliers; or absolute.
    """
    title = name_text(title)
    grid = heat_grid(cells)
    figures = [(role, cell.value) for (role, _), cell in grid.cells.items()]
    scale = Scale.of(value for _, value in figures) if absolute else RowScale.of(figures)
    text = "\n".join([title, *_words(cells, grid, scale)])
    drawn, height = _drawn(grid, scale)
    return Picture(title, svg(title, text, drawn, height), text)


def _words(cells: Sequence[HeatCell], grid: HeatGrid, scale: Scale | RowScale | None) -> Iterator[str]:
    layers = [layer for layer in grid.layers if layer is not None]
    yield f"{plural(len(cells), 'tensor')}, {plural(len(layers), 'layer')}, {plural(len(grid.roles), 'role')}"
    known = sorted((c for c in cells if c.value is not None and math.isfinite(c.value)), key=lambda c: c.value or 0.0)
    if scale is not None:
        yield scale.words
        yield "smallest: " + "; ".join(_named(cell) for cell in known[:3])
        yield "largest: " + "; ".join(_named(cell) for cell in reversed(known[-3:]))
    for letter, means in MEANS.items():
        such = [cell for cell in cells if cell.letter == letter]
        if such:
            shown = "; ".join(_named(cell) for cell in such[:8]) if letter != "=" else ""
            more = f" and {len(such) - 8} more" if shown and len(such) > 8 else ""
            yield f"{letter} {means}: {plural(len(such), 'tensor')}" + (f": {shown}{more}" if shown else "")


def _named(cell: HeatCell) -> str:
    return f"{name_text(cell.name, 80)} {cell.words}"


def _drawn(grid: HeatGrid, scale: Scale | RowScale | None) -> tuple[list[str], float]:
    """Draw the cells, in blocks of at most `ACROSS` layers; return the parts of the drawing and their height."""
    roles = grid.roles[:MAX_ROLES]
    blocks = [grid.layers[n : n + ACROSS] for n in range(0, len(grid.layers), ACROSS)]
    names = min(max(WIDTH - CELL * min(ACROSS, len(grid.layers)), NARROWEST), WIDEST)
    kept = blocks[: max(1, MAX_CELLS // max(1, len(roles) * ACROSS))]
    parts: list[str] = []
    y = 0.0
    for block in kept:
        shown = [role for role in roles if any((role, layer) in grid.cells for layer in block)]
        parts += _block(grid, shown, block, y, scale, names)
        y += 16 + CELL * len(shown) + 10
    left = len(grid.cells) - sum((role, layer) in grid.cells for role in roles for block in kept for layer in block)
    if left:
        parts.append(label(0, y + 11, f"{plural(left, 'tensor')} not drawn; the text lists all", "ink"))
        y += 20
    made, y = _ramp(scale, y + 4)
    letters = {cell.letter for cell in grid.cells.values() if cell.letter}
    in_part = any(cell.letter == "?" and cell.value is not None for cell in grid.cells.values())
    listed = [_key(letter, means, in_part) for letter, means in MEANS.items() if letter in letters]
    keys, bottom = legend(listed, y)
    return [*parts, made, keys], bottom


def _key(letter: Letter, means: str, in_part: bool) -> Key:
    """Make the legend entry of a letter; for cells read in part, a hatching replaces the letter."""
    if letter == "N":
        return NOT_FINITE
    return Key("hatched", "", "not read in full") if letter == "?" and in_part else Key("pale rim", letter, means)


def _block(
    grid: HeatGrid,
    roles: Sequence[str],
    layers: Sequence[str | None],
    top: float,
    scale: Scale | RowScale | None,
    names: float,
) -> Iterator[str]:
    width, room = min(CELL, (WIDTH - names) / min(ACROSS, len(grid.layers))), int((names - 6) / CHARACTER)
    yield from _ticks(grid.layers, layers, names, width, top + 11)
    above = common_beginning([role for role in grid.roles if (role, None) not in grid.cells])
    yield label(names - 6, top + 11, clip_middle(name_text(above), room), "faint", "end") if above else ""
    own = [role if (role, None) in grid.cells else role[len(above) :] for role in roles]
    for row, (role, name) in enumerate(zip(roles, told_apart(list(map(name_text, own)), room), strict=True)):
        y = top + 16 + row * CELL
        yield label(names - 6, y + 12, name, "ink", "end")
        for n, layer in enumerate(layers):
            cell = grid.cells.get((role, layer))
            if cell is not None:
                yield from _cell(cell, role, Rect(names + n * width, y, width, CELL).inset(1), scale)


def _ticks(
    every_layer: Sequence[str | None], layers: Sequence[str | None], left: float, width: float, y: float
) -> Iterator[str]:
    """Label the layers above their cells, as many as fit: every, every second, every fourth layer and so on."""
    numbered = [layer for layer in every_layer if layer is not None]
    room = (max(map(len, numbered), default=1) + 1) * CHARACTER
    apart = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n * width >= room or n == 128)
    shown = set(numbered[::apart])
    for n, layer in enumerate(layers):
        if layer is not None and layer in shown:
            yield label(left + (n + 0.5) * width, y, layer, "faint", "middle")


def common_beginning(names: Sequence[str]) -> str:
    """Return the common beginning of several names, up to a dot; "" for a single name, or if there is none."""
    words = zip(*(name.split(".")[:-1] for name in names), strict=False)
    alike = [same[0] for same in takewhile(lambda same: len(set(same)) == 1, words)]
    return "".join(f"{word}." for word in alike) if len(names) > 1 else ""


def _cell(cell: HeatCell, role: str, at: Rect, scale: Scale | RowScale | None) -> Iterator[str]:
    value, hover = cell.value, f"{name_text(cell.name)}: {cell.words}"
    if cell.letter == "?" and value is not None:  # only part of the tensor was read
        yield hatched(at, hover)
    elif scale is None or value is None or not drawable(value) or cell.letter:
        bad = cell.letter == "N"
        yield rect(at, "bad" if bad else "pale rim", hover) + mark(at, cell.letter, "on" if bad else "ink")
    else:
        yield colored(at, scale.color(value, role), hover)


def _ramp(scale: Scale | RowScale | None, y: float) -> tuple[str, float]:
    if scale is None:
        return "", y
    before, colors, behind = scale.ramp
    x = len(before) * CHARACTER + 6
    cells = [colored(Rect(x + 18 * n, y, 18, 12), color) for n, color in enumerate(colors)]
    ends = label(0, y + 10, before) + label(x + 18 * len(colors) + 6, y + 10, behind)
    below = label(x + 9 * len(colors), y + 25, scale.usual, "faint", "middle") if scale.usual else ""
    return "".join(cells) + ends + below, y + (38 if below else 24)
