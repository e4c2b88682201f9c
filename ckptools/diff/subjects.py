"""One line for each subject of a comparison: weights, moments, rates, generators."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from ckptools.diff.record import (
    DIFFERENT,
    SUBJECTS,
    UNPROVEN,
    Subject,
    SubjectRow,
    TensorDifference,
    ValueDifference,
    Verdict,
    holds_integers,
)
from ckptools.diff.sides import Contents
from ckptools.model.records import grouped
from ckptools.text import and_more, clip, clip_middle, few, number, plural, spans, told_apart

EXPECTED: tuple[Subject, ...] = ("weights", "moments", "optimizer steps", "lr", "scheduler", "rng", "data position")
"""Subjects that a training needs to resume; a line says so if neither side has them."""

LONG_NUMBER = re.compile(r"(?<![\w.])-?\d\.\d{6,25}(?:e-?\d+)?(?![\w.])")

MAX_VALUE = 30
"""Characters of one of two values in a line."""

MOST = 3
"""Values shown in a line."""


def subject_rows(
    tensors: Sequence[TensorDifference], values: Sequence[ValueDifference], a: Contents, b: Contents, complete: bool
) -> Iterator[SubjectRow]:
    """A row for each subject; `complete` says whether the rows cover all keys of both sides."""
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
    """How many tensors there are of each verdict, and the one that changed most."""
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
    """What differs, A's value before B's; alike differences once."""
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
    """The end of a name: `lr` of `optimizers.AdamW.param_groups.0.lr`."""
    return name.rpartition(".")[2]


def _change(row: ValueDifference) -> str:
    """The last key with both values."""
    alike = row.detail and row.value_a == row.value_b
    words = row.detail if alike else " → ".join(told_apart(_rounded(row.value_a, row.value_b), MAX_VALUE))
    return f"{_last_word(row.name)} {words}"


def change_words(a: str | None, b: str | None) -> str:
    """A's value and B's, rounded to six digits if these differ: `0.00299704 → 0.00298817`; `-` for none."""
    return " → ".join(_rounded(a, b))


def _rounded(a: str | None, b: str | None) -> list[str]:
    full = [a or "-", b or "-"]
    brief = [LONG_NUMBER.sub(lambda found: number(float(found[0])), text) for text in full]
    return brief if brief[0] != brief[1] else full


def _of_generators(rows: Sequence[ValueDifference], a: Contents, b: Contents) -> Iterator[str]:
    """Say which ranks have the same state on both sides, and which have another rank's."""
    by_name = grouped(rows, lambda row: row.name.removeprefix("rng "))
    alike = grouped(by_name, lambda name: _ranks(by_name[name]))
    yield from (f"{few(names)} {text}" for text, names in alike.items())
    yield from _of_other_ranks(a, b)


def _ranks(rows: Sequence[ValueDifference]) -> str:
    if len(rows) == 1:
        return "the same" if rows[0].verdict == "same" else rows[0].verdict
    words: dict[Verdict, str] = {"same": "the same", "differs": "other states"}
    found = grouped(rows, lambda row: words.get(row.verdict, row.verdict))
    if len(found) == 1:
        return f"{next(iter(found))} on every rank"
    ranks = {text: [-1 if row.rank is None else row.rank for row in some] for text, some in found.items()}
    return ", ".join(f"{text} on ranks {spans(some)}" for text, some in ranks.items())


def _of_other_ranks(a: Contents, b: Contents) -> Iterator[str]:
    """Ranks of B with the state of another rank of A: a file was restored in another's place."""
    for identity, value in b.values.items():
        known = a.values.get(identity)
        if value.subject != "rng" or known is None or len(known.contents) < 2:
            continue
        of = {content.digest: rank for rank, content in known.contents.items() if content.digest}
        moved = [(r, of[c.digest]) for r, c in value.contents.items() if of.get(c.digest, r) != r]
        if moved and len(of) == len(known.contents):
            swaps = [f"B's rank {r} has that of A's rank {other}" for r, other in moved]
            yield f"{value.name.removeprefix('rng ')}: {few(swaps, 2)}"
