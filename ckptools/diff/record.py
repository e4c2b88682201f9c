"""The record of `diff`: a row for each subject, tensor and plain value, and measures of differences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from ckptools.display.page import PagedRecord, ScreenPage
from ckptools.keys.pairing import Proof
from ckptools.model.records import Rows, displayed
from ckptools.model.regions import Ints
from ckptools.option import in_python
from ckptools.text import clip_middle, few

if TYPE_CHECKING:
    from ckptools.pictures.plots import DifferencePlots

Verdict = Literal[
    "same", "same checksum", "within tolerance", "not compared", "differs", "only in A", "only in B",
    "cannot be compared", "in neither",
]  # fmt: skip
"""`same checksum`: both files state the same CRC-32 for equal zip entries, and no byte was read; `not compared`: name,
shape and dtype are the same, and the user did not ask for values."""

DIFFERENT = frozenset({"differs", "only in A", "only in B", "cannot be compared"})
"""Verdicts that make two checkpoints differ; a key that cannot be compared counts as different."""

UNPROVEN = frozenset({"same checksum", "not compared"})
"""Verdicts that leave open whether values are equal."""

Subject = Literal[
    "weights", "other models", "moments", "optimizer steps", "lr", "hyperparameters", "scheduler", "rng",
    "data position", "counters", "other tensors", "other values", "files",
]  # fmt: skip
"""Topics of keys; topics that may explain a jump of the loss come first."""

SUBJECTS: tuple[Subject, ...] = get_args(Subject)


@displayed
class Side(NamedTuple):
    """One side of the comparison.

    Attributes:
        saved_as: how it was saved, in words.
        world_size: number of ranks that saved it; None if unknown.
        layout: how its model is sharded, in words.
        digests: whether it is a digest file instead of a checkpoint.
    """

    path: str
    name: str
    saved_as: str
    step: int | None
    world_size: int | None
    layout: tuple[str, ...]
    digests: bool = False


@displayed
class SubjectRow(NamedTuple):
    """One subject, such as the weights or the random states, in a line.

    Attributes:
        same: number of keys that are the same, by their bytes, a digest or a tolerance.
        different: number of keys that differ, are on one side only, or cannot be compared.
        open: number of keys not compared, or only by a stated checksum.
        detail: the differences, in a few words.
    """

    subject: Subject
    verdict: Verdict
    same: int
    different: int
    open: int
    detail: str


@displayed
class TensorDifference(NamedTuple):
    """The comparison of one tensor; measures are in float64, of elements read on both sides.

    Attributes:
        name: in A, or in B if A lacks the tensor.
        name_b: name in B; None if B lacks the tensor.
        shape_a: sizes in A; like the other fields `_a` and `_b`, None if that side lacks the tensor.
        layout_a: how it is sharded in A, in words.
        compared: number of elements whose bytes were compared; 0 if digests were.
        differing: number of differing elements: of the same dtype, in any bit.
        change: l2 norm of the difference divided by the l2 norm of A; None if not measured.
        max: largest absolute difference; of complex numbers, of a real or imaginary part.
        cosine: of the angle between A and B as vectors.
        first: index of the first differing element.
        value_a: that element in A, with every digit; a text.
        nonfinite_a: number of elements in A that are NaN or infinite; None if no byte was read.
    """

    name: str
    subject: Subject
    verdict: Verdict
    detail: str = ""
    name_b: str | None = None
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    dtype_a: str | None = None
    dtype_b: str | None = None
    layout_a: str | None = None
    layout_b: str | None = None
    compared: int = 0
    differing: int | None = None
    change: float | None = None
    max: float | None = None
    cosine: float | None = None
    first: tuple[int, ...] | None = None
    value_a: str | None = None
    value_b: str | None = None
    nonfinite_a: int | None = None
    nonfinite_b: int | None = None


NOT_FINITE = "not finite, in no measure"
"""Detail of a tensor with NaN or infinite elements, which no measure includes."""


def holds_integers(row: TensorDifference) -> bool:
    """Whether a tensor holds integers or booleans, such as a counter or a mask."""
    return (row.dtype_a or row.dtype_b or "").startswith(("int", "uint", "bool"))


def most_changed(rows: Iterable[TensorDifference]) -> Rows[TensorDifference]:
    """Sort tensors by relative change, the largest first; integers, such as counters, come last.

    Tensors without measures come first: on one side only, of different shapes, or not finite.
    """

    def place(row: TensorDifference) -> tuple[int, float]:
        if row.verdict not in ("differs", "within tolerance") or row.shape_a != row.shape_b:
            return 0, 0.0
        return 1 if NOT_FINITE in row.detail else 3 if holds_integers(row) else 2, -(row.change or 0.0)

    return Rows(sorted(rows, key=place))


@displayed
class ValueDifference(NamedTuple):
    """The comparison of one plain value: a hyperparameter, a counter, the state of a random generator.

    Attributes:
        name: in A, or in B if A lacks the value.
        rank: rank of the value if ranks differ; else None.
        value_a: the value in A, in a few words; None if A lacks it.
    """

    name: str
    subject: Subject
    verdict: Verdict
    detail: str = ""
    rank: int | None = None
    value_a: str | None = None
    value_b: str | None = None


SAME_STEP = "weights moved, and the step did not"
"""One of the things that do not look like training."""


@displayed
class Training(NamedTuple):
    """Whether B looks like another step of the training of A, judged by the keys that were compared.

    Attributes:
        steps: step of B minus step of A; None if a side states none.
        looks_normal: True if the steps differ, every weight that has optimizer state moved, and nothing is odd; False
            if something is odd; None if that is not known, such as when values of weights were not compared.
        weights: number of weights whose values were compared, or digests of them.
        moved: number of these that differ.
        measured: number of these whose relative change is known for the whole tensor.
        median: median of the relative changes.
        largest: largest relative change, of the tensor `largest_name`.
        optimizer_steps: number of optimizer steps that were compared.
        optimizer_steps_moved: number of these that differ.
        lr: distinct learning rates, each as a text of A and of B.
        odd: what does not look like training.
        unsure: what may be training or not.
    """

    steps: int | None
    looks_normal: bool | None
    weights: int
    moved: int
    measured: int
    median: float | None
    largest: float | None
    largest_name: str
    optimizer_steps: int
    optimizer_steps_moved: int
    lr: tuple[tuple[str, str], ...]
    odd: tuple[str, ...]
    unsure: tuple[str, ...]


@displayed
@dataclass(frozen=True)
class Difference(PagedRecord):
    """The difference between two checkpoints, A and B.

    Attributes:
        same: False if anything differs or cannot be compared; True if everything was compared and is equal (or
            within the given tolerance); None if nothing differs but not every value was compared.
        values_compared: whether values of tensors were compared.
        rtol: relative tolerance; None if values had to be equal bit for bit.
        subjects: a row for each subject, the likeliest cause of a jump of the loss first.
        notes: assumed names, prefixes of wrappers that were ignored, and differences that do not count.
        bytes_read: bytes of tensors read, on both sides.
        bytes_not_read: bytes on both sides that were not read, as their stated checksums are equal.
        proof: if an output of `consolidate` (A) was compared with its source (B) element by element, through renames,
            rearrangements, cuts and casts: the counts; None if keys were compared.
        training: whether B looks like another step of the training of A; None if nothing tells.
    """

    a: Side
    b: Side
    same: bool | None
    values_compared: bool
    rtol: float | None
    atol: float | None
    subjects: Rows[SubjectRow]
    tensors: Rows[TensorDifference]
    values: Rows[ValueDifference]
    notes: tuple[str, ...] = ()
    bytes_read: int = 0
    bytes_not_read: int = 0
    seconds: float = 0.0
    proof: Proof | None = None
    training: Training | None = None

    @property
    def plot(self) -> DifferencePlots:
        """Pictures of the difference: `difference.plot.heat()`."""
        from ckptools.pictures.plots import DifferencePlots

        return DifferencePlots(self)

    @in_python
    def report(self, out: str | Path, *, force: bool = False) -> Path:
        """Write a page of HTML that shows what differs; `force` overwrites the file.

        Raises:
            OutputExistsError: the file exists.
            UsageError: the name does not end in `.html`, or its folder does not exist.
            WriteError: the file cannot be written.
        """
        from ckptools.report.difference import write_difference_report

        write_difference_report(self, out, force=force)
        return Path(out)

    def _fill(self, page: ScreenPage) -> None:
        from ckptools.diff.text import fill_difference

        fill_difference(page, self, most_changed(self.tensors))

    def _summary(self) -> str:
        found = {True: "the same", False: self.unlike, None: "nothing that was compared differs"}[self.same]
        return f"{clip_middle(self.a.name, 30)} and {clip_middle(self.b.name, 30)}: {found}"

    @property
    def unlike(self) -> str:
        """Name the subjects that differ, and the subjects that could not be compared and so may be the same."""
        found = [row.subject for row in self.subjects if row.verdict in DIFFERENT - {"cannot be compared"}]
        open_ = [row.subject for row in self.subjects if row.verdict == "cannot be compared"]
        parts = [f"different: {few(found, 12)}" if found else "not proven the same"]
        return "; ".join([*parts, f"cannot be compared: {few(open_, 12)}"] if open_ else parts)

    @property
    def rows(self) -> Rows[Any]:  # type: ignore[override]  # made from two fields
        """Every tensor and every plain value; both kinds of rows have name, subject, verdict and detail."""
        return Rows([*self.tensors, *self.values])


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed distance of values: `|a - b| <= atol + rtol * |b|`, as in numpy and torch."""

    rtol: float = 0.0
    atol: float = 0.0


