"""A difference as text and as HTML: a line for each subject, those that may explain a loss first, then what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckptools.diff.record import DIFFERENT, Difference, Side, TensorDifference, ValueDifference, Verdict
from ckptools.display.tables import PIPE, Column, Screen, table, wrapped
from ckptools.text import few, plural, printable, shape, size

TENSOR_COLUMNS = (Column("tensor", name=True), Column("verdict", verdict=True))
MEASURES = (Column("|dW|/|W|", right=True), Column("max |dW|", right=True), Column("cosine", right=True))
FIRST = (Column("first at"), Column("A", right=True), Column("B", right=True))
DETAIL = (Column("detail"),)
KEYS = (Column("keys", right=True),)
VALUE_COLUMNS = (Column("value", name=True), Column("verdict", verdict=True), Column("A"), Column("B"))

ALL_VALUE_COLUMNS = (*VALUE_COLUMNS, Column("detail"))

SUBJECT_COLUMNS = (Column("subject"), Column("verdict", verdict=True), Column("detail"))

NOT_LISTED: frozenset[Verdict] = frozenset({"same", "same checksum", "not compared"})
"""Verdicts of tensors and values that are counted alone."""


def difference_text(
    found: Difference, tensors: Sequence[TensorDifference], values: Sequence[ValueDifference], screen: Screen = PIPE
) -> str:
    """Render a difference as text.

    Args:
        found: the difference.
        tensors: rows of tensors to show; those that are the same are left out.
        values: rows of values to show.
        screen: the size to fit; long lines wrap.
    """
    lines = [*_sides(found, screen), "", *_subjects(found, screen)]
    lines += [line for note in found.notes for line in wrapped("note  ", printable(note), screen)]
    lines += [*_tensors(tensors, screen), *_unchanged(found, screen), *_values(values, screen)]
    return "\n".join([*lines, "", *wrapped("", verdict_line(found), screen)])


# -- the first screen --------------------------------------------------------------------------------------------


def _sides(found: Difference, screen: Screen) -> Iterator[str]:
    for letter, side in (("A", found.a), ("B", found.b)):
        yield from wrapped(f"{letter}  ", printable(side_line(side)), screen)


def side_line(side: Side) -> str:
    """One side in a line: its path, how it was saved, step and ranks."""
    facts = [side.saved_as]
    facts += [f"step {side.step}"] if side.step is not None else []
    facts += [plural(side.world_size, "rank")] if side.world_size is not None else []
    facts += ["digests of it"] if side.digests else []
    return f"{side.path}   {', '.join(facts)}"


def _subjects(found: Difference, screen: Screen) -> Iterator[str]:
    """The table of subjects; details wrap rather than being cut."""
    rows = [(row.subject, row.verdict, row.detail) for row in found.subjects] + _layout(found)
    width = max((len(subject) for subject, _, _ in rows), default=0)
    verdicts = max((len(verdict) for _, verdict, _ in rows), default=0)
    for subject, verdict, detail in rows:
        yield from wrapped(f"{subject:{width}}  {verdict:{verdicts}}  ", printable(detail), screen)


def _layout(found: Difference) -> list[tuple[str, str, str]]:
    """The layouts, which count as no difference: two world sizes of one run are the same state."""
    if (found.a.layout, found.a.world_size) == (found.b.layout, found.b.world_size):
        return []
    a, b = ("; ".join(side.layout) or "no tensors" for side in (found.a, found.b))
    return [("layout", "not counted", f"A: {a} / B: {b}")]


# -- what differs ------------------------------------------------------------------------------------------------


MOST_LINES = 14
"""Lines of each table on a terminal, so that the subjects stay on one screen with them."""
FEWEST_ROWS = 3


def _tensors(rows: Sequence[TensorDifference], screen: Screen) -> list[str]:
    rows = [row for row in rows if row.verdict not in NOT_LISTED]
    measured, first = any(row.max is not None for row in rows), any(row.first is not None for row in rows)
    detailed = any(row.detail or row.name_b not in (None, row.name) for row in rows)
    # What is read first is how much they differ; where there is no room for it, the first index stays in the pipe.
    first = first and _width(_tensor_table(rows, measured, first, False, PIPE)) <= (screen.width or _ENDLESS)
    return ["", *_short(screen, lambda at: _tensor_table(rows, measured, first, detailed, at))] if rows else []


def tensor_columns_and_cells(rows: Sequence[TensorDifference]) -> tuple[list[Column], list[list[str]]]:
    """The table of tensors that are not the same, without empty columns."""
    rows = [row for row in rows if row.verdict not in NOT_LISTED]
    measured, first = any(row.max is not None for row in rows), any(row.first is not None for row in rows)
    detailed = any(row.detail or row.name_b not in (None, row.name) for row in rows)
    return _columns(measured, first, detailed), [_tensor_cells(row, measured, first, detailed) for row in rows]


def _columns(measured: bool, first: bool, detailed: bool) -> list[Column]:
    shown = ((MEASURES, measured), (FIRST, first), (DETAIL, detailed))
    return [*TENSOR_COLUMNS, *(column for group, wanted in shown if wanted for column in group)]


def _tensor_table(
    rows: Sequence[TensorDifference], measured: bool, first: bool, detailed: bool, screen: Screen
) -> list[str]:
    cells = [_tensor_cells(row, measured, first, detailed) for row in rows]
    return table(_columns(measured, first, detailed), cells, screen)


_ENDLESS = 1 << 30


def _width(lines: Sequence[str]) -> int:
    return max(map(len, lines), default=0)


def _short(screen: Screen, made: Callable[[Screen], list[str]]) -> list[str]:
    """The lines of a table with as many rows as fit a part of the screen; a cell may take several lines."""
    if screen.rows is None:
        return made(screen)
    for count in range(min(MOST_LINES - 3, screen.rows), FEWEST_ROWS, -1):
        lines = made(screen._replace(rows=count))
        if len(lines) <= MOST_LINES:
            return lines
    return made(screen._replace(rows=FEWEST_ROWS))


def _tensor_cells(row: TensorDifference, measured: bool, first: bool, detailed: bool) -> list[str]:
    cells = [row.name, row.verdict]
    if measured:
        cells += [_number(row.change, ".1e"), _number(row.max, ".1e"), _number(row.cosine, ".6f")]
    if first:
        cells += [shape(row.first) if row.first is not None else "", row.value_a or "", row.value_b or ""]
    renamed = f"in B {row.name_b}" if row.name_b not in (None, row.name) else ""
    return [*cells, "; ".join(filter(None, (row.detail, renamed)))] if detailed else cells


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _unchanged(found: Difference, screen: Screen) -> list[str]:
    """The few weights that did not change where most did: frozen, or not loaded."""
    weights = [row for row in found.tensors if row.subject == "weights"]
    same = [row.name for row in weights if row.verdict in ("same", "same checksum")]
    changed = sum(row.verdict == "differs" and bool(row.differing) for row in weights)
    if not same or changed <= len(same):
        return []
    return wrapped("unchanged weights: ", printable(few(same)) + "   (frozen, or not loaded?)", screen)


def _values(rows: Sequence[ValueDifference], screen: Screen) -> list[str]:
    folded = _folded([row for row in rows if row.verdict not in NOT_LISTED])
    detailed, counted = any(row.detail for row, _ in folded), any(count > 1 for _, count in folded)
    columns = [VALUE_COLUMNS[0], *(KEYS if counted else ()), *VALUE_COLUMNS[1:], *(DETAIL if detailed else ())]
    cells = [_value_cells(row, count, counted, detailed) for row, count in folded]
    return ["", *_short(screen, lambda at: table(columns, cells, at))] if folded else []


def _folded(rows: Sequence[ValueDifference]) -> list[tuple[ValueDifference, int]]:
    """Fold rows whose keys end alike and differ alike into one row with its count."""
    found: dict[tuple[object, ...], tuple[ValueDifference, int]] = {}
    for row in rows:
        key = (row.subject, row.name.rpartition(".")[2], row.rank, row.verdict, row.value_a, row.value_b, row.detail)
        first, count = found.get(key, (row, 0))
        found[key] = first, count + 1
    return list(found.values())


def _value_cells(row: ValueDifference, count: int, counted: bool, detailed: bool) -> list[str]:
    name = row.name if row.rank is None else f"{row.name}, rank {row.rank}"
    cells = [name, *([str(count)] if counted else []), row.verdict, row.value_a or "", row.value_b or ""]
    return [*cells, row.detail] if detailed else cells


# -- the last line -----------------------------------------------------------------------------------------------


def verdict_line(found: Difference) -> str:
    """Whether the two are the same, and how much was compared."""
    if found.same is False:
        parts = [f"different: {few(_which(found), 12)}"]
    elif found.same:
        count = f"{plural(len(found.tensors), 'tensor')}, {plural(len(found.values), 'value')}"
        parts = [f"the same: {count}{_within(found)}"]
    else:
        parts = ["nothing that was compared differs"]
    if not found.values_compared:
        parts.append("values of tensors not compared (--values)")
    elif found.bytes_not_read:
        parts.append(f"{size(found.bytes_not_read)} with the same stated CRC-32 not read (--every-byte)")
    read = f"{size(found.bytes_read)} of tensors read, " if found.values_compared else ""
    return f"{'; '.join(parts)}; {read}{found.seconds:.2f} s"


def _within(found: Difference) -> str:
    tolerant = any(row.verdict == "within tolerance" for row in found.tensors)
    return f", within rtol {found.rtol or 0:g} and atol {found.atol or 0:g}" if tolerant else ""


def _which(found: Difference) -> list[str]:
    return [row.subject for row in found.subjects if row.verdict in DIFFERENT or row.different]


# -- HTML ---------------------------------------------------------------------------------------------------------


def difference_html(found: Difference) -> str:
    """Render a difference: one line for each subject, those that may explain a loss first."""
    from ckptools.display.page import DICTS, Page

    page = Page(DICTS)
    for letter, side in (("A", found.a), ("B", found.b)):
        page.line(f"{letter}  {side_line(side)}")
    mark = {True: "good", False: "bad", None: "warn"}[found.same]
    page.line(verdict_line(found), mark)
    subjects = [(row.subject, row.verdict, row.detail) for row in found.subjects]
    page.table(plural(len(subjects), "subject"), SUBJECT_COLUMNS, subjects, opened=True)
    columns, cells = tensor_columns_and_cells(found.tensors)
    if cells:
        page.table(f"{plural(len(cells), 'tensor')} not the same", columns, cells)
    values = [row for row in found.values if row.verdict in DIFFERENT]
    rows = [(row.name, row.verdict, row.value_a or "", row.value_b or "", row.detail) for row in values]
    if rows:
        page.table(f"{plural(len(rows), 'value')} not the same", ALL_VALUE_COLUMNS, rows)
    for note in found.notes:
        page.line(f"note  {note}", "dim")
    return page.html()
