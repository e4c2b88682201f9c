"""The page of `diff`: a line for each subject, likely causes of a jump of the loss first, then details."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress

from ckptools.diff.record import (
    DIFFERENT,
    SAME_STEP,
    SUBJECTS,
    UNPROVEN,
    Difference,
    Side,
    Subject,
    SubjectRow,
    TensorDifference,
    Training,
    ValueDifference,
    Verdict,
    holds_integers,
)
from ckptools.diff.sides import Contents
from ckptools.display.page import ScreenPage
from ckptools.display.screen import mark_of
from ckptools.display.tables import Column, table
from ckptools.model.records import grouped
from ckptools.option import spelled
from ckptools.text import MAX_KEY, and_more, clip, clip_middle, few, number, plural, shape, size, spans, told_apart

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
        yield f"|dW|/|W| up to {most.change:.1e} ({clip_middle(most.name, MAX_KEY)}){apart}"


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


# -- the page ----------------------------------------------------------------------------------------------------------


TENSOR_COLUMNS = (
    Column("tensor", "name"), Column("verdict", "verdict"),
    Column("|dW|/|W|", "number"), Column("max |dW|", "number"), Column("cosine", "number"),
    Column("first at"), Column("A → B", "value"), Column("detail", "value"),
)  # fmt: skip
VALUE_COLUMNS = (
    Column("value", "name"), Column("keys", "number"), Column("verdict", "verdict"), Column("A → B", "value"),
    Column("detail"),
)  # fmt: skip

NOT_LISTED: frozenset[Verdict] = frozenset({"same", "same checksum", "not compared"})
"""Verdicts of tensors and values that are counted, but not listed."""


def fill_difference(
    page: ScreenPage, found: Difference, tensors: Sequence[TensorDifference], limit: int | None = None
) -> None:
    """Add a difference with the given rows of tensors and `limit` rows of values, leaving out equal ones."""
    marks = {True: mark_of("same"), False: mark_of("differs"), None: mark_of("warn")}
    if found.training:
        page.line(training_line(found), marks[found.training.looks_normal])
    page.line(verdict_line(found), marks[found.same])
    for label, side in (("A  ", found.a), ("B  ", found.b)):
        page.line(side_line(side), label=label)
    page.gap()
    subjects = [(row.subject, row.verdict, row.detail) for row in found.subjects] + _layout(found)
    page.subjects(plural(len(subjects), "subject"), subjects)
    for note in found.notes:
        page.line(note, "dim", label="note  ", label_mark="")
    page.gap()
    _fill_tensors(page, found, [row for row in tensors if row.verdict not in NOT_LISTED])
    page.gap()
    values = _folded([row for row in found.values if row.verdict not in NOT_LISTED])[: limit or None]
    if values:
        page.short_table(_title("value", found.values, sum(count for _, count in values)), *_value_table(values))
    page.gap()
    page.line(cost_line(found), "dim")


def side_line(side: Side) -> str:
    """Describe one side in a line: path, how it was saved, step and number of ranks."""
    facts = [side.saved_as]
    facts += [f"step {side.step}"] if side.step is not None else []
    facts += [plural(side.world_size, "rank")] if side.world_size is not None else []
    facts += ["digests of it"] if side.digests else []
    return f"{side.path}   {', '.join(facts)}"


def _layout(found: Difference) -> list[tuple[str, str, str]]:
    """Make a row of the layouts, which never count as a difference: one run may be saved with two world sizes."""
    if (found.a.layout, found.a.world_size) == (found.b.layout, found.b.world_size):
        return []
    a, b = ("; ".join(side.layout) or "no tensors" for side in (found.a, found.b))
    return [("layout", "not counted", f"A: {a} / B: {b}")]


def _fill_tensors(page: ScreenPage, found: Difference, rows: Sequence[TensorDifference]) -> None:
    """Add the given tensors; then name the weights that did not change, if most did: frozen, or not loaded."""
    if rows:
        # The measures matter most; if the screen has no room for the index of the first difference, only pipes show it.
        width = page.screen.width
        room = width is None or max(map(len, table(*_tensor_table(rows, detailed=False)))) <= width
        page.short_table(_title("tensor", found.tensors, len(rows)), *_tensor_table(rows, first=room))
    weights = [row for row in found.tensors if row.subject == "weights"]
    same = [row.name for row in weights if row.verdict in ("same", "same checksum")]
    changed = sum(row.verdict == "differs" and bool(row.differing) for row in weights)
    if same and changed > len(same):
        page.line(f"{few(same)}   (frozen, or not loaded?)", label="unchanged weights: ", label_mark="")


def _title(noun: str, every: Sequence[TensorDifference | ValueDifference], shown: int) -> str:
    """State the number of rows, with their verdict if it is the same for all: `45 tensors differ; 3 shown`."""
    rows = [row for row in every if row.verdict not in NOT_LISTED]
    verdict = WORDS[rows[0].verdict] if len({row.verdict for row in rows}) == 1 else "are not the same"
    verdict = "differs" if len(rows) == 1 and verdict == "differ" else verdict
    return f"{plural(len(rows), noun)} {verdict}{f'; {shown} shown' if shown < len(rows) else ''}"


def _tensor_table(
    rows: Sequence[TensorDifference], first: bool = True, detailed: bool = True
) -> tuple[list[Column], list[list[str]]]:
    """Make the columns that some row fills, and their cells; `first` and `detailed` ask for the last three."""
    several = len({row.verdict for row in rows}) > 1
    measured = any(row.max is not None for row in rows)
    first = first and any(row.first is not None for row in rows)
    detailed = detailed and any(row.detail or _renamed(row) for row in rows)
    shown = [True, several] + [measured] * 3 + [first] * 2 + [detailed]
    return list(compress(TENSOR_COLUMNS, shown)), [list(compress(difference_cells(row), shown)) for row in rows]


def difference_cells(row: TensorDifference) -> list[str]:
    """Make the cells of a tensor in the columns of `TENSOR_COLUMNS`."""
    measures = [_number(row.change, ".1e"), _number(row.max, ".1e"), _number(row.cosine, ".6f")]
    valued = row.value_a is not None or row.value_b is not None
    first = [
        shape(row.first) if row.first is not None else "",
        change_words(row.value_a, row.value_b) if valued else "",
    ]
    return [row.name, row.verdict, *measures, *first, "; ".join(filter(None, (row.detail, _renamed(row))))]


def _renamed(row: TensorDifference) -> str:
    return f"in B {row.name_b}" if row.name_b not in (None, row.name) else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


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


def training_line(found: Difference) -> str:
    """State whether B looks like another step of the training of A, and how far weights moved; "" if nothing tells."""
    judged = found.training
    if judged is None:
        return ""
    a, b = found.a.step, found.b.step
    moved = [_moved(judged, found.tensors)] if judged.moved else []
    rates = [one if one == other else change_words(one, other) for one, other in judged.lr]
    rate = [f"lr {few(rates, 2)}"] if rates else []
    if judged.steps is None:
        unstated = "neither states its step" if a is b is None else f"{'A' if a is None else 'B'} states no step"
        return "; ".join([*judged.odd, *moved, *judged.unsure, unstated])
    if not judged.steps:
        odd = [one for one in judged.odd if one != SAME_STEP]
        return f"step {a} in both, but {'; '.join([*moved, *odd, *judged.unsure])}"
    if judged.looks_normal:
        back = " backwards, B is the earlier" if judged.steps < 0 else ""
        parts = "; ".join([*moved, *rate])
        return f"looks like {plural(abs(judged.steps), 'step')} of training{back}: {parts}"
    if judged.odd:
        return f"step {a} → {b}, but {'; '.join([*judged.odd, *moved])}"
    if not judged.weights and judged.optimizer_steps:
        moved = [f"{judged.optimizer_steps_moved} of {plural(judged.optimizer_steps, 'optimizer step')} moved"]
    parts = "; ".join([*moved, *judged.unsure, *rate])
    return f"step {a} → {b}: {parts}" if parts else f"step {a} → {b}"


def _moved(judged: Training, rows: Sequence[TensorDifference]) -> str:
    """State how many weights moved, and how far: `45 of 48 tensors moved, by 0.4% (median; most: norm.bias 2.1%)`."""
    words = f"{judged.moved} of {plural(judged.weights, 'tensor')} moved"
    if judged.median is None or judged.largest is None:
        return words
    integers = sum(row.subject == "weights" and bool(row.differing) and holds_integers(row) for row in rows)
    of = "median" if judged.measured + integers >= judged.moved else f"median of {judged.measured}"
    most = f"; most: {clip_middle(judged.largest_name, 60)} {_percent(judged.largest)}" if judged.measured > 1 else ""
    return f"{words}, by {_percent(judged.median)} ({of}{most})"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.0f}%"


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
