"""The text and HTML of `diff`: a line for each subject, likely causes of a jump of the loss first, then details."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import compress

from ckptools.diff.record import (
    DIFFERENT,
    SUBJECTS,
    UNPROVEN,
    Difference,
    Side,
    Subject,
    SubjectRow,
    TensorDifference,
    ValueDifference,
    Verdict,
    holds_integers,
    most_changed,
)
from ckptools.diff.sides import Contents
from ckptools.display.screen import PIPE, Screen, mark_of, painted
from ckptools.display.tables import Column, table, wrapped
from ckptools.model.records import grouped
from ckptools.option import spelled
from ckptools.text import and_more, clip, clip_middle, few, number, plural, printable, shape, size, spans, told_apart

# -- one line for each subject: weights, moments, learning rates, random states ----------------------------------------


EXPECTED: tuple[Subject, ...] = ("weights", "moments", "optimizer steps", "lr", "scheduler", "rng", "data position")
"""Subjects that training needs to resume; if both sides lack one, its line says so."""

LONG_NUMBER = re.compile(r"(?<![\w.])-?\d\.\d{6,25}(?:e-?\d+)?(?![\w.])")

MAX_VALUE = 30
"""Longest text of one of two values in a line, in characters."""

MOST = 3
"""At most this many values in a line."""


def subject_rows(
    tensors: Sequence[TensorDifference], values: Sequence[ValueDifference], a: Contents, b: Contents, complete: bool
) -> Iterator[SubjectRow]:
    """Make a row for each subject; `complete` if the rows cover all keys of both sides."""
    for subject in SUBJECTS:
        of_tensors = [row for row in tensors if row.subject == subject]
        of_values = [row for row in values if row.subject == subject]
        if of_tensors or of_values:
            yield _row(subject, of_tensors, of_values, a, b)
        elif complete and subject in EXPECTED:
            yield SubjectRow(subject, "in neither", 0, 0, 0, "")
    damage = [f"{side}: {one}" for side, contents in (("A", a), ("B", b)) for one in contents.damage]
    left_out = [f"{side}: {contents.left_out}" for side, contents in (("A", a), ("B", b)) if contents.left_out]
    if damage or left_out:
        words = [damage[0] + and_more(len(damage) - 1) + " (verify)"] if damage else []
        detail = "; ".join([*words, *left_out])
        yield SubjectRow("files", "cannot be compared", 0, len(damage) + len(left_out), 0, detail)


def _row(
    subject: Subject, tensors: Sequence[TensorDifference], values: Sequence[ValueDifference], a: Contents, b: Contents
) -> SubjectRow:
    rows: list[TensorDifference | ValueDifference] = [*tensors, *values]
    different = sum(row.verdict in DIFFERENT for row in rows)
    unproven = sum(row.verdict in UNPROVEN for row in rows)
    parts = [*_of_tensors(tensors), *(_of_generators(values, a, b) if subject == "rng" else _of_values(values))]
    same = len(rows) - different - unproven
    return SubjectRow(subject, _verdict_of([row.verdict for row in rows]), same, different, unproven, "; ".join(parts))


def _verdict_of(verdicts: Sequence[Verdict]) -> Verdict:
    found = set(verdicts)
    if len(found) == 1:
        return verdicts[0]
    if found & (DIFFERENT - {"cannot be compared"}):
        return "differs"
    order: tuple[Verdict, ...] = ("cannot be compared", "not compared", "same checksum", "within tolerance", "same")
    return next(verdict for verdict in order if verdict in found)


WORDS: dict[Verdict, str] = {
    "differs": "differ", "same": "the same", "same checksum": "with the same CRC-32, not read",
    "within tolerance": "within the tolerance", "cannot be compared": "cannot be compared",
    "only in A": "only in A", "only in B": "only in B", "not compared": "with the same name, shape and dtype",
}  # fmt: skip


def _of_tensors(rows: Sequence[TensorDifference]) -> Iterator[str]:
    """Count the tensors by verdict, and name the tensor that changed most."""
    counts = Counter(row.verdict for row in rows)
    listed = [f"{n} {WORDS[verdict]}" for verdict in WORDS if (n := counts[verdict])]
    if len(counts) == 1:
        yield f"{plural(len(rows), 'tensor')} {WORDS[rows[0].verdict]}"
    elif listed:
        yield f"{plural(len(rows), 'tensor')}: {', '.join(listed)}"
    measured = [row for row in rows if row.change is not None and row.verdict != "same"]
    floats = [row for row in measured if not holds_integers(row)]
    if measured:
        most = max(floats or measured, key=lambda row: row.change or 0.0)
        apart = ", without integers" if floats and len(floats) < len(measured) else ""
        yield f"|dW|/|W| up to {most.change:.1e} ({clip_middle(most.name, 60)}){apart}"


def _of_values(rows: Sequence[ValueDifference]) -> Iterator[str]:
    """List the differing values, A's before B's; equal changes once, with their number."""
    counts = Counter(row.verdict for row in rows)
    if set(counts) == {"same"}:
        distinct = dict.fromkeys(f"{_last_word(row.name)} {row.value_a}" for row in rows)
        yield few(list(distinct), 2) if len(distinct) <= 2 else f"{plural(len(rows), 'value')}"
        return
    for verdict in ("only in A", "only in B", "cannot be compared"):
        if counts[verdict]:
            yield f"{counts[verdict]} {verdict}"
    counted = Counter(_change(row) for row in rows if row.verdict == "differs")
    if counted:
        lines = [f"{text} ({n} times)" if n > 1 else text for text, n in counted.items()]
        yield few([clip(line, 80) for line in lines], MOST)


def _last_word(name: str) -> str:
    """Last part of a name: `lr` of `optimizers.AdamW.param_groups.0.lr`."""
    return name.rpartition(".")[2]


def _change(row: ValueDifference) -> str:
    """Render the last part of the name with both values."""
    alike = row.detail and row.value_a == row.value_b
    words = row.detail if alike else " → ".join(told_apart(_rounded(row.value_a, row.value_b), MAX_VALUE))
    return f"{_last_word(row.name)} {words}"


def change_words(a: str | None, b: str | None) -> str:
    """Render A's value and B's, rounded to six digits if they still differ: `0.00299704 → 0.00298817`; `-` for none."""
    return " → ".join(_rounded(a, b))


def _rounded(a: str | None, b: str | None) -> list[str]:
    full = [a or "-", b or "-"]
    brief = [LONG_NUMBER.sub(lambda found: number(float(found[0])), text) for text in full]
    return brief if brief[0] != brief[1] else full


def _of_generators(rows: Sequence[ValueDifference], a: Contents, b: Contents) -> Iterator[str]:
    """State which ranks have the same random state on both sides, and which have another rank's."""
    by_name = grouped(rows, lambda row: row.name.removeprefix("rng "))
    alike = grouped(by_name, lambda name: _ranks(by_name[name]))
    yield from (f"{few(names)} {text}" for text, names in alike.items())
    # A rank file that was copied over another rank's has the state of its first rank.
    for identity, value in b.values.items():
        known = a.values.get(identity)
        if value.subject != "rng" or known is None or len(known.contents) < 2:
            continue
        of = {content.digest: rank for rank, content in known.contents.items() if content.digest}
        moved = [(r, of[c.digest]) for r, c in value.contents.items() if of.get(c.digest, r) != r]
        if moved and len(of) == len(known.contents):
            swaps = [f"B's rank {r} has that of A's rank {other}" for r, other in moved]
            yield f"{value.name.removeprefix('rng ')}: {few(swaps, 2)}"


