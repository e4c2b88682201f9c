"""`ckptools stats`: compute statistics of values, tensor by tensor."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptools.cli.options import AnswerOptions, OpeningOptions, RowOptions, SelectionOptions
from ckptools.cli.printing import answered_in_json, arranged, opened, remark, remark_model, show_answer
from ckptools.cli.progress import Progress
from ckptools.errors import ReadError, UsageError
from ckptools.option import option
from ckptools.text import duration, plural, size

if TYPE_CHECKING:
    from ckptools.cli.arguments import CheckpointPaths
    from ckptools.display.screen import Screen
    from ckptools.keys.entries import Selection
    from ckptools.model.checkpoint import Checkpoint
    from ckptools.stats.record import Statistics


@dataclass(frozen=True)
class FigureOptions:
    """Options for the statistics that are computed."""

    hist: bool = option(False, "Draw how values are spread; reads them twice.", common=True)
    per_rank: bool = option(False, "A row for what each rank holds: which one is odd?", common=True)
    moments: bool = option(False, "Adam's moments beside the parameters, and how far a step moves them.", common=True)
    dead_rows: bool = option(False, "Rows of matrices that are all zero, or that never got a gradient.", common=True)


def stats(
    paths: CheckpointPaths,
    figures: FigureOptions,
    selection: SelectionOptions,
    rows: RowOptions,
    form: AnswerOptions,
    opening: OpeningOptions,
) -> None:
    """Show what the values are like: rms, norm, extremes, NaN.

    Of the model, unless --section names another part. Values are streamed from the shards, each region once, and
    summed in float64; NaN and infinities are counted, and left out of all other figures.

    Exit code: 0 answered, 1 something is not finite, or zero where it should not be, or could not be read in full, 2
    usage (also a section that is not there, or a filter that no tensor matches), 3 nothing could be read.

    Examples:
        ckptools stats PATH --sort nan
        ckptools stats PATH --section optimizer
    """
    from ckptools.display.next_command import command_arguments
    from ckptools.stats.passes import elsewhere

    special = figures.moments or figures.dead_rows
    if figures.moments + figures.dead_rows + (figures.hist or figures.per_rank) > 1:
        raise UsageError(None, "--moments and --dead-rows are answers of their own: give one of them, and no other")
    with answered_in_json(form.json, "ckptools/stats/1", "", paths):
        checkpoint = opened(paths, opening, every_item=not selection.selection.include)
        found = _found(checkpoint, selection.selection, figures, opening.jobs)
        others = "" if found.tensors or special else elsewhere(checkpoint, selection.selection)
        if not found.tensors and (selection.selection.include or selection.selection.exclude):
            text = "; ".join(filter(None, (f"no tensor matches {selection.selection.words}", others)))
            raise UsageError(checkpoint.path, f"{text}; ckptools tree lists all")
        _check_read(found)
    answer = replace(found, rows=arranged(found.rows, rows))
    show_answer(form, "stats", answer, answer.rows, lambda a, screen: _text(a, screen, rows))
    remark(f"\n{size(found.bytes_read)} of values read in {duration(found.seconds)}, checksums not compared")
    if selection.selection.section in ("", "model"):
        remark_model(checkpoint)
    if found.incomplete:
        remark(f"why not all of it: ckptools verify {command_arguments(checkpoint) or 'FILES'}")
    if not found.tensors:
        remark("; ".join(filter(None, ("nothing that was selected is a tensor", others))))
    if found.incomplete or not found.ok:
        raise SystemExit(1)


def _found(checkpoint: Checkpoint, selection: Selection, wanted: FigureOptions, jobs: int | None) -> Statistics[Any]:
    from ckptools.stats.figures import dead_rows, matrices, moments, pairs_of, statistics
    from ckptools.stats.passes import parts_of

    if wanted.moments:
        pairs = pairs_of(checkpoint, selection)
        with Progress(sum(pair.nbytes for pair in pairs) * 3 // 2) as progress:
            return moments(checkpoint, pairs, jobs, progress)
    if wanted.dead_rows:
        entries = matrices(checkpoint, selection)
        with Progress(sum(entry.value.nbytes for entry in entries) * 2) as progress:
            return dead_rows(checkpoint, entries, jobs, progress)
    parts = parts_of(checkpoint, selection, wanted.per_rank)
    with Progress(sum(part.nbytes for part in parts) * (2 if wanted.hist else 1)) as progress:
        return statistics(checkpoint.path, parts, wanted.hist, jobs, progress)


def _check_read(found: Statistics[Any]) -> None:
    if found.tensors and found.incomplete == found.tensors and not found.elements:
        first = found.rows[0]
        raise ReadError(
            found.path, f"nothing of {plural(found.tensors, 'tensor')} could be read; {first.name}: {first.problem}"
        )


def _text(found: Statistics[Any], screen: Screen, how: RowOptions) -> str:
    from ckptools.display.page import ScreenPage
    from ckptools.stats.record import drawable

    page = ScreenPage(screen if how.limit is None else screen._replace(rows=None))
    found._fill(page, ascii=not drawable(sys.stdout.encoding))
    return page.text()
