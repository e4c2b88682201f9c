"""A row for each checkpoint of a run, with the facts found while opening it, and which is the newest whole one."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path, PurePath

from ckptools.display.lines import cause_words
from ckptools.errors import CkptoolsError
from ckptools.files.last_write import just_written
from ckptools.files.location import path_of
from ckptools.formats.shared import save_order
from ckptools.formats.shared.save_order import By, Save, older_than, steps_by_name, written_in_another_order
from ckptools.ls.record import CheckpointRow, LeftOverRow, LookedInto, seconds_of
from ckptools.ls.search import Opened
from ckptools.model.causes import causes_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Problem
from ckptools.model.verdict import Verdict
from ckptools.text import and_others, few, moment_utc
from ckptools.training_state.sections import sections_of_kind
from ckptools.training_state.steps import step_in
from ckptools.verify.run import CHECKSUMS, unreadable, verify

MOST = 3
"""At most this many causes of a checkpoint are written out in its row."""

LOOKED_INTO: dict[tuple[bool, bool], LookedInto] = {
    (False, False): "verify",
    (True, False): "verify --deep",
    (False, True): "verify --values",
    (True, True): "verify --deep --values",
}
"""The command that reads as much, with checksums and with values or without."""

UNORDERED = "nothing says which is the newest of"

NO_MODEL = "holds no model: nothing to go on from"


def row_of(name: str, path: Path, found: Opened | CkptoolsError, files: Sequence[Path]) -> CheckpointRow:
    """The row of a checkpoint, or of what cannot be opened and why; `files` are those known of it."""
    made = _opened(name, path, found) if isinstance(found, Opened) else _unreadable(name, path, found, files)
    return made if made.whole else replace(made, notes=(*made.notes, *filter(None, [just_written(_time(made))])))


def _opened(name: str, path: Path, found: Opened) -> CheckpointRow:
    ck = found.facts
    here = [file for file in ck.files if file.status != "missing"]
    times = [file.modified for file in here if file.modified]
    world = ck.world_size.exact
    made = CheckpointRow(
        name,
        str(path),
        ck.format,
        step=ck.step.value,
        step_agrees=ck.step.agree,
        ranks=len(ck.ranks),
        world_size=world if isinstance(world, int) else None,
        files=len(here),
        bytes=sum(file.nbytes for file in here),
        saved=moment_utc(max(times)) if times else None,
        lr=found.rates,
    )
    return judged(made, found.verdict, ck.problems, "inspect")


def judged(row: CheckpointRow, verdict: Verdict, problems: Iterable[Problem], looked_into: LookedInto) -> CheckpointRow:
    """Add the verdict on its checkpoint to a row; `looked_into` is the command that finds the same."""
    doubtful = [problem for problem in problems if problem.severity != "note"]
    causes = causes_of(doubtful, ("error",))
    return replace(
        row,
        whole=verdict.whole,
        recoverable=verdict.recoverable,
        joinable=verdict.joinable,
        depth=verdict.depth,
        verdict=verdict.headline,
        why="; ".join(f"{cause.code} {cause_words(cause)}" for cause in causes[:MOST]) + and_others(len(causes) - MOST),
        remedy=causes[0].remedy if causes else "",
        codes=tuple(dict.fromkeys(problem.code for problem in doubtful)),
        looked_into=looked_into,
    )


def _unreadable(name: str, path: Path, error: CkptoolsError, files: Sequence[Path]) -> CheckpointRow:
    nbytes, saved = _written(files)
    steps = (step_in(part.name) for part in (path, path.parent, path.parent.parent))
    return CheckpointRow(
        name,
        str(path),
        step=next((step for step in steps if step is not None), None),
        files=sum(file.is_file() for file in files),
        bytes=nbytes,
        whole=False,
        verdict="NOT WHOLE: cannot be opened",
        why=error.reason if error.path == path else str(error),
        saved=saved,
    )


def left_over_row(name: str, path: Path) -> LeftOverRow:
    """The row of a temporary file or folder."""
    return LeftOverRow(name, *_written([path]))


def _written(paths: Iterable[Path]) -> tuple[int, str | None]:
    """Total bytes of files and folders, and the time of the last write; None without files."""
    nbytes, times = 0, []
    for file in chain.from_iterable(map(_files_in, paths)):
        with suppress(OSError):  # removed meanwhile, or no permission
            status = file.lstat()
            nbytes += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            times.append(status.st_mtime)
    return nbytes, moment_utc(max(times)) if times else None


def _files_in(path: Path) -> Iterable[Path]:
    """A path, and everything in it if it is a folder; links are not followed."""
    yield path
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            yield from _files_in(entry)


# -- the newest whole one ---------------------------------------------------------------------------------------------


def newest_first(
    rows: Sequence[CheckpointRow], counted: Callable[[CheckpointRow], int | None] = lambda _: None
) -> tuple[list[CheckpointRow], By]:
    """Sort rows from the newest to the oldest, and name the criterion.

    `counted` returns the steps that the optimizer of a checkpoint counts; it is asked only where nothing surer decides.
    A checkpoint that cannot be opened gets the step in its name where names of the others prove that it is one.
    """
    saves = [_save(row) for row in rows]
    named = steps_by_name(saves)
    made = [row if row.format else replace(row, step=named.get(n, row.step)) for n, row in enumerate(rows)]
    order, by = save_order.newest_first([_save(row) for row in made], lambda n: counted(made[n]))
    return [made[n] for n in order], by


def _save(row: CheckpointRow) -> Save:
    return Save(PurePath(row.name), row.step, _time(row))


def _time(row: CheckpointRow) -> float | None:
    return None if row.saved is None else seconds_of(row.saved)


def order_notes(rows: Sequence[CheckpointRow], by: By) -> Iterator[str]:
    """Notes on the order of rows, the newest first: what contradicts it, or that nothing proves one.

    A run resumed from an earlier step leaves later ones of its first attempt behind; copying changes file times.
    """
    if by == "nothing" and len(rows) > 1:
        names = few([row.name for row in rows], MOST)
        yield f"{UNORDERED} {names}: no step, no number in a name, no file time that proves an order"
    saves = [_save(row) for row in rows]
    pair = None if by in ("file time", "nothing") else written_in_another_order(saves)
    if pair is not None:
        first, newer = (f"step {rows[n].step}" if by == "step" else rows[n].name for n in pair)
        order = {"step": "steps", "name": "numbers in the names", "optimizer steps": "optimizers' steps"}[by]
        yield (
            f"{order} and file times disagree: {newer} was written before {first}; the order is that of the {order}; "
            f"{newer} may be of an earlier attempt"
        )


def not_older(rows: Sequence[CheckpointRow]) -> list[CheckpointRow]:
    """The rows, the newest first, that are wrong and not proven to be older than the newest whole one."""
    wrong = [n for n, row in enumerate(rows) if is_wrong(row)]
    newest = next((n for n, row in enumerate(rows) if row.newest_whole), len(rows))
    if not wrong or newest == len(rows):
        return [rows[n] for n in wrong]
    older = older_than([_save(row) for row in rows], newest)
    return [rows[n] for n in wrong if n < newest or n not in older]


def is_wrong(row: CheckpointRow) -> bool:
    """Whether a checkpoint is known not to be whole, or has another error."""
    return row.whole is False or bool(row.why)


def is_proven(row: CheckpointRow) -> bool:
    """Whether a verified checkpoint is whole, has no problem, and holds a model."""
    return row.whole is True and not row.why and NO_MODEL not in row.notes


def newest_whole(
    rows: Sequence[CheckpointRow], verify_row: Callable[[CheckpointRow], CheckpointRow]
) -> list[CheckpointRow]:
    """Mark the newest whole checkpoint in the rows (newest first), verifying it and all newer ones."""
    made = list(rows)
    for n, row in enumerate(made):
        if row.whole is not False:
            made[n] = verify_row(row)
            if is_proven(made[n]):
                made[n] = replace(made[n], newest_whole=True)
                break
    return made


def verified(
    row: CheckpointRow, opened: Callable[[Path], Checkpoint], deep: bool, jobs: int | None, values: bool = False
) -> CheckpointRow:
    """Verify the checkpoint of a row and update the row; unreadable parts are problems."""
    model = True
    try:
        ck = opened(path_of(row.path))
        found = verify(ck, deep=deep, values=values, jobs=jobs)
        verdict, problems = found.verdict, list(found.problems)
        model = bool(sections_of_kind(ck, "model"))
        checksums = next(check for check in found.checks if check.name == CHECKSUMS)
        notes = (f"checksums: {checksums.not_ok}",) if deep and checksums.not_ok else ()
    except CkptoolsError as error:
        problems, notes = [unreadable(error)], ()
        verdict = Verdict(False, None, None, "nothing", "", causes_of(problems))
    made = judged(row, verdict, problems, LOOKED_INTO[deep, values])
    return replace(made, notes=(*row.notes, *notes, *(() if model else (NO_MODEL,))))
