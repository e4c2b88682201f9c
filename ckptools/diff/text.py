"""A difference as text and as HTML: a line for each subject, those that may explain a loss first, then what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress

from ckptools.diff.record import (
    DIFFERENT,
    Difference,
    Side,
    TensorDifference,
    ValueDifference,
    Verdict,
    most_changed,
)
from ckptools.diff.subjects import WORDS, change_words
from ckptools.display.palette import mark_of, painted
from ckptools.display.tables import PIPE, Column, Screen, table, wrapped
from ckptools.model.records import grouped
from ckptools.text import few, plural, printable, shape, size

SUBJECT_COLUMNS = (Column("subject"), Column("verdict", "verdict"), Column("detail"))
TENSOR_COLUMNS = (
    Column("tensor", "name"), Column("verdict", "verdict"),
    Column("|dW|/|W|", "number"), Column("max |dW|", "number"), Column("cosine", "number"),
    Column("first at"), Column("A → B"), Column("detail"),
)  # fmt: skip
VALUE_COLUMNS = (
    Column("value", "name"), Column("keys", "number"), Column("verdict", "verdict"), Column("A → B"), Column("detail"),
)  # fmt: skip

_Row = TensorDifference | ValueDifference

NOT_LISTED: frozenset[Verdict] = frozenset({"same", "same checksum", "not compared"})
"""Verdicts of tensors and values that are counted alone."""


def difference_text(
    found: Difference, tensors: Sequence[TensorDifference], limit: int | None = None, screen: Screen = PIPE
) -> str:
    """Render a difference as text with some rows of tensors and `limit` of values, without those that are the same."""
    mark = {True: mark_of("same"), False: mark_of("differs"), None: mark_of("warn")}[found.same]
    lines = wrapped("", verdict_line(found), screen, mark=mark)
    for letter, side in (("A  ", found.a), ("B  ", found.b)):
        lines += wrapped(letter, printable(side_line(side)), screen, label="heading")
    lines += ["", *_subjects(found, screen)]
    lines += [line for note in found.notes for line in wrapped("note  ", printable(note), screen, mark="dim")]
    lines += [*_tensors(found, tensors, screen), *_unchanged(found, screen), *_values(found, limit, screen)]
    return "\n".join([*lines, "", *wrapped("", cost_line(found), screen, mark="dim")])


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
        lines = wrapped(f"{subject:{width}}  {verdict:{verdicts}}  ", printable(detail), screen)
        behind = lines[0].removeprefix(f"{subject:{width}}  {verdict}")
        shown = f"{subject:{width}}  {painted(verdict, mark_of(verdict), screen.color)}{behind}"
        yield from (shown, *lines[1:])


def _layout(found: Difference) -> list[tuple[str, str, str]]:
    """The layouts, which count as no difference: two world sizes of one run are the same state."""
    if (found.a.layout, found.a.world_size) == (found.b.layout, found.b.world_size):
        return []
    a, b = ("; ".join(side.layout) or "no tensors" for side in (found.a, found.b))
    return [("layout", "not counted", f"A: {a} / B: {b}")]


MOST_LINES = 14
"""Lines of each table on a terminal, so that the subjects stay on one screen with them."""
FEWEST_ROWS = 3


def _tensors(found: Difference, rows: Sequence[TensorDifference], screen: Screen) -> list[str]:
    rows = [row for row in rows if row.verdict not in NOT_LISTED]
    if not rows:
        return []
    measured, first, detailed = _groups(rows)
    # What is read first is how much they differ; where there is no room for it, the first index stays in the pipe.
    if first and screen.width is not None:
        first = max(map(len, table(*_tensor_table(rows, measured, first, False)))) <= screen.width
    made = _tensor_table(rows, measured, first, detailed)
    return ["", _heading("tensor", found.tensors, len(rows), screen), *_short(screen, lambda at: table(*made, at))]


def _heading(noun: str, every: Sequence[_Row], shown: int, screen: Screen) -> str:
    """How many rows there are, and their verdict where that is one: `45 tensors differ; 3 are shown`."""
    rows = [row for row in every if row.verdict not in NOT_LISTED]
    verdict = WORDS[rows[0].verdict] if len({row.verdict for row in rows}) == 1 else "are not the same"
    verdict = "differs" if len(rows) == 1 and verdict == "differ" else verdict
    limited = f"; {shown} shown" if shown < len(rows) else ""
    return painted(f"{plural(len(rows), noun)} {verdict}{limited}", "heading", screen.color)


def _groups(rows: Sequence[TensorDifference]) -> tuple[bool, bool, bool]:
    """Whether any row has measures, a first index, and details."""
    detailed = any(row.detail or _renamed(row) for row in rows)
    return any(row.max is not None for row in rows), any(row.first is not None for row in rows), detailed


def _tensor_table(
    rows: Sequence[TensorDifference], measured: bool, first: bool, detailed: bool
) -> tuple[list[Column], list[list[str]]]:
    several = len({row.verdict for row in rows}) > 1
    shown = [True, several] + [measured] * 3 + [first] * 2 + [detailed]
    return list(compress(TENSOR_COLUMNS, shown)), [list(compress(_tensor_cells(row), shown)) for row in rows]


def _tensor_cells(row: TensorDifference) -> list[str]:
    measures = [_number(row.change, ".1e"), _number(row.max, ".1e"), _number(row.cosine, ".6f")]
    valued = row.value_a is not None or row.value_b is not None
    first = [
        shape(row.first) if row.first is not None else "",
        change_words(row.value_a, row.value_b) if valued else "",
    ]
    return [row.name, row.verdict, *measures, *first, "; ".join(filter(None, (row.detail, _renamed(row))))]


def _renamed(row: TensorDifference) -> str:
    return f"in B {row.name_b}" if row.name_b not in (None, row.name) else ""


def _short(screen: Screen, made: Callable[[Screen], list[str]]) -> list[str]:
    """The lines of a table with as many rows as fit a part of the screen; a cell may take several lines."""
    if screen.rows is None:
        return made(screen)
    for count in range(min(MOST_LINES - 3, screen.rows), FEWEST_ROWS, -1):
        lines = made(screen._replace(rows=count))
        if len(lines) <= MOST_LINES:
            return lines
    return made(screen._replace(rows=FEWEST_ROWS))


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


def _values(found: Difference, limit: int | None, screen: Screen) -> list[str]:
    rows = _folded([row for row in found.values if row.verdict not in NOT_LISTED])[: limit or None]
    if not rows:
        return []
    columns, cells = _value_table(rows)
    heading = _heading("value", found.values, sum(count for _, count in rows), screen)
    return ["", heading, *_short(screen, lambda at: table(columns, cells, at))]


def _value_table(folded: Sequence[tuple[ValueDifference, int]]) -> tuple[list[Column], list[list[str]]]:
    several = len({row.verdict for row, _ in folded}) > 1
    shown = [True, any(count > 1 for _, count in folded), several, True, any(row.detail for row, _ in folded)]
    cells = [list(compress(_value_cells(row, count), shown)) for row, count in folded]
    return list(compress(VALUE_COLUMNS, shown)), cells


def _value_cells(row: ValueDifference, count: int) -> list[str]:
    name = row.name if row.rank is None else f"{row.name}, rank {row.rank}"
    return [name, str(count), row.verdict, change_words(row.value_a, row.value_b), row.detail]


def _folded(rows: Sequence[ValueDifference]) -> list[tuple[ValueDifference, int]]:
    """Fold rows whose keys end alike and differ alike into one row with its count."""
    alike = grouped(rows, lambda row: row._replace(name=row.name.rpartition(".")[2]))
    return [(some[0], len(some)) for some in alike.values()]


def verdict_line(found: Difference) -> str:
    """Whether the two are the same, and what was not compared."""
    if found.proof is not None and found.same:
        parts = [f"every element of A is B's: {found.proof}"]
    elif found.same is False:
        parts = [found.unlike]
    elif found.same:
        count = f"{plural(len(found.tensors), 'tensor')}, {plural(len(found.values), 'value')}"
        tolerant = any(row.verdict == "within tolerance" for row in found.tensors)
        within = f", within rtol {found.rtol or 0:g} and atol {found.atol or 0:g}" if tolerant else ""
        parts = [f"the same: {count}{within}"]
    else:
        parts = ["nothing that was compared differs"]
    if not found.values_compared:
        parts.append("values of tensors not compared (--values)")
    elif found.bytes_not_read:
        parts.append(f"{size(found.bytes_not_read)} with the same stated CRC-32 not read (--every-byte)")
    return "; ".join(parts)


def cost_line(found: Difference) -> str:
    """How much was read, and how long it took."""
    read = f"{size(found.bytes_read)} of tensors read, " if found.values_compared else ""
    return f"{read}{found.seconds:.2f} s"


def difference_html(found: Difference) -> str:
    """Render a difference: one line for each subject, those that may explain a loss first."""
    from ckptools.display.page import DICTS, Page

    page = Page(DICTS)
    for letter, side in (("A", found.a), ("B", found.b)):
        page.line(f"{letter}  {side_line(side)}")
    page.line(verdict_line(found), {True: "good", False: "change", None: "warn"}[found.same])
    page.line(cost_line(found), "dim")
    subjects = [(row.subject, row.verdict, row.detail) for row in found.subjects]
    page.table(plural(len(subjects), "subject"), SUBJECT_COLUMNS, subjects, opened=True)
    tensors = most_changed(row for row in found.tensors if row.verdict not in NOT_LISTED)
    if tensors:
        columns, cells = _tensor_table(tensors, *_groups(tensors))
        page.table(f"{plural(len(cells), 'tensor')} not the same", columns, cells)
    values = [row for row in found.values if row.verdict in DIFFERENT]
    if values:
        page.table(f"{plural(len(values), 'value')} not the same", *_value_table([(row, 1) for row in values]))
    for note in found.notes:
        page.line(f"note  {note}", "dim")
    return page.html()