@dataclass
class Measures:
    """Measures of the difference of two tensors, or of a region of them.

    Attributes:
        outside: number of elements that differ by more than the tolerance.
        nonfinite: number of elements that are NaN or infinite on either side; the measures below leave them out.
        nonfinite_a: number of elements of A that are NaN or infinite; `nonfinite_b` likewise of B.
        dd: sum of squares of the differences.
        aa: sum of squares of A; `bb` likewise of B.
        first: index of the first differing element.
        values: that element in A and in B, with every digit.
    """

    compared: int = 0
    differing: int = 0
    outside: int = 0
    nonfinite: int = 0
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    max: float = 0.0
    dd: float = 0.0
    aa: float = 0.0
    bb: float = 0.0
    first: Ints | None = None
    values: tuple[str, str] | None = None

    def add(self, other: Measures) -> None:
        """Add the measures of another region."""
        for name in ("compared", "differing", "outside", "nonfinite", "nonfinite_a", "nonfinite_b", "dd", "aa", "bb"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max = max(self.max, other.max)
        if other.first is not None and (self.first is None or other.first < self.first):
            self.first, self.values = other.first, other.values

    @property
    def change(self) -> float | None:
        """Norm of the difference divided by the norm of A; None if A is 0 or the result overflows."""
        return _finite(math.sqrt(self.dd / self.aa)) if self.aa > 0 and self.dd >= 0 else None

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between A and B; None if one of them is 0."""
        # a * b = (a * a + b * b - (a - b) * (a - b)) / 2
        norms = math.sqrt(self.aa) * math.sqrt(self.bb)
        return _finite(max(-1.0, min(1.0, (self.aa + self.bb - self.dd) / 2 / norms))) if norms > 0 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