def _ranks(rows: Sequence[ValueDifference]) -> str:
    if len(rows) == 1:
        return "the same" if rows[0].verdict == "same" else rows[0].verdict
    words: dict[Verdict, str] = {"same": "the same", "differs": "other states"}
    found = grouped(rows, lambda row: words.get(row.verdict, row.verdict))
    if len(found) == 1:
        return f"{next(iter(found))} on every rank"
    ranks = {text: [-1 if row.rank is None else row.rank for row in some] for text, some in found.items()}
    return ", ".join(f"{text} on ranks {spans(some)}" for text, some in ranks.items())


# -- the text ----------------------------------------------------------------------------------------------------------


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
"""Verdicts of tensors and values that are counted, but not listed."""


def difference_text(
    found: Difference, tensors: Sequence[TensorDifference], limit: int | None = None, screen: Screen = PIPE
) -> str:
    """Render a difference with the given rows of tensors and `limit` rows of values, leaving out equal ones."""
    mark = {True: mark_of("same"), False: mark_of("differs"), None: mark_of("warn")}[found.same]
    lines = wrapped("", verdict_line(found), screen, mark=mark)
    for letter, side in (("A  ", found.a), ("B  ", found.b)):
        lines += wrapped(letter, printable(side_line(side)), screen, label="heading")
    lines += ["", *_subjects(found, screen)]
    lines += [line for note in found.notes for line in wrapped("note  ", printable(note), screen, mark="dim")]
    lines += [*_tensors(found, tensors, screen), *_unchanged(found, screen), *_values(found, limit, screen)]
    return "\n".join([*lines, "", *wrapped("", cost_line(found), screen, mark="dim")])


def side_line(side: Side) -> str:
    """Describe one side in a line: path, how it was saved, step and number of ranks."""
    facts = [side.saved_as]
    facts += [f"step {side.step}"] if side.step is not None else []
    facts += [plural(side.world_size, "rank")] if side.world_size is not None else []
    facts += ["digests of it"] if side.digests else []
    return f"{side.path}   {', '.join(facts)}"


