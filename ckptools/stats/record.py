"""The record of `stats`: statistics of tensor values, Adam's moments, dead rows, and tensors worth a look."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

from ckptools.display.page import PagedRecord, ScreenPage
from ckptools.display.screen import Mark
from ckptools.display.tables import NAME_ROOM, Column
from ckptools.dtypes import short
from ckptools.model.problems import Severity
from ckptools.model.records import MAX_LINE, Looked, Rows, as_html, displayed, grouped, to_dict
from ckptools.model.regions import Ints
from ckptools.text import clip, clip_middle, count, encodable, first_few, plural, printable, shape

Row = TypeVar("Row")

Kind = Literal["values", "moments", "dead rows"]

Oddity = Literal["not finite", "all zero", "zeros", "out of range", "out of line", "denormal", "dead rows", "copy"]

ODDITIES: tuple[Oddity, ...] = get_args(Oddity)
"""All oddities, the worst first."""

BINS = 32
"""Number of bins of a histogram, equally wide from the smallest element to the largest."""


@dataclass(frozen=True, repr=False)
class Stats:
    """Statistics of the elements of a tensor, or of one rank's shards of it, computed in float64.

    NaN and infinite elements are counted, and left out of all other statistics. Statistics of complex elements are
    of their magnitudes. A value is None without finite elements, and infinite if it overflows float64.

    Attributes:
        rank: rank of the shards; None for the whole tensor.
        elements: number of elements read; fewer than `numel` if files are missing.
        min: smallest element; an integer if the tensor has integers.
        std: population standard deviation (divided by the number of elements, not by one less).
        zeros: number of zeros, of either sign.
        histogram: number of finite elements in each of `BINS` bins; None if not requested.
        problem: why statistics are missing or incomplete; empty if they are not.
        denormal: number of nonzero float32, bfloat16 or float64 elements below the smallest normal number.
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

    Elements that are NaN or infinite, or have a negative second moment, are counted, and left out of the statistics of
    moments and update.

    Attributes:
        optimizer: section of the moments in the checkpoint.
        elements: number of elements read from both moments; fewer than `numel` if files are missing.
        weight: rms of the parameter; None if the checkpoint lacks it, or it has no finite element.
        exp_avg_sq: rms of the root of the second moment.
        update: rms of `exp_avg / (sqrt(exp_avg_sq) + eps)`; None if the param group has no eps.
        ratio: `lr * update / weight`, the relative size of a step, without weight decay.
        corrected: whether `update` divides the moments by `1 - beta**step`; False if step or betas are unknown.
        nonfinite: number of elements that are NaN or infinite in one of the moments.
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
    """Dead rows (dimension 0) of a matrix: all zero, or without any gradient so far.

    Attributes:
        rows: number of rows that could be read; fewer than the matrix has if files are missing.
        idle: number of rows that never got a gradient, as their second moment is all zero; None if the checkpoint has
            no second moment.
        problem: why some rows could not be read; empty if all could.
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
    """A tensor worth a look: with NaN, zeros, outliers, or values unlike other layers'.

    Attributes:
        rank: rank of the suspect shard; None for the whole tensor.
        severity: an error if values are not finite, or zero where they should not be.
        words: the oddity, in a line: `1 NaN, first at [12, 4031]`.
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
    """All tensors worth a look, the worst first, and how many tensors were examined."""

    found: Rows[Suspect] = Rows()
    in_range: Looked = NOT_ASKED
    in_line: Looked = NOT_ASKED


NOT_LOOKED = Suspects()


