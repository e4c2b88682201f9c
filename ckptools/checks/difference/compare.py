"""The comparison itself: two sides, their keys in pairs, a row for each, and what follows for the whole."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ckptools.checks.difference.chosen import Chosen
from ckptools.checks.difference.digest_file import read_digest_file
from ckptools.checks.difference.held_keys import contents_of
from ckptools.checks.difference.measures import Tolerance
from ckptools.checks.difference.numbered import UNSURE, named_by_order
from ckptools.checks.difference.pairs import as_in_a, pairs, renamed_sections, unlisted, with_text_keys
from ckptools.checks.difference.plain_values import group_rows, value_rows
from ckptools.checks.difference.sides import Contents, HeldTensor, HeldValue
from ckptools.checks.difference.subjects import subject_rows
from ckptools.checks.difference.tensor_rows import Reading, structure_row
from ckptools.checks.difference.tensor_rows import value_rows as tensor_value_rows
from ckptools.contents.selection import EVERYTHING, Selection
from ckptools.errors import UsageError
from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.difference import DIFFERENT, UNPROVEN, Difference, TensorDifference, ValueDifference, Verdict
from ckptools.model.rows import Rows
from ckptools.tensor_io.progress import Progress, not_told
from ckptools.tensor_io.threads import thread_count

Row = TypeVar("Row", TensorDifference, ValueDifference)


@dataclass(frozen=True)
class Wanted:
    """What of two checkpoints is compared.

    Attributes:
        values: read and compare the values of tensors.
        rtol: relative tolerance; None for none.
        atol: absolute tolerance.
        every_byte: read also what has the same stated checksum on both sides.
        selection: which keys.
        jobs: threads; None for one per core, at most eight.
    """

    values: bool = False
    rtol: float | None = None
    atol: float | None = None
    every_byte: bool = False
    selection: Selection = EVERYTHING
    jobs: int | None = None

    @property
    def tolerance(self) -> Tolerance | None:
        """How far values may be apart.

        Raises:
            UsageError: one of the two is no number that is at least 0.
        """
        if self.rtol is None and self.atol is None:
            return None
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError(None, f"--{name} {value}: a tolerance is at least 0")
        return Tolerance(self.rtol or 0.0, self.atol or 0.0)


def compare(a: Checkpoint | Path, b: Checkpoint | Path, wanted: Wanted, progress: Progress | None = None) -> Difference:
    """Compare two checkpoints of which every rank was read; a path is that of a file of digests.

    Raises:
        ReadError: a file of digests cannot be read.
        UsageError: a tolerance is none, or nothing was asked for that either holds.
    """
    started = time.perf_counter()
    opening = sum(side.cost.seconds for side in (a, b) if not isinstance(side, Path))
    tolerance = wanted.tolerance
    with OpenFiles() as files:
        sides = _side(a, files), _side(b, files)
        reading = Reading(
            files,
            thread_count(wanted.jobs),
            tolerance,
            wanted.every_byte,
            progress or not_told,
        )
        found = _Comparison(*sides, wanted, reading).found()
    return replace(found, seconds=opening + time.perf_counter() - started)


def _side(side: Checkpoint | Path, files: OpenFiles) -> Contents:
    return read_digest_file(side) if isinstance(side, Path) else contents_of(side, files)


class _Comparison:
    """Two sides, and what of them is compared."""

    def __init__(self, a: Contents, b: Contents, wanted: Wanted, reading: Reading) -> None:
        self.wanted, self.reading = wanted, reading
        self.names = renamed_sections(a, b)
        if a.text_keys != b.text_keys:
            a, b = (side if side.text_keys else with_text_keys(side) for side in (a, b))
        renamed = as_in_a(b, self.names)
        sides = unlisted(a, renamed), unlisted(renamed, a)
        self.a, self.b, self.by_order, self.unsure = named_by_order(*sides)
        self.chosen = Chosen(wanted.selection, a, b, self.names)
        asked = wanted.values or wanted.every_byte or reading.tolerance is not None
        self.values = asked or a.facts.digests or b.facts.digests

    def found(self) -> Difference:
        """The rows, and what they say together."""
        tensors, read, unread = self._tensors()
        values = list(self._values())
        complete = self.wanted.selection == EVERYTHING
        if not tensors and not values and not complete:
            raise UsageError(None, "no key of either of them matches what was asked for")
        subjects = Rows(subject_rows(tensors, values, self.a, self.b, complete))
        verdicts = [*(row.verdict for row in tensors), *(row.verdict for row in values)]
        verdicts += [row.verdict for row in subjects]
        return Difference(
            self.a.facts,
            self.b.facts,
            _same(verdicts),
            self.values,
            self.wanted.rtol,
            self.wanted.atol,
            subjects,
            Rows(tensors),
            Rows(values),
            tuple(self._notes()),
            read,
            unread,
        )

    def _tensors(self) -> tuple[list[TensorDifference], int, int]:
        found = [pair for pair in pairs(self.a.tensors, self.b.tensors) if self.chosen.holds(*pair)]
        if not self.values:
            rows, read, unread = [structure_row(*pair) for pair in found], 0, 0
        else:
            rows, read, unread = tensor_value_rows(found, self.reading)
        return [self._surely(row, *pair) for row, pair in zip(rows, found, strict=True)], read, unread

    def _values(self) -> Iterator[ValueDifference]:
        sections = [g.section for g in (*self.a.groups, *self.b.groups) if self.chosen.section("optimizer", g.section)]
        for row in group_rows(self.a, self.b, dict.fromkeys(sections)):
            if self.chosen.name(row.name):
                yield row
        for pair in pairs(self.a.values, self.b.values):
            if self.chosen.holds(*pair):
                yield from (self._surely(row, *pair) for row in value_rows(*pair, self.a, self.b))

    def _surely(self, row: Row, a: HeldTensor | HeldValue | None, b: HeldTensor | HeldValue | None) -> Row:
        """A row of one side alone; where the other may have it by number or by name, nobody knows."""
        alone = (a or b) if a is None or b is None else None
        if alone is None or len(alone.identity) != 4 or alone.identity[1] not in self.unsure:
            return row
        return row._replace(verdict="cannot be compared", detail=UNSURE) if alone.identity[0] == "optimizer" else row

    def _notes(self) -> Iterator[str]:
        yield from self.by_order
        for (kind, there), here in self.names.items():
            yield f"{kind}: A's {here} is held against B's {there}, the only one left on either side"
        for side, held in (("A", self.a), ("B", self.b)):
            yield from (f"{side}: {note}" for note in held.notes)


def _same(verdicts: Sequence[Verdict]) -> bool | None:
    """Whether the two are the same; None where nothing differs and something was not compared."""
    if any(verdict in DIFFERENT for verdict in verdicts):
        return False
    return None if any(verdict in UNPROVEN for verdict in verdicts) else True