def _subjects(found: Difference, screen: Screen) -> Iterator[str]:
    """Render the table of subjects; details wrap and are never cut."""
    rows = [(row.subject, row.verdict, row.detail) for row in found.subjects] + _layout(found)
    width = max((len(subject) for subject, _, _ in rows), default=0)
    verdicts = max((len(verdict) for _, verdict, _ in rows), default=0)
    for subject, verdict, detail in rows:
        lines = wrapped(f"{subject:{width}}  {verdict:{verdicts}}  ", printable(detail), screen)
        behind = lines[0].removeprefix(f"{subject:{width}}  {verdict}")
        shown = f"{subject:{width}}  {painted(verdict, mark_of(verdict), screen.color)}{behind}"
        yield from (shown, *lines[1:])


def _layout(found: Difference) -> list[tuple[str, str, str]]:
    """Make a row of the layouts, which never count as a difference: one run may be saved with two world sizes."""
    if (found.a.layout, found.a.world_size) == (found.b.layout, found.b.world_size):
        return []
    a, b = ("; ".join(side.layout) or "no tensors" for side in (found.a, found.b))
    return [("layout", "not counted", f"A: {a} / B: {b}")]


MOST_LINES = 14
"""Most lines of each table on a terminal, so that the subjects stay on screen."""
FEWEST_ROWS = 3


def _tensors(found: Difference, rows: Sequence[TensorDifference], screen: Screen) -> list[str]:
    rows = [row for row in rows if row.verdict not in NOT_LISTED]
    if not rows:
        return []
    # The measures matter most; if the screen has no room for the index of the first difference, only pipes show it.
    room = screen.width is None or max(map(len, table(*_tensor_table(rows, detailed=False)))) <= screen.width
    made = _tensor_table(rows, first=room)
    return ["", _heading("tensor", found.tensors, len(rows), screen), *_short(screen, lambda at: table(*made, at))]


def _heading(noun: str, every: Sequence[_Row], shown: int, screen: Screen) -> str:
    """State the number of rows, with their verdict if it is the same for all: `45 tensors differ; 3 shown`."""
    rows = [row for row in every if row.verdict not in NOT_LISTED]
    verdict = WORDS[rows[0].verdict] if len({row.verdict for row in rows}) == 1 else "are not the same"
    verdict = "differs" if len(rows) == 1 and verdict == "differ" else verdict
    limited = f"; {shown} shown" if shown < len(rows) else ""
    return painted(f"{plural(len(rows), noun)} {verdict}{limited}", "heading", screen.color)


def _tensor_table(
    rows: Sequence[TensorDifference], first: bool = True, detailed: bool = True
) -> tuple[list[Column], list[list[str]]]:
    """Make the columns that some row fills, and their cells; `first` and `detailed` ask for the last three."""
    several = len({row.verdict for row in rows}) > 1
    measured = any(row.max is not None for row in rows)
    first = first and any(row.first is not None for row in rows)
    detailed = detailed and any(row.detail or _renamed(row) for row in rows)
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
    """Render a table with as many rows as fit on part of the screen; a cell may take several lines."""
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
    """Name the weights that did not change, if most did: frozen, or not loaded."""
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
    alike = grouped(rows, lambda row: row._replace(name=_last_word(row.name)))
    return [(some[0], len(some)) for some in alike.values()]


def verdict_line(found: Difference) -> str:
    """State whether both checkpoints are the same, and which values were not compared."""
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
        parts.append(f"values of tensors not compared ({spelled('values', True)})")
    elif found.bytes_not_read:
        parts.append(
            f"{size(found.bytes_not_read)} with the same stated CRC-32 not read ({spelled('every-byte', True)})"
        )
    return "; ".join(parts)


def cost_line(found: Difference) -> str:
    """State the bytes read and the time."""
    read = f"{size(found.bytes_read)} of tensors read, " if found.values_compared else ""
    return f"{read}{found.seconds:.2f} s"


def difference_html(found: Difference) -> str:
    """Render a difference as a page: a line for each subject, then tables of tensors and values."""
    from ckptools.display.html import DICTS, Page

    page = Page(DICTS)
    for letter, side in (("A", found.a), ("B", found.b)):
        page.line(f"{letter}  {side_line(side)}")
    page.line(verdict_line(found), {True: "good", False: "change", None: "warn"}[found.same])
    page.line(cost_line(found), "dim")
    subjects = [(row.subject, row.verdict, row.detail) for row in found.subjects]
    page.table(plural(len(subjects), "subject"), SUBJECT_COLUMNS, subjects, opened=True)
    tensors = most_changed(row for row in found.tensors if row.verdict not in NOT_LISTED)
    if tensors:
        columns, cells = _tensor_table(tensors)
        page.table(f"{plural(len(cells), 'tensor')} not the same", columns, cells)
    values = [row for row in found.values if row.verdict in DIFFERENT]
    if values:
        page.table(f"{plural(len(values), 'value')} not the same", *_value_table([(row, 1) for row in values]))
    for note in found.notes:
        page.line(f"note  {note}", "dim")
    return page.html()