@displayed
@dataclass(frozen=True)
class Statistics(PagedRecord, Generic[Row]):
    """The record of `stats`: a row for each tensor, and totals.

    Attributes:
        l2: l2 norm of all floating-point tensors, over finite elements, tied tensors counted once; None if some could
            not be read, and for statistics of several models, by rank, of moments or of dead rows.
        incomplete: number of rows with a problem, whose statistics are missing or incomplete.
        suspects: tensors worth a look, the worst first; only for statistics of values.
        in_range: how many weights were examined for elements too large for a weight.
        in_line: how many tensors were compared with the same tensor of other layers.
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
        """Whether all values are finite, and none is zero where it should not be."""
        return not self.nonfinite and not any(one.severity == "error" for one in self.suspects)

    def _fill(self, page: ScreenPage, ascii: bool = False) -> None:
        if self.suspects:
            page.line("worth a look", "heading")
        fill_suspects(page, self.suspects)
        page.gap()
        fill_rows(page, self, ascii)

    def _summary(self) -> str:
        odd = f", {self.nonfinite} NOT FINITE" if self.nonfinite else ""
        part = f", {self.incomplete} not read in full" if self.incomplete else ""
        found = f"{self.of} of {plural(self.tensors, 'tensor')}, {count(self.elements)} elements"
        return f"{clip_middle(self.path.name, 60)}: {found}{odd}{part}"


def with_totals(
    path: Path,
    of: Kind,
    rows: Sequence[Any],
    started: float,
    nbytes: int,
    elements: int,
    nonfinite: int = 0,
    l2: float | None = None,
    odd: Suspects = NOT_LOOKED,
) -> Statistics[Any]:
    """Make the record from rows, and measure the time since `started`, a value of `perf_counter`."""
    wrong, seconds = sum(bool(row.problem) for row in rows), time.perf_counter() - started
    return Statistics(path, of, len(rows), elements, l2, nonfinite, wrong, nbytes, seconds, Rows(rows), *odd)


# -- the parts of its page ---------------------------------------------------------------------------------------------


MAX_PROBLEMS = 5
"""At most this many rows with problems on a terminal."""

MAX_SUSPECTS = 20
"""At most this many lines of tensors worth a look on a terminal."""

MANY = 4
"""From this number on, suspects with the same words share a line."""

BLOCKS, PLAIN = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
"""Characters of a histogram's bins, from empty to fullest: Unicode and ASCII."""


class Field(NamedTuple):
    """A column of statistics, and a function that makes a row's cell in it."""

    column: Column
    cell: Callable[[Any], str]


