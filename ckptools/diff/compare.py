"""`diff`: pair the keys of two checkpoints, compare each pair, and conclude whether the checkpoints are the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ckptools.diff import sides
from ckptools.diff.digest_file import is_digest_file, read_digest_file
from ckptools.diff.plain_values import container_notes, container_rows, group_rows, value_rows
from ckptools.diff.record import DIFFERENT, UNPROVEN, Difference, TensorDifference, Tolerance, ValueDifference
from ckptools.diff.sides import Contents, SideTensor, SideValue, contents_of, unsure
from ckptools.diff.tensor_values import Reading, compare_tensors, difference_of_output, is_output_of, structure_row
from ckptools.diff.tensor_values import value_rows as tensor_value_rows
from ckptools.diff.text import subject_rows
from ckptools.diff.training import ComparedTensor, training_of
from ckptools.errors import UsageError
from ckptools.files.opening import OpenFiles, check_path, path_of
from ckptools.formats.open import open_checkpoint
from ckptools.keys.entries import ALL, EVERYTHING, KINDS, Selection
from ckptools.keys.value_digests import text_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows
from ckptools.model.tensor import Tensor
from ckptools.option import spelled
from ckptools.tensor_io.fetch_ahead import Progress, no_progress, thread_count
from ckptools.text import shape
from ckptools.training_state.models import models_of, put_together, with_every_model

Row = TypeVar("Row", TensorDifference, ValueDifference)


@dataclass(frozen=True)
class Wanted:
    """The options of `ckptools.diff`: which keys to compare, and how."""

    values: bool = False
    rtol: float | None = None
    atol: float | None = None
    every_byte: bool = False
    selection: Selection = EVERYTHING
    jobs: int | None = None

    @property
    def tolerance(self) -> Tolerance | None:
        """Tolerance between values; raises UsageError if `rtol` or `atol` is not a number of at least 0."""
        if self.rtol is None and self.atol is None:
            return None
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError(None, f"{spelled(name, value)}: a tolerance is at least 0")
        return Tolerance(self.rtol or 0.0, self.atol or 0.0)

    @property
    def as_output(self) -> bool:
        """Whether an output of `consolidate` may be compared with its source: all keys and values, bit for bit."""
        return self.values and self.rtol is None and self.atol is None and self.selection == EVERYTHING


def compare(a: Checkpoint | Path, b: Checkpoint | Path, wanted: Wanted, progress: Progress | None = None) -> Difference:
    """Compare two checkpoints opened with all ranks; a path stands for a digest file.

    Raises:
        ReadError: a digest file cannot be read.
        UsageError: a tolerance is not a number of at least 0, or no selected key is on either side.
    """
    started = time.perf_counter()
    opening = sum(side.cost.seconds for side in (a, b) if not isinstance(side, Path))
    tolerance = wanted.tolerance
    if isinstance(a, Checkpoint) and isinstance(b, Checkpoint):
        a, b = _as_only_model(a, b), _as_only_model(b, a)
    read = [read_digest_file(s) if isinstance(s, Path) else s for s in (a, b)]
    read = [_as_the_other(*sides) for sides in (read, read[::-1])]
    with OpenFiles() as files:
        left, right = (contents_of(s, files) if isinstance(s, Checkpoint) else s for s in read)
        reading = Reading(files, thread_count(wanted.jobs), tolerance, wanted.every_byte, progress or no_progress)
        why_not = ""
        if isinstance(a, Checkpoint) and isinstance(b, Checkpoint) and wanted.as_output and is_output_of(a, b):
            proven = difference_of_output(a, b, (left.facts, right.facts), reading)
            if isinstance(proven, Difference):
                return replace(proven, seconds=opening + time.perf_counter() - started)
            why_not = proven
        found = _Comparison(left, right, wanted, reading).found()
    notes = (*found.notes, f"A was made of B; compared key by key: {why_not}") if why_not else found.notes
    return replace(found, notes=notes, seconds=opening + time.perf_counter() - started)


def _as_the_other(side: Checkpoint | Contents, other: Checkpoint | Contents) -> Checkpoint | Contents:
    """A side whose state dict holds several models, as one model if the other side has the names of the whole."""
    if not isinstance(side, Checkpoint):
        return side
    if isinstance(other, Checkpoint):
        return put_together(side, {str(name) for model in models_of(other) for name in model.section.value})
    return put_together(side, {str(identity[2]) for identity in other.tensors if identity[0] == "model"})


def _as_only_model(side: Checkpoint, other: Checkpoint) -> Checkpoint:
    """Of a side with one model take that one, where the user named one of several models of the other side."""
    return with_every_model(side) if len(models_of(side)) == 1 and len(models_of(other)) > 1 else side


def side_of(side: Checkpoint | str | Path) -> Checkpoint | Path:
    """Open one side of a comparison: a checkpoint with the structure of all ranks, or the path of a digest file."""
    if isinstance(side, Checkpoint):
        return side.with_all_ranks()
    check_path(side)
    if side != "" and is_digest_file(path_of(side)):
        return path_of(side)
    return open_checkpoint(side, all_ranks=True)


class _Comparison:
    """One comparison; renamed sections of B go by their names in A."""

    def __init__(self, a: Contents, b: Contents, wanted: Wanted, reading: Reading) -> None:
        self.wanted, self.reading = wanted, reading
        self.renamed = sides.renamed_sections(a, b)
        self.several = any(len(side.sections.get("model", ())) > 1 for side in (a, b))
        self.rng = {name for side in (a, b) for name in side.sections.get("rng", ())}
        known = [*KINDS, ALL, *(name for side in (a, b) for kind in KINDS for name in side.sections.get(kind, ()))]
        if wanted.selection.section not in ("", *known):
            there = ", ".join(dict.fromkeys(known))
            raise UsageError(None, f"neither has a section {wanted.selection.section!r}; there are {there}")
        if a.text_keys != b.text_keys:
            a, b = (side if side.text_keys else sides.with_text_keys(side) for side in (a, b))
        b = sides.as_in_a(b, self.renamed)
        a, b, self.alone = sides.without_models_of_one_side(a, b, wanted.selection.section)
        self.alike = a.written_by == b.written_by
        if not self.alike:
            a, b = sides.without_classes(a), sides.without_classes(b)
        self.a, self.b, self.by_order, self.unsure = sides.named_by_order(sides.unlisted(a, b), sides.unlisted(b, a))
        asked = wanted.values or wanted.every_byte or reading.tolerance is not None
        self.values = asked or a.facts.digests or b.facts.digests

    def found(self) -> Difference:
        compared, read, unread = self._tensors()
        tensors = [one.row for one in compared]
        values = list(self._values())
        complete = self.wanted.selection == EVERYTHING
        if not tensors and not values and not complete:
            section = self.wanted.selection.section
            asked = " ".join(filter(None, (self.wanted.selection.words, section and f"{spelled('section')} {section}")))
            raise UsageError(None, f"no key of A or B matches {asked}")
        subjects = Rows(subject_rows(tensors, values, self.a, self.b, complete))
        verdicts = {*(r.verdict for r in tensors), *(r.verdict for r in values), *(r.verdict for r in subjects)}
        same = False if verdicts & DIFFERENT else None if verdicts & UNPROVEN else True
        training = None
        if same is False:  # else steps that were read in two ways are no difference
            plain = [pair for pair in sides.pairs(self.a.values, self.b.values) if self._is_selected(*pair)]
            training = training_of(self.a, self.b, compared, plain, values)
        return Difference(
            self.a.facts, self.b.facts, same, self.values, self.wanted.rtol, self.wanted.atol,
            subjects, Rows(tensors), Rows(values), tuple(self._notes()), read, unread, training=training,
        )  # fmt: skip

    def _tensors(self) -> tuple[list[ComparedTensor], int, int]:
        found = [pair for pair in sides.pairs(self.a.tensors, self.b.tensors) if self._is_selected(*pair)]
        if not self.values:
            rows, read, unread = [structure_row(*pair) for pair in found], 0, 0
        else:
            rows, read, unread = tensor_value_rows(found, self.reading)
        sure = [ComparedTensor(*pair, self._surely(row, *pair)) for row, pair in zip(rows, found, strict=True)]
        return sure, read, unread

    def _values(self) -> Iterator[ValueDifference]:
        sections = dict.fromkeys(group.section for group in (*self.a.groups, *self.b.groups))
        for row in group_rows(self.a, self.b, [name for name in sections if self._takes_section("optimizer", name)]):
            if self.wanted.selection.takes(row.name):
                yield row
        for pair in sides.pairs(self.a.values, self.b.values):
            if self._is_selected(*pair):
                rows = value_rows(*pair, self.a, self.b)
                yield from (self._surely(self._with_element(row, *pair), *pair) for row in rows)
        for key, container in self.a.containers.items():
            other = self.b.containers.get(key)
            if other is not None and self._takes_section(*key[0][:2]) and self.wanted.selection.takes(container.name):
                kind, _, *path = key[0]
                yield from container_rows(
                    container, other, kind == "model" or (kind == "optimizer" and path[:1] == ["state"])
                )

    def _with_element(self, row: ValueDifference, a: SideValue | None, b: SideValue | None) -> ValueDifference:
        """Add the first differing elements to the row of two small tensors of one shape and dtype."""
        contents = [side.contents.get(row.rank) for side in (a, b) if side is not None]
        tensors = [content.value for content in contents if content is not None and isinstance(content.value, Tensor)]
        if row.verdict != "differs" or len(tensors) < 2 or len({(t.shape, t.dtype) for t in tensors}) > 1:
            return row
        (found,) = compare_tensors([(row.name, tensors[0], tensors[1])], replace(self.reading, tolerance=None))
        m = found.measures
        if m is None or m.first is None or m.values is None or m.values[0] == m.values[1]:
            return row
        if not m.first:
            return row._replace(detail="", value_a=m.values[0], value_b=m.values[1])
        texts = (text_of(tensor) for tensor in tensors)
        words = f"first at {shape(m.first)}: {m.values[0]} → {m.values[1]}"
        return row._replace(detail=words, value_a=next(texts), value_b=next(texts))

    def _takes_section(self, kind: str, name: str) -> bool:
        """Whether a section is selected by its kind, its name in A (`name`) or its name in B."""
        wanted = self.wanted.selection.section
        if kind == "rng":
            return wanted in ("", ALL, kind, *self.rng)
        return wanted in ("", ALL, kind, name) or self.renamed.get((kind, wanted)) == name

    def _is_selected(self, a: SideTensor | SideValue | None, b: SideTensor | SideValue | None) -> bool:
        found = [key for key in (a, b) if key is not None]
        section = self._takes_section(*found[0].identity[:2])
        return section and self.wanted.selection.takes(*(key.name for key in found))

    def _surely(self, row: Row, a: SideTensor | SideValue | None, b: SideTensor | SideValue | None) -> Row:
        """Turn "only in A" into "cannot be compared" if B may have the key under a number instead of a name."""
        alone = (a or b) if a is None or b is None else None
        if alone is None or len(alone.identity) != 4 or alone.identity[1] not in self.unsure:
            return row
        return row._replace(verdict="cannot be compared", detail=unsure()) if alone.identity[0] == "optimizer" else row

    def _notes(self) -> Iterator[str]:
        yield from self.by_order
        for (kind, there), here in self.renamed.items():
            several = kind == "model" and self.several
            why = "the one that is looked at on either side" if several else "the only one left on either side"
            yield f"{kind}: A's {here} is compared with B's {there}, {why}"
        yield from self.alone
        if not self.alike:
            yield "A and B keep values in different ways: a list counts as a tuple, 5 as 5.0, keys have no order"
        yield from container_notes(self.a, self.b)
        for side, contents in (("A", self.a), ("B", self.b)):
            yield from (f"{side}: {note}" for note in contents.notes)
