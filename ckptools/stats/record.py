"""The record of `stats`: figures of tensors' values, of optimizers' moments, and dead rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ckptools.model.looked import Looked
from ckptools.model.problems import Severity
from ckptools.model.records import MAX_LINE, Rows, as_html, displayed, to_dict
from ckptools.model.regions import Ints
from ckptools.text import clip, clip_middle, count, plural

Row = TypeVar("Row")

Kind = Literal["values", "moments", "dead rows"]

Oddity = Literal["not finite", "all zero", "zeros", "dead rows", "denormal", "out of range", "out of line", "copy"]

BINS = 32
"""Number of bins of a histogram, equally wide from the smallest element to the largest."""


@dataclass(frozen=True, repr=False)
class Stats:
    """Figures of the elements of a tensor, or of one rank's part of it, computed in float64.

    NaN and infinities are counted, and left out of all other figures. Figures of complex elements are those of their
    magnitudes. A figure is None if there is no finite element, and infinite if it overflows float64.

    Attributes:
        rank: the rank whose part this is; None for the whole tensor.
        elements: elements that were read; fewer than `numel` if some are in no file here.
        min: the smallest element; an integer if the tensor has integers.
        std: their population standard deviation (divided by their number, not by one less).
        zeros: number of zeros, of either sign.
        histogram: number of finite elements in each of `BINS` bins; None if not requested.
        problem: why figures are missing or incomplete; empty if they are not.
        denormal: number of elements of float32, bfloat16 or float64 below the smallest normal number, zeros apart.
    """

    name: str
    section: str
    rank: int | None
    dtype: str
    shape: Ints
    numel: int
    elements: int = 0
    rms: float | None = None
    l2: float | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    histogram: tuple[int, ...] | None = None
    problem: str = ""
    denormal: int = 0

    @property
    def nonfinite(self) -> int:
        """Number of elements that are NaN or infinite."""
        return self.nan + self.inf

    _repr_html_ = as_html
    to_dict = to_dict

    def __repr__(self) -> str:
        found = {name: getattr(self, name) for name in ("rms", "l2", "min", "max")}
        figures = ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in found.items())
        part = "" if self.elements == self.numel else f", elements={self.elements} of {self.numel}"
        problem = f", problem={self.problem!r}" if self.problem else ""
        return clip(f"Stats({figures}, zeros={self.zeros}, nonfinite={self.nonfinite}{part}{problem})", MAX_LINE)


@displayed
@dataclass(frozen=True)
class Moments:
    """Adam's moments of one parameter, and the resulting step.

    Elements that are not finite, or whose second moment is negative, are counted, and left out of the figures of the
    moments and of the update.

    Attributes:
        optimizer: section of the moments in the checkpoint.
        elements: elements that were read of both moments; fewer than `numel` if some are in no file here.
        weight: rms of the parameter; None if the checkpoint lacks it, or none of its elements is finite.
        exp_avg_sq: rms of the root of the second moment.
        update: rms of `exp_avg / (sqrt(exp_avg_sq) + eps)`; None if the param group has no eps.
        ratio: `lr * update / weight`, the relative size of a step, without weight decay.
        corrected: whether the moments in `update` were divided by `1 - beta**step`; False if that is unknown.
        nonfinite: number of elements that are NaN or infinite in one of both moments.
        problem: why a part could not be read; empty if everything could.
    """

    name: str
    optimizer: str
    shape: Ints
    numel: int
    elements: int
    weight: float | None
    exp_avg: float | None
    exp_avg_sq: float | None
    update: float | None
    ratio: float | None
    lr: float | None
    eps: float | None
    step: float | None
    corrected: bool
    negative: int
    nonfinite: int
    problem: str


@displayed
@dataclass(frozen=True)
class DeadRows:
    """Rows (dimension 0) of a matrix that are all zero, or whose parameters never got a gradient.

    Attributes:
        rows: number of rows that could be read; fewer than it has if some are in no file here.
        idle: number of rows whose second moment is all zero, since they never got a gradient; None if the checkpoint
            has no second moment.
        problem: why not all rows could be read; empty if they could.
    """

    name: str
    section: str
    shape: Ints
    rows: int
    zero: int
    first_zero: Ints
    idle: int | None
    first_idle: Ints
    problem: str


@displayed
@dataclass(frozen=True)
class Suspect:
    """A tensor that is worth a look.

    Attributes:
        rank: the rank whose part it is; None for the whole tensor.
        severity: an error is not finite, or zero where it should not be.
        words: what stands out, in a line: `1 NaN, first at [12, 4031]`.
    """

    name: str
    rank: int | None
    what: Oddity
    severity: Severity
    words: str

    def _summary(self) -> str:
        return f"{self.name}: {self.words}"


NOT_ASKED = Looked(0, 0, "not asked for")


class Suspects(NamedTuple):
    """Everything that is worth a look, the worst first, and how far was looked."""

    found: tuple[Suspect, ...]
    in_range: Looked
    in_line: Looked


@displayed
@dataclass(frozen=True)
class Statistics(Generic[Row]):
    """The result of `stats`: a row for each tensor, and totals.

    Attributes:
        tensors: number of tensors, or parts of them.
        l2: root of the sum of squares of all finite elements of floating-point tensors, tied ones counted once; None if
            not all could be read, for figures by rank, and for other kinds of rows.
        incomplete: number of rows with a problem, whose figures are missing or incomplete.
        suspects: of values, what is worth a look, the worst first.
        in_range: how many weights were looked at for elements that are larger than a weight can be.
        in_line: how many tensors of layers were compared with the same tensor of other layers.
    """

    path: Path
    of: Kind
    tensors: int
    elements: int
    l2: float | None
    nonfinite: int
    incomplete: int
    bytes_read: int
    seconds: float
    rows: Rows[Row]
    suspects: Rows[Suspect] = field(default_factory=Rows)
    in_range: Looked = NOT_ASKED
    in_line: Looked = NOT_ASKED

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong: all is finite, and nothing is zero that should not be."""
        return not self.nonfinite and not any(one.severity == "error" for one in self.suspects)

    def _summary(self) -> str:
        odd = f", {self.nonfinite} NOT FINITE" if self.nonfinite else ""
        part = f", {self.incomplete} not read in full" if self.incomplete else ""
        found = f"{self.of} of {plural(self.tensors, 'tensor')}, {count(self.elements)} elements"
        return f"{clip_middle(self.path.name, 60)}: {found}{odd}{part}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per row, for `pandas.DataFrame` and the like."""
        return self.rows.to_dicts()


def with_totals(
    path: Path,
    of: Kind,
    rows: Sequence[Any],
    started: float,
    nbytes: int,
    elements: int,
    nonfinite: int = 0,
    l2: float | None = None,
    odd: Suspects | None = None,
) -> Statistics[Any]:
    """The record of some rows that were begun at a time of `perf_counter`."""
    wrong, seconds = sum(bool(row.problem) for row in rows), time.perf_counter() - started
    found = Statistics(path, of, len(rows), elements, l2, nonfinite, wrong, nbytes, seconds, Rows(rows))
    if odd is None:
        return found
    return replace(found, suspects=Rows(odd.found), in_range=odd.in_range, in_line=odd.in_line)
