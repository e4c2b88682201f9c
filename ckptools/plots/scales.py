"""The colours of figures: absolute, or relative to the others of their row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ckptools.display.drawing import DIVERGING, VIRIDIS
from ckptools.text import number


def figure_text(value: float | None) -> str:
    """A figure in four digits."""
    return "not known" if value is None else number(float(f"{value:.4g}"))


class Scale(NamedTuple):
    """The colour scale of positive finite figures, logarithmic, from dark to bright."""

    low: float
    high: float

    @classmethod
    def of(cls, figures: Iterable[float | None]) -> Scale | None:
        """The scale of some figures; None if none is positive and finite."""
        values = [value for value in figures if value is not None and drawable(value)]
        return cls(min(values), max(values)) if values else None

    def color(self, value: float, role: str = "") -> str:
        """The colour of a figure: one of viridis's ten steps, whatever its role."""
        whole = math.log(self.high) - math.log(self.low)
        if not whole:
            return VIRIDIS[len(VIRIDIS) // 2]
        part = (math.log(value) - math.log(self.low)) / whole
        return VIRIDIS[min(int(part * len(VIRIDIS)), len(VIRIDIS) - 1)]

    @property
    def ramp(self) -> tuple[str, Sequence[str], str]:
        """What stands before the colours, the colours, and what stands behind them."""
        return figure_text(self.low), VIRIDIS, figure_text(self.high)

    @property
    def words(self) -> str:
        """The scale in words."""
        return f"colours from {figure_text(self.low)} to {figure_text(self.high)}, logarithmic"


class RowScale(NamedTuple):
    """The colour scale of figures relative to the median of their row: each step is a factor of two."""

    medians: Mapping[str, float]

    @classmethod
    def of(cls, figures: Iterable[tuple[str, float | None]]) -> RowScale | None:
        """The scale of figures, each with its role; None if none is positive and finite."""
        rows: dict[str, list[float]] = {}
        for role, value in figures:
            if value is not None and drawable(value):
                rows.setdefault(role, []).append(value)
        return cls({role: median(values) for role, values in rows.items()}) if rows else None

    def color(self, value: float, role: str = "") -> str:
        """The colour of a figure in the row of a role."""
        middle = len(DIVERGING) // 2
        steps = round(math.log2(value) - math.log2(self.medians[role]))
        return DIVERGING[max(0, min(len(DIVERGING) - 1, middle + steps))]

    @property
    def ramp(self) -> tuple[str, Sequence[str], str]:
        """What stands before the colours, the colours, and what stands behind them."""
        most = 2 ** (len(DIVERGING) // 2)
        return f"1/{most} or less", DIVERGING, f"{most} x or more, of the median of the row"

    @property
    def words(self) -> str:
        """The scale in words."""
        return "colours relative to the median of the row, a step for each factor of two"


def drawable(value: float) -> bool:
    """Whether a figure has a place on a logarithmic scale."""
    return value > 0 and math.isfinite(value)
