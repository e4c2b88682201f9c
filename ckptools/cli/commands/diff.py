"""`ckptools diff`: compare two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.cli.options import AnswerOptions, OpeningOptions, RowOptions, SelectionOptions
from ckptools.cli.printing import answered_in_json, arranged, opened, remark, show_answer
from ckptools.cli.progress import Progress
from ckptools.errors import UsageError
from ckptools.files.opening import path_of
from ckptools.option import option

if TYPE_CHECKING:
    from ckptools.cli.arguments import FirstSide, SecondSide
    from ckptools.diff.record import Difference
    from ckptools.display.screen import Screen
    from ckptools.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class ComparisonOptions:
    """Options for the parts of two checkpoints that are compared, and for tolerances."""

    values: bool = option(False, "Compare the values of tensors too, bit for bit.", common=True)
    rtol: float | None = option(
        None,
        "Relative tolerance: |a - b| <= atol + rtol * |b| counts as the same, whatever the dtypes. Reads values.",
        common=True,
    )
    atol: float | None = option(None, "Absolute tolerance. Reads values.", common=True)
    every_byte: bool = option(False, "Read also shards whose files state the same CRC-32 on both sides.")
    hash: Path | None = option(None, "Write digests of A into this JSON, to compare with elsewhere.", common=True)
    force: bool = option(False, "With --hash: overwrite the file.")


def diff(
    a: FirstSide,
    b: SecondSide = None,
    *,
    how: ComparisonOptions,
    selection: SelectionOptions,
    rows: RowOptions,
    form: AnswerOptions,
    opening: OpeningOptions,
) -> None:
    """Show what differs between two checkpoints.

    They may be of any formats and world sizes: layouts are shown, and are no difference. Without options keys, shapes,
    dtypes and plain values are compared (step, lr, param groups, scheduler, random states, data position).

    If they lie on two machines: `ckptools diff A --hash a.json` on one, `ckptools diff a.json B` on the other.

    Exit code: 0 nothing that was compared differs, 1 they differ or something cannot be compared, 2 usage,
    3 unreadable, 4 refused (the file for digests exists).

    Examples:
        ckptools diff A B
        ckptools diff A B --values --limit 20
    """
    if how.force and how.hash is None:
        raise UsageError(None, "--force overwrites a file of digests; add --hash FILE")
    if b is None or how.hash is not None:
        _write_digests(a, b, how, selection, form, opening)
        return
    with answered_in_json(form.json, "ckptools/diff/1", "same", [a, b]):
        found = compared(a, b, how, selection, opening)
    show(found, rows, form)
    if found.same is False:
        raise SystemExit(1)


def compared(
    a: str, b: str, how: ComparisonOptions, selection: SelectionOptions, opening: OpeningOptions
) -> Difference:
    """Open two checkpoints, or files of digests, and compare them; shows progress."""
    from ckptools.diff.compare import Wanted, compare

    wanted = Wanted(how.values, how.rtol, how.atol, how.every_byte, selection.selection, opening.jobs)
    left = _side(a, opening)
    sides = left, left if a == b else _side(b, opening)
    with Progress(stage="comparing") as progress:
        return compare(*sides, wanted, progress)


def _side(path: str, opening: OpeningOptions) -> Checkpoint | Path:
    from ckptools.diff.digest_file import is_digest_file

    return path_of(path) if is_digest_file(path_of(path)) else opened([path], opening)


def show(found: Difference, rows: RowOptions, form: AnswerOptions) -> None:
    """Print the record: every key as JSON; as text, only keys that differ, up to the limit."""
    from ckptools.diff.record import most_changed
    from ckptools.diff.text import NOT_LISTED, fill_difference
    from ckptools.display.page import ScreenPage
    from ckptools.model.records import Rows

    every = form.json or form.jsonl
    listed_tensors = found.tensors if every else most_changed(t for t in found.tensors if t.verdict not in NOT_LISTED)
    tensors = arranged(listed_tensors, rows)
    if not tensors:
        arranged(found.tensors, rows)  # refuses unknown columns
    values = Rows(v for v in found.values if every or v.verdict not in NOT_LISTED)[: rows.limit or None]
    listed = replace(found, tensors=tensors, values=values)
    answer = listed if every else found

    def text(_: Difference, screen: Screen) -> str:
        page = ScreenPage(screen)
        fill_difference(page, found, tensors, rows.limit)
        return page.text()

    show_answer(form, "diff", answer, listed.rows, text)


def _write_digests(
    path: str,
    b: str | None,
    how: ComparisonOptions,
    selection: SelectionOptions,
    form: AnswerOptions,
    opening: OpeningOptions,
) -> None:
    if how.hash is None:
        raise UsageError(None, "diff compares two: give B too, or --hash FILE to write digests of A")
    if b is not None:
        raise UsageError(None, "--hash FILE writes digests of A alone; leave out B, and compare FILE with it")
    if any([*vars(form).values(), *vars(selection).values()]):
        raise UsageError(
            None,
            "--hash FILE writes digests of every key, and prints no answer: it takes no --json or the "
            "like, and no --filter, --exclude or --section",
        )
    from ckptools.diff.digest_file import write_digest_file

    checkpoint = opened([path], opening)
    with Progress(stage="collecting keys") as progress:
        written = write_digest_file(checkpoint, how.hash, how.force, opening.jobs, progress)
    without = sum(not tensor.sha256 for tensor in written.tensors.values())
    remark(f"wrote {how.hash}: {len(written.tensors)} tensors, {len(written.values)} values")
    if without:
        remark(f"{without} of the tensors cannot be read whole, and have the reason in place of a digest")
        raise SystemExit(1)