def fill_suspects(page: ScreenPage, suspects: Sequence[Suspect]) -> None:
    """Add the tensors worth a look; several with the same words share a line."""
    rows: list[tuple[Mark, str, str]] = []
    for same in grouped(suspects, lambda one: (one.what, one.severity, one.words)).values():
        alone = same if len(same) < MANY else same[:1]
        more = f" and {plural(len(same) - 1, 'other')}" if len(same) >= MANY else ""
        mark: Mark = "bad" if same[0].severity == "error" else "warn"
        rows += [(mark, whose(one) + more, one.words) for one in alone]
    shown = rows if page.screen.rows is None else rows[:MAX_SUSPECTS]
    widest = max((len(name) for _, name, _ in shown), default=0)
    longest = max((len(words) for _, _, words in shown), default=0)
    width = page.screen.width or widest + longest + 4
    room = min(widest, max(NAME_ROOM, width // 2, width - longest - 4))
    for mark, name, words in shown:
        page.line(words, mark, label=f"  {name:{room}}  ", label_mark="")
    _count_more(page, len(rows) - len(shown))


def fill_rows(page: ScreenPage, found: Statistics[Any], ascii: bool = False) -> None:
    """Add a table, the problems of its rows, and totals; `ascii` draws histograms without block characters.

    Of dead rows, the table has only matrices with some.
    """
    fields = {"values": _of_values(found.rows, ascii), "moments": MOMENTS, "dead rows": DEAD}[found.of]
    rows: Sequence[Any] = found.rows
    if found.of == "dead rows":
        rows = [row for row in rows if row.zero or row.idle]
    elif any(row.elements != row.numel for row in rows):
        fields = (*fields, READ)
    cells = [[field.cell(row) for field in fields] for row in rows]
    title = f"{found.of} of {plural(found.tensors, 'tensor')}"
    page.table(title, [field.column for field in fields], cells, opened=True)
    page.gap()
    wrong: Sequence[Any] = [row for row in found.rows if row.problem]
    shown = wrong if page.screen.rows is None else wrong[:MAX_PROBLEMS]
    if wrong:
        page.line("not read, or not in full:", "bad")
    for row in shown:
        page.line(f"{whose(row)}: {row.problem}", label="  ")
    _count_more(page, len(wrong) - len(shown))
    page.gap()
    left = found.tensors - len(found.rows)
    for text in [*([f"{left} more (--limit 0 shows all)"] if left else []), *summary(found)]:
        page.line(text, "values" if found.nonfinite else "dim")


def _count_more(page: ScreenPage, left: int) -> None:
    if left:
        page.lines([f"  {left} more; all of them when piped, as in | less"])


def summary(found: Statistics[Any]) -> list[str]:
    """Render totals over all rows."""
    return {"values": _values_summary, "moments": _moments_summary, "dead rows": _dead_summary}[found.of](found)


def _of_values(rows: Sequence[Any], ascii: bool) -> tuple[Field, ...]:
    ranks = (RANK,) if any(getattr(row, "rank", None) is not None for row in rows) else ()
    if any(getattr(row, "histogram", None) is not None for row in rows):
        drawn = Field(Column("histogram", "number"), lambda row: histogram(row.histogram or (), ascii))
        return (NAME, *ranks, MIN, drawn, MAX, NOT_FINITE)
    return (NAME, *ranks, DTYPE, SHAPE, RMS, L2, MIN, MAX, MEAN, STD, ZEROS, NOT_FINITE)


def whose(row: Any) -> str:
    """Name the subject of a row: a tensor, or one rank's part of it."""
    rank = getattr(row, "rank", None)
    return printable(row.name) if rank is None else f"{printable(row.name)} of rank {rank}"


def _values_summary(found: Statistics[Any]) -> list[str]:
    what = "part" if any(row.rank is not None for row in found.rows) else "tensor"
    parts = [plural(found.tensors, what), f"{count(found.elements)} elements"]
    parts += [f"l2 {figure(found.l2)}"] if found.l2 else []
    rules = (("no odd values", found.in_range), ("no odd layers", found.in_line)) if found.tensors else ()
    unlooked = [f"{name}: {looked.result}: {looked.words}" for name, looked in rules if looked.words]
    return [", ".join([*parts, *_odd(found)]), *unlooked]


def _moments_summary(found: Statistics[Any]) -> list[str]:
    rows = found.rows
    corrected = sum(row.corrected for row in rows)
    how = "with bias correction" if corrected == len(rows) else "without bias correction (no step or betas known)"
    mixed = f"with bias correction for {corrected} of {len(rows)} parameters"
    lines = [f"update: rms of exp_avg / (sqrt(exp_avg_sq) + eps), {how if corrected in (0, len(rows)) else mixed}"]
    unknown = sum(row.eps is None for row in rows)
    lines += [f"no update for {plural(unknown, 'parameter')}: no eps in a param group"] if unknown else []
    negative = sum(row.negative for row in rows)
    parts = [plural(found.tensors, "parameter"), f"{negative} negative second moments" if negative else ""]
    return [*lines, ", ".join([part for part in parts if part] + _odd(found))]


def _dead_summary(found: Statistics[Any]) -> list[str]:
    dead = sum(bool(row.zero or row.idle) for row in found.rows)
    counted = f"{plural(len(found.rows), 'matrix', 'matrices')}, {dead or 'none'} with dead rows"
    return [counted + (f", {found.incomplete} not read in full" if found.incomplete else "")]


def _odd(found: Statistics[Any]) -> list[str]:
    """Count elements that are not finite, and rows with incomplete statistics."""
    sections = list(dict.fromkeys(getattr(row, "section", "") or getattr(row, "optimizer", "") for row in found.rows))
    of = f"{printable(sections[0])}: " if len(sections) == 1 and sections[0] else ""
    nothing_read = found.incomplete and not found.elements
    finite = [f"{of}{f'{found.nonfinite} not finite' if found.nonfinite else 'all finite'}"]
    finite = finite if found.tensors and not nothing_read else []
    return [*finite, *([f"{found.incomplete} not read in full"] if found.incomplete else [])]


def figure(value: float | None) -> str:
    """Render a number with four digits, an integer with up to seven; None as `-`."""
    if value is None:
        return "-"
    if isinstance(value, int) and abs(value) < 10**7:
        return str(value)
    return f"{value + 0.0:.4g}"


def share(part: int, whole: int) -> str:
    """Render a number of elements as a share of all: `0`, `<0.01%`, `12.5%`, `>99.9%`, `all`."""
    if part in (0, whole) or not whole:
        return "all" if part and part == whole else "0"
    percent = 100 * part / whole
    return "<0.01%" if percent < 0.01 else ">99.9%" if percent > 99.9 else f"{percent:.3g}%"


def not_finite(row: Stats) -> str:
    """Count NaN and infinite elements in words: `0`, `3 NaN, 1 Inf`."""
    return ", ".join([f"{n} {kind}" for n, kind in ((row.nan, "NaN"), (row.inf, "Inf")) if n]) or "0"


def histogram(counts: Sequence[int], ascii: bool = False) -> str:
    """Draw a character for each bin, by its height relative to the fullest; a nonempty bin is never blank."""
    signs, most = PLAIN if ascii else BLOCKS, max(counts, default=0)
    return "".join(signs[-(-n * (len(signs) - 1) // most)] if n else signs[0] for n in counts)


def drawable(encoding: str | None) -> bool:
    """Whether a stream with this encoding can print the blocks of a histogram."""
    return encodable(BLOCKS, encoding) == BLOCKS


NAME = Field(Column("name", "name"), lambda row: row.name)
RANK = Field(Column("rank", "number"), lambda row: "-" if row.rank is None else str(row.rank))
DTYPE = Field(Column("dtype", "text", 1), lambda row: short(row.dtype))
SHAPE = Field(Column("shape", "number", 2), lambda row: shape(row.shape))
RMS = Field(Column("rms", "number"), lambda row: figure(row.rms))
L2 = Field(Column("l2", "number", 5), lambda row: figure(row.l2))
MIN = Field(Column("min", "number"), lambda row: figure(row.min))
MAX = Field(Column("max", "number"), lambda row: figure(row.max))
MEAN = Field(Column("mean", "number", 4), lambda row: figure(row.mean))
STD = Field(Column("std", "number", 3), lambda row: figure(row.std))
ZEROS = Field(Column("zeros", "number", 6), lambda row: share(row.zeros, row.elements))
NOT_FINITE = Field(Column("non-finite", "faults"), not_finite)
READ = Field(Column("read", "number"), lambda row: share(row.elements, row.numel))

MOMENTS = (
    NAME,
    Field(Column("weight", "number"), lambda row: figure(row.weight)),
    Field(Column("exp_avg", "number", 3), lambda row: figure(row.exp_avg)),
    Field(Column("sqrt(exp_avg_sq)", "number", 2), lambda row: figure(row.exp_avg_sq)),
    Field(Column("update", "number"), lambda row: figure(row.update)),
    Field(Column("lr*update/weight", "number"), lambda row: figure(row.ratio)),
    Field(Column("negative", "faults"), lambda row: str(row.negative)),
    Field(Column("non-finite", "faults", 5), lambda row: str(row.nonfinite)),
)
"""Columns of the moments table; all values are root mean squares."""

DEAD = (
    NAME,
    SHAPE,
    Field(Column("rows", "number", 3), lambda row: str(row.rows)),
    Field(Column("zero", "number"), lambda row: str(row.zero)),
    Field(Column("no gradient", "number"), lambda row: "-" if row.idle is None else str(row.idle)),
    Field(Column("which"), lambda row: which_rows(row)),
)
"""The columns of dead rows."""


def which_rows(row: DeadRows) -> str:
    """List the first dead rows: `zero 3, 7 …, no gradient 9`."""
    kinds = [
        f"{what} {first_few(first)}{' …' if n > len(first) else ''}"
        for what, n, first in (("zero", row.zero, row.first_zero), ("no gradient", row.idle or 0, row.first_idle))
        if n
    ]
    return ", ".join(kinds)
