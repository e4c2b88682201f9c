"""The newest whole checkpoint of a run: every rank of it is read, and of older ones until one is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ckptools.checks.results import unreadable
from ckptools.checks.run_folder.rows import judged
from ckptools.checks.verify import verify
from ckptools.errors import CkptoolsError
from ckptools.files.location import path_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.run_folder import CheckpointRow
from ckptools.model.verdict import Verdict, causes_of
from ckptools.training_state.sections import sections_of_kind

Order = Literal["step", "file time"]
NO_MODEL = "holds no model: nothing to go on from"


def newest_first(rows: Sequence[CheckpointRow]) -> tuple[list[CheckpointRow], Order]:
    """Rows from the newest to the oldest, and what says so: their steps, or file times where none tells its step.

    Those without a step are behind the others; of one step, the one that was saved last is first.
    """
    ordered = sorted(rows, key=lambda row: row.name)
    ordered.sort(key=lambda row: row.saved or "", reverse=True)
    if all(row.step is None for row in rows):
        return ordered, "file time"
    return sorted(ordered, key=lambda row: (row.step is None, -(row.step or 0))), "step"


def times_that_contradict(rows: Sequence[CheckpointRow]) -> str:
    """What to say where a checkpoint of a later step was written before one of an earlier step; "" elsewhere.

    A run that went on from an earlier step leaves later ones of the first attempt behind; a copy changes file times.
    """
    timed = [row for row in rows if row.step is not None and row.saved is not None]
    for row in timed:
        later = [o for o in timed if (o.step or 0) < (row.step or 0) and str(o.saved) > str(row.saved)]
        if later:
            first = max(later, key=lambda o: o.step or 0)
            return (
                f"steps and file times disagree: step {row.step} was written before step {first.step}; "
                "steps are believed, but it may be of an earlier attempt"
            )
    return ""


def newest_whole(
    rows: Sequence[CheckpointRow], verify_row: Callable[[CheckpointRow], CheckpointRow]
) -> list[CheckpointRow]:
    """The rows, of which the newest whole one is marked; it and those that are newer were verified.

    Args:
        rows: the newest first.
        verify_row: verifies a checkpoint.
    """
    made = list(rows)
    for n, row in enumerate(made):
        if row.whole is not False:
            made[n] = verify_row(row)
            if made[n].whole and not made[n].why and NO_MODEL not in made[n].notes:
                made[n] = replace(made[n], newest_whole=True)
                break
    return made


def verified(row: CheckpointRow, opened: Callable[[Path], Checkpoint], deep: bool, jobs: int | None) -> CheckpointRow:
    """The row of a checkpoint with what `verify` says of it; what cannot be read on the way is wrong with it.

    Args:
        row: what opening it told.
        opened: opens a path with every rank.
        deep: compare checksums too.
        jobs: threads.
    """
    model = True
    try:
        ck = opened(path_of(row.path))
        found = verify(ck, deep=deep, jobs=jobs)
        verdict, problems = found.verdict, list(found.problems)
        model = bool(sections_of_kind(ck, "model"))
        checksums = next(check for check in found.checks if check.name.startswith("checksums"))
        notes = (f"checksums: {checksums.detail}",) if deep and checksums.result == "skip" else ()
    except CkptoolsError as error:
        problems, notes = [unreadable(error)], ()
        verdict = Verdict(False, None, None, "nothing", "", causes_of(problems))
    made = judged(row, verdict, problems, "verify --deep" if deep else "verify")
    return replace(made, notes=(*row.notes, *notes, *(() if model else (NO_MODEL,))))
