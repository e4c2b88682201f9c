"""What `diff` found, as text: each subject in a line, that which explains a loss first; below it what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckptools.model.difference import (
    DIFFERENT,
    Difference,
    Side,
    TensorDifference,
    ValueDifference,
    Verdict,
)
from ckptools.text import few, plural, printable, shape, size
from ckptools.views.tables import PIPE, Column, Screen, table, wrapped

TENSOR_COLUMNS = (Column("tensor", name=True), Column("verdict", verdict=True))
MEASURES = (Column("|dW|/|W|", right=True), Column("max |dW|", right=True), Column("cosine", right=True))
FIRST = (Column("first at"), Column("A", right=True), Column("B", right=True))
DETAIL = (Column("detail"),)
KEYS = (Column("keys", right=True),)
VALUE_COLUMNS = (Column("value", name=True), Column("verdict", verdict=True), Column("A"), Column("B"))

NOT_LISTED: frozenset[Verdict] = frozenset({"same", "same checksum", "not compared"})
"""Verdicts of tensors and values that are counted alone."""


def difference_text(
    found: Difference, tensors: Sequence[TensorDifference], values: Sequence[ValueDifference], screen: Screen = PIPE
) -> str:
    """What was found, as text.

    Args:
        found: the answer.
        tensors: those of its tensors that are shown, where they are not the same.
        values: those of its values.
        screen: what it is cut to; what a line has no room for goes on below it.
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
    """One of the two: its path, how it was saved, step and ranks."""
    facts = [side.saved_as]
    facts += [f"step {side.step}"] if side.step is not None else []
    facts += [plural(side.world_size, "rank")] if side.world_size is not None else []
    facts += ["digests of it"] if side.digests else []
    return f"{side.path}   {', '.join(facts)}"


def _subjects(found: Difference, screen: Screen) -> Iterator[str]:
    """The table of subjects, whose details wrap: they are the answer."""
    rows = [(row.subject, row.verdict, row.detail) for row in found.subjects] + _layout(found)
    width = max((len(subject) for subject, _, _ in rows), default=0)
    verdicts = max((len(verdict) for _, verdict, _ in rows), default=0)
    for subject, verdict, detail in rows:
        yield from wrapped(f"{subject:{width}}  {verdict:{verdicts}}  ", printable(detail), screen)


def _layout(found: Difference) -> list[tuple[str, str, str]]:
    """How both are laid out, which is no difference: two world sizes of one run are the same state."""
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
    """The table of tensors that are not the same, with every column in which one of them has something."""
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
    """The lines of a table with as many rows as a part of a screen has room for, whose cells may take several lines."""
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
    """Rows of keys that end alike and differ alike once, each with how many there are."""
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
    """Whether they are the same, as far as was compared."""
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
