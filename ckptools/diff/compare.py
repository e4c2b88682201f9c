"""The comparison: pair the keys of two sides, make a row for each pair, and conclude for the whole."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ckptools.diff.digest_file import read_digest_file
from ckptools.diff.keys_of_side import contents_of
from ckptools.diff.pairs import (
    UNSURE,
    Renames,
    as_in_a,
    named_by_order,
    pairs,
    renamed_sections,
    unlisted,
    with_text_keys,
)
from ckptools.diff.plain_values import group_rows, value_rows
from ckptools.diff.record import DIFFERENT, UNPROVEN, Difference, TensorDifference, Tolerance, ValueDifference, Verdict
from ckptools.diff.sides import Contents, SideTensor, SideValue
from ckptools.diff.subjects import subject_rows
from ckptools.diff.tensor_rows import Reading, structure_row
from ckptools.diff.tensor_rows import value_rows as tensor_value_rows
from ckptools.errors import UsageError
from ckptools.files.opening import OpenFiles
from ckptools.keys.entries import ALL, EVERYTHING, KINDS, Selection
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows
from ckptools.tensor_io.threads import Progress, no_progress, thread_count

Row = TypeVar("Row", TensorDifference, ValueDifference)


@dataclass(frozen=True)
class Wanted:
    """What to compare.

    Attributes:
        values: read and compare the values of tensors.
        rtol: relative tolerance; None for none.
        atol: absolute tolerance.
        every_byte: also read regions whose stated checksums are the same on both sides.
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
            UsageError: one of the two is not a number of at least 0.
        """
        if self.rtol is None and self.atol is None:
            return None
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError(None, f"--{name} {value}: a tolerance is at least 0")
        return Tolerance(self.rtol or 0.0, self.atol or 0.0)


def compare(a: Checkpoint | Path, b: Checkpoint | Path, wanted: Wanted, progress: Progress | None = None) -> Difference:
    """Compare two checkpoints that were opened with all ranks; a path names a file of digests.

    Raises:
        ReadError: a file of digests cannot be read.
        UsageError: a tolerance is not a number of at least 0, or neither side has a selected key.
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
            progress or no_progress,
        )
        found = _Comparison(*sides, wanted, reading).found()
    return replace(found, seconds=opening + time.perf_counter() - started)


def _side(side: Checkpoint | Path, files: OpenFiles) -> Contents:
    return read_digest_file(side) if isinstance(side, Path) else contents_of(side, files)


class _Comparison:
    """One comparison of two sides."""

    def __init__(self, a: Contents, b: Contents, wanted: Wanted, reading: Reading) -> None:
        self.wanted, self.reading = wanted, reading
        self.names = renamed_sections(a, b)
        if a.text_keys != b.text_keys:
            a, b = (side if side.text_keys else with_text_keys(side) for side in (a, b))
        renamed = as_in_a(b, self.names)
        sides = unlisted(a, renamed), unlisted(renamed, a)
        self.a, self.b, self.by_order, self.unsure = named_by_order(*sides)
        self.chosen = WantedKeys(wanted.selection, a, b, self.names)
        asked = wanted.values or wanted.every_byte or reading.tolerance is not None
        self.values = asked or a.facts.digests or b.facts.digests

    def found(self) -> Difference:
        """Make the rows and the verdict over all of them."""
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

    def _surely(self, row: Row, a: SideTensor | SideValue | None, b: SideTensor | SideValue | None) -> Row:
        """Call a row of one side alone unsure if the other side may have the key under a number or a name."""
        alone = (a or b) if a is None or b is None else None
        if alone is None or len(alone.identity) != 4 or alone.identity[1] not in self.unsure:
            return row
        return row._replace(verdict="cannot be compared", detail=UNSURE) if alone.identity[0] == "optimizer" else row

    def _notes(self) -> Iterator[str]:
        yield from self.by_order
        for (kind, there), here in self.names.items():
            yield f"{kind}: A's {here} is compared with B's {there}, the only one left on either side"
        for side, contents in (("A", self.a), ("B", self.b)):
            yield from (f"{side}: {note}" for note in contents.notes)


def _same(verdicts: Sequence[Verdict]) -> bool | None:
    """Whether the two are the same; None if nothing differs but something was not compared."""
    if any(verdict in DIFFERENT for verdict in verdicts):
        return False
    return None if any(verdict in UNPROVEN for verdict in verdicts) else True


# -- selection --------------------------------------------------------------------------------------------------------


class WantedKeys:
    """The keys that the user selected.

    Args:
        selection: the user's choice.
        a: one side, with its sections under their own names.
        b: the other.
        renamed: name in A of each section of B that has another name there, by its kind and its name in B.

    Raises:
        UsageError: neither side has the selected section.
    """

    def __init__(self, selection: Selection, a: Contents, b: Contents, renamed: Renames) -> None:
        self.selection, self._renamed = selection, renamed
        self._included, self._not_excluded = Selection(selection.include), Selection((), selection.exclude)
        self._rng = {name for side in (a, b) for name in side.sections.get("rng", ())}
        known = [*KINDS, ALL, *(name for side in (a, b) for kind in KINDS for name in side.sections.get(kind, ()))]
        if selection.section and selection.section not in known:
            there = ", ".join(dict.fromkeys(known))
            raise UsageError(None, f"neither has a section {selection.section!r}; there are {there}")

    def section(self, kind: str, name: str) -> bool:
        """Whether a section is selected: by its kind, its name in A (`name`) or its name in B."""
        wanted = self.selection.section
        if kind == "rng":
            return wanted in ("", ALL, kind, *self._rng)
        return wanted in ("", ALL, kind, name) or self._renamed.get((kind, wanted)) == name

    def name(self, *names: str) -> bool:
        """Whether a key of these names is selected."""
        return all(map(self._not_excluded.takes, names)) and any(map(self._included.takes, names))

    def holds(self, a: SideTensor | SideValue | None, b: SideTensor | SideValue | None) -> bool:
        """Whether a key of one or both sides is selected."""
        found = [key for key in (a, b) if key is not None]
        kind, section = found[0].identity[:2]
        return self.section(kind, section) and self.name(*(key.name for key in found))
