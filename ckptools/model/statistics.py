"""What `stats` found: figures of tensors' values, of what optimizers know of them, and rows that are dead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from ckptools.model.records import MAX_LINE, as_html, displayed, to_dict
from ckptools.model.regions import Ints
from ckptools.model.rows import Rows
from ckptools.text import clip, clip_middle, count, plural

Row = TypeVar("Row")

BINS = 32
"""Bins of a histogram; all are equally wide and together reach from the smallest element to the largest."""


@dataclass(frozen=True, repr=False)
class Stats:
    """Figures of the elements of a tensor, or of one rank's part of it, taken in float64.

    NaN and infinities are counted, and left out of all other figures. Those of complex elements are figures of their
    magnitudes. A figure is None where there is no finite element, and infinite where float64 cannot hold it.

    Attributes:
        name: of the tensor.
        section: of the checkpoint that it is in.
        rank: whose part of it this is; None for the whole tensor.
        dtype: torch's name.
        shape: global sizes.
        numel: elements that there should be.
        elements: elements that were read; fewer than `numel` where some are in no file here.
        rms: root of the mean square.
        l2: root of the sum of squares.
        min: the smallest element; an integer where the tensor holds integers.
        max: the largest one.
        mean: their mean.
        std: their standard deviation, as of all that there are (divided by their number, not by one less).
        zeros: how many are zero, of either sign.
        nan: how many are NaN.
        inf: how many are infinite, of either sign.
        histogram: how many of the finite ones lie in each of `BINS` bins; None where it was not asked for.
        problem: why there are no figures, or not of all elements; empty where there are.
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

    @property
    def nonfinite(self) -> int:
        """How many elements are NaN or infinite."""
        return self.nan + self.inf

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Its fields as texts, numbers, None and lists of these."""
        return to_dict(self)

    def __repr__(self) -> str:
        found = {name: getattr(self, name) for name in ("rms", "l2", "min", "max")}
        figures = ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in found.items())
        part = "" if self.elements == self.numel else f", elements={self.elements} of {self.numel}"
        told = f", problem={self.problem!r}" if self.problem else ""
        return clip(f"Stats({figures}, zeros={self.zeros}, nonfinite={self.nonfinite}{part}{told})", MAX_LINE)


@displayed
@dataclass(frozen=True)
class Moments:
    """An optimizer's moments of one parameter, as Adam keeps them, and the step that they lead to.

    Elements that are not finite, or whose second moment is negative, are counted, and left out of what is said of the
    moments and of the update.

    Attributes:
        name: of the parameter.
        optimizer: section of the checkpoint that the moments are in.
        shape: global sizes of the moments.
        numel: elements that each should have.
        elements: elements that were read of both.
        weight: rms of the parameter; None where the checkpoint does not hold it, or nothing of it is finite.
        exp_avg: rms of the first moment.
        exp_avg_sq: rms of the root of the second moment.
        update: rms of `exp_avg / (sqrt(exp_avg_sq) + eps)`; None where no eps is in the param group.
        ratio: `lr * update / weight`, how far a step moves the parameter; weight decay is not in it.
        lr: learning rate of its param group.
        eps: that of its param group.
        step: how often it was updated.
        corrected: whether the moments in `update` were divided by `1 - beta**step`; not where that is not known.
        negative: how many elements have a negative second moment.
        nonfinite: how many elements are NaN or infinite in one of both moments.
        problem: why something could not be read; empty where everything could.
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
        name: of the matrix.
        section: of the checkpoint that it is in.
        shape: its sizes.
        rows: how many rows could be looked at; fewer than it has where some are in no file here.
        zero: how many of them are all zero.
        first_zero: the first of those.
        idle: how many have a second moment that is all zero, as rows have that never got a gradient; None where the
            checkpoint holds none.
        first_idle: the first of those.
        problem: why not all rows could be looked at; empty where they could.
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
class Statistics(Generic[Row]):
    """The answer of `stats`: a row for each tensor, and what all of them together are.

    Attributes:
        path: what was looked at.
        of: what the rows tell: figures of values, of an optimizer's moments beside the model, or rows that are dead.
        tensors: how many tensors, or parts of them, were looked at.
        elements: how many elements were read.
        l2: root of the sum of squares of all finite ones in tensors of floating point, a tied one counted once; None
            where not all could be read, where ranks are looked at one by one, and where the rows tell something else.
        nonfinite: how many elements are NaN or infinite.
        incomplete: rows that have a problem: they tell nothing, or not of all elements.
        bytes_read: bytes of tensors that were read.
        seconds: wall time that this took.
        rows: the rows.
    """

    path: Path
    of: Literal["values", "moments", "dead rows"]
    tensors: int
    elements: int
    l2: float | None
    nonfinite: int
    incomplete: int
    bytes_read: int
    seconds: float
    rows: Rows[Row]

    def _told(self) -> str:
        odd = f", {self.nonfinite} NOT FINITE" if self.nonfinite else ""
        part = f", {self.incomplete} not read in full" if self.incomplete else ""
        found = f"{self.of} of {plural(self.tensors, 'tensor')}, {count(self.elements)} elements"
        return f"{clip_middle(self.path.name, 60)}: {found}{odd}{part}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per row, as pandas and polars take them."""
        return self.rows.to_dicts()
