"""`ls`: make a row for each checkpoint of a run, sort the rows, and verify until one is the newest whole one."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from ckptools.errors import CkptoolsError, ReadError, UnknownFormatError, UsageError
from ckptools.files.opening import location, path_of, reading
from ckptools.files.storage import just_written
from ckptools.formats.folder_search import MAX_DEPTH
from ckptools.formats.open import open_checkpoint
from ckptools.formats.rank_search.rank_names import parse
from ckptools.formats.shared import several_checkpoints
from ckptools.formats.shared.several_checkpoints import (
    ASTRAY,
    By,
    Save,
    Tracker,
    older_than,
    steps_by_name,
    written_in_another_order,
)
from ckptools.ls.record import CheckpointRow, LeftOverRow, LookedInto, RunFolder, TrackerRow, seconds_of
from ckptools.ls.search import Opened, RunSearch
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import FILES_FOUND
from ckptools.model.incidents import causes_of, incidents_of
from ckptools.model.problems import Problem
from ckptools.model.records import Rows
from ckptools.model.verdict import Verdict
from ckptools.text import and_more, and_others, few, moment_utc
from ckptools.training_state.sections import sections_of_kind
from ckptools.training_state.steps import step_in
from ckptools.verify.run import CHECKSUMS, unreadable, verify

MOST = 3
"""At most this many causes of a checkpoint are listed in its row."""

LOOKED_INTO: dict[tuple[bool, bool], LookedInto] = {
    (False, False): "verify",
    (True, False): "verify --deep",
    (False, True): "verify --values",
    (True, True): "verify --deep --values",
}
"""Command that reads as much, by whether checksums and values are read."""

UNORDERED = "nothing says which is the newest of"

NO_MODEL = "holds no model: nothing to go on from"


def row_of(name: str, path: Path, found: Opened | CkptoolsError, files: Sequence[Path]) -> CheckpointRow:
    """Make the row of a checkpoint, or of a path that cannot be opened; `files` are its known files."""
    made = _opened(name, path, found) if isinstance(found, Opened) else _unreadable(name, path, found, files)
    return made if made.whole else replace(made, notes=(*made.notes, *filter(None, [just_written(_time(made))])))


def _opened(name: str, path: Path, found: Opened) -> CheckpointRow:
    ck = found.facts
    here = [file for file in ck.files if file.status != "missing"]
    times = [file.modified for file in here if file.modified]
    only_counted = len(here) == 1 and ck.world_size.sources == (FILES_FOUND,)  # another rank's file may be lost
    world = None if only_counted else ck.world_size.exact
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
    """Add a verdict to a row; `looked_into` is the command that would find the same problems."""
    doubtful = [problem for problem in problems if problem.severity != "note"]
    found = incidents_of(causes_of(doubtful, ("error",)))
    return replace(
        row,
        whole=verdict.whole,
        recoverable=verdict.recoverable,
        joinable=verdict.joinable,
        depth=verdict.depth,
        verdict=verdict.headline,
        why="; ".join(f"{one.causes[0].code} {one.text}" for one in found[:MOST]) + and_others(len(found) - MOST),
        remedy=found[0].remedy if found else "",
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


def _written(paths: Iterable[Path]) -> tuple[int, str | None]:
    """Total size of files and folders, and the time of the last write; None without files."""
    nbytes, times = 0, []
    for file in chain.from_iterable(map(_files_in, paths)):
        with suppress(OSError):  # the file was removed meanwhile, or may not be read
            status = file.lstat()
            nbytes += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            times.append(status.st_mtime)
    return nbytes, moment_utc(max(times)) if times else None


def _files_in(path: Path) -> Iterable[Path]:
    """Yield a path, and everything in it if it is a folder; links are not followed."""
    yield path
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            yield from _files_in(entry)


# -- the newest whole checkpoint ---------------------------------------------------------------------------------------


def newest_first(
    rows: Sequence[CheckpointRow], counted: Callable[[CheckpointRow], int | None] = lambda _: None
) -> tuple[list[CheckpointRow], By]:
    """Sort rows from the newest to the oldest, and name the criterion.

    `counted` returns the steps that the optimizer of a checkpoint counts; it is called only if no better criterion
    decides. The number in the name of an unreadable checkpoint counts as its step if it does in the names of the
    others.
    """
    saves = [_save(row) for row in rows]
    named = steps_by_name(saves)
    made = [row if row.format else replace(row, step=named.get(n, row.step)) for n, row in enumerate(rows)]
    order, by = several_checkpoints.newest_first([_save(row) for row in made], lambda n: counted(made[n]))
    return [made[n] for n in order], by


def _save(row: CheckpointRow) -> Save:
    return Save(PurePath(row.name), row.step, _time(row))


def _time(row: CheckpointRow) -> float | None:
    return None if row.saved is None else seconds_of(row.saved)


def order_notes(rows: Sequence[CheckpointRow], by: By) -> Iterator[str]:
    """Yield notes on the order of the given rows, newest first: on contradictions, or that nothing proves an order.

    A run resumed from an earlier step leaves later checkpoints of its first attempt behind; copying changes file times.
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
    """Find the broken rows that are not proven to be older than the newest whole one; `rows` are newest first."""
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
    most = max((row.ranks for row in rows), default=0)
    made = [unproven_if_alone(row, most) for row in rows]
    for n, row in enumerate(made):
        if row.whole is not False:
            made[n] = unproven_if_alone(verify_row(row), most)
            if is_proven(made[n]):
                made[n] = replace(made[n], newest_whole=True)
                break
    return made


def unproven_if_alone(row: CheckpointRow, most: int) -> CheckpointRow:
    """Take "whole" from the file of one rank, which states no world size, if another checkpoint has `most` ranks."""
    alone = row.whole and row.files == row.ranks == 1 and row.world_size is None
    if not alone or most < 2:
        return row
    return replace(row, whole=None, verdict=f"not proven whole: one rank file; another checkpoint has {most} ranks")


def verdict_in_run(verdict: Verdict, row: CheckpointRow, most: int) -> Verdict:
    """Take "whole" from the verdict on the file of one rank, if another checkpoint of the run has `most` ranks."""
    alone = unproven_if_alone(replace(row, whole=verdict.whole), most)
    return verdict if alone.whole is verdict.whole else replace(verdict, whole=None, extent=alone.verdict)


def verified(
    row: CheckpointRow, opened: Callable[[Path], Checkpoint], deep: bool, jobs: int | None, values: bool = False
) -> CheckpointRow:
    """Verify the checkpoint of a row and update the row; unreadable parts become problems."""
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


# -- find the checkpoints of a run, sort them, and verify until one is the newest whole one ---------------------------


Stamp: TypeAlias = "tuple[tuple[int, int] | None, ...]"
"""Sizes and times of files and folders, None for a missing one; a changed stamp means that files changed."""

OnFound = Callable[[Path], None]


def checkpoints_in(
    folder: str | Path,
    *,
    deep: bool = False,
    on_found: OnFound | None = None,
    known: Checkpoint | None = None,
    levels: int = MAX_DEPTH,
    **how: Any,
) -> RunFolder:
    """List the checkpoints in a folder, the newest first, and find the newest whole one.

    Each is opened as by `inspect`. The newest is verified with all ranks, then older ones until one is whole.

    Args:
        folder: the folder of a run.
        deep: also compare checksums of verified checkpoints.
        on_found: called with the path of each checkpoint once it is opened.
        known: a checkpoint of the folder, opened with all ranks and these options, which is not opened again.
        levels: number of levels of subfolders that are searched; 0 for the folder alone.
        how: options of `open_checkpoint`.

    Raises:
        UnknownFormatError: no checkpoint is in the folder.
        ReadError: the folder cannot be listed.
        UsageError: the path is not a folder.
    """
    return Listing(location(folder), deep, on_found, how=how, known=known, levels=levels).look()


def unverified(folder: Path, on_found: OnFound | None, how: Mapping[str, Any]) -> RunFolder:
    """List the checkpoints in a folder as `checkpoints_in` does, but verify none: rows tell what opening told."""
    return Listing(folder, on_found=on_found, how=how, judge=lambda row: row).look()


@dataclass
class Listing:
    """Lists the checkpoints in a folder, also repeatedly: unchanged files are not read twice.

    The fields are the arguments of `checkpoints_in`; a folder without checkpoints is an error unless `may_be_empty`.
    `judge`, if given, replaces verification: it gets every row, the oldest first, and returns the final row. `files`
    are the files found for each checkpoint, by its name.
    """

    folder: Path
    deep: bool = False
    on_found: OnFound | None = None
    may_be_empty: bool = False
    how: Mapping[str, Any] = field(default_factory=dict)
    known: Checkpoint | None = None
    judge: Callable[[CheckpointRow], CheckpointRow] | None = None
    levels: int = MAX_DEPTH
    files: dict[str, Sequence[Path]] = field(default_factory=dict)
    _opened: dict[Path, tuple[tuple[Path, ...], Stamp, Opened]] = field(default_factory=dict)
    _verified: dict[str, tuple[CheckpointRow, CheckpointRow]] = field(default_factory=dict)

    def look(self) -> RunFolder:
        """List the folder in its current state; raises the errors of `checkpoints_in`."""
        started = time.perf_counter()
        _check_folder(self.folder)
        rows: list[CheckpointRow] = []
        files = self.files = {}

        def take(path: Path, found: Opened | CkptoolsError, its: Sequence[Path]) -> None:
            rows.append(row_of(search.name(path), path, found, its))
            files[rows[-1].name] = its
            if self.on_found is not None:
                self.on_found(path)

        follow = bool(self.how.get("follow_symlinks"))
        search = RunSearch(self.folder, follow, opened=self._open, on_checkpoint=take)
        search.run(self.levels)
        if not rows and not self.may_be_empty:
            temporary = f"; {search.name(search.temporary[0])} is temporary" if search.temporary else ""
            tracker = f"; {search.name(search.trackers[0].path)} {search.trackers[0].why}" if search.trackers else ""
            raise UnknownFormatError(
                self.folder,
                f"no checkpoint that ckptools knows in this folder{temporary}{tracker}; "
                "`ckptools formats` lists what it reads",
            )
        ordered, by = newest_first(rows, self._counted)
        if self.judge is not None:
            ordered = [self.judge(row) for row in reversed(ordered)][::-1]
        proven = newest_whole(ordered, self._verify if self.judge is None else lambda row: row)
        trackers = tracker_rows(self.folder, search.trackers, proven, files)
        return RunFolder(
            path=self.folder,
            ok=not any(map(is_wrong, proven)) and all(t.severity != "error" for t in trackers),
            rows=Rows(proven),
            checkpoints=len(proven),
            newest_whole=next((row.path for row in proven if row.newest_whole), None),
            ordered_by=by,
            trackers=Rows(trackers),
            left_over=Rows(LeftOverRow(search.name(path), *_written([path])) for path in search.temporary),
            notes=(*search.notes, *order_notes(proven, by)),
            seconds=time.perf_counter() - started,
            wrong_not_older=tuple(row.name for row in not_older(proven)),
        )

    def _open(self, path: Path, group: Sequence[Path]) -> Opened:
        """Open a path, or return the earlier result if none of its files has changed."""
        before = self._opened.get(path)
        if before is not None and before[0] == tuple(group) and _stamp(self.folder, before[2]) == before[1]:
            return before[2]
        opened = Opened.of(self._checkpoint(path))
        self._opened[path] = tuple(group), _stamp(self.folder, opened), opened
        return opened

    def _counted(self, row: CheckpointRow) -> int | None:
        """Return the steps that the optimizer of a checkpoint counts; None if unknown."""
        known = self._opened.get(path_of(row.path))
        return None if known is None else known[2].counted()

    def _verify(self, row: CheckpointRow) -> CheckpointRow:
        """Verify the checkpoint of a row, or return the earlier result if opening it gave the same row."""
        if row.path not in self._verified or self._verified[row.path][0] != row:
            every_rank = partial(self._checkpoint, all_ranks=True)
            self._verified[row.path] = row, verified(row, every_rank, self.deep, self.how.get("jobs"))
        return self._verified[row.path][1]

    def _checkpoint(self, path: Path, **more: Any) -> Checkpoint:
        if self.known is not None and self.known.path == path:
            return self.known
        return open_checkpoint(path, **{**self.how, **more})


def _check_folder(folder: Path) -> None:
    with reading(folder):
        is_here, is_folder = folder.exists(), folder.is_dir()
    if not is_here:
        raise ReadError(folder, "no such file or folder", "absent")
    if not is_folder:
        import shlex

        raise UsageError(folder, f"is a file; the checkpoints around it: ckptools ls {shlex.quote(str(folder.parent))}")


def _stamp(root: Path, opened: Opened) -> Stamp:
    """Stamp the files of a checkpoint, missing ones too, and their folders other than the run folder."""
    paths = [file.path for file in opened.facts.files]
    return tuple(map(_size_and_time, [*paths, *{path.parent for path in paths if path.parent != root}]))


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


# -- trackers ----------------------------------------------------------------------------------------------------------


def tracker_rows(
    root: Path, trackers: Sequence[Tracker], rows: Sequence[CheckpointRow], files: Mapping[str, Sequence[Path]]
) -> list[TrackerRow]:
    """Make a row for each tracker; links of all ranks to one checkpoint share a row.

    `rows` are the checkpoints, newest first, the newest whole one marked; `files` lists the files of each by its name.
    """
    groups: dict[tuple[object, str | None], list[TrackerRow]] = {}
    for tracker in trackers:
        row = _row(root, tracker, rows, files)
        linked = parse(tracker.path)
        kind = (tracker.path.parent, linked.group) if linked else tracker.path
        groups.setdefault((kind, row.checkpoint), []).append(row)
    return [replace(first, name=f"{first.name}{and_more(len(others))}") for first, *others in groups.values()]


def _row(
    root: Path, tracker: Tracker, rows: Sequence[CheckpointRow], files: Mapping[str, Sequence[Path]]
) -> TrackerRow:
    name = str(tracker.path.relative_to(root))
    if tracker.target is None:
        return TrackerRow(name, None, None, "error", f"{ASTRAY} {tracker.why}")
    led = [row for row in rows if _leads_to(tracker.target, row, files.get(row.name, ()))]
    if not led:
        return TrackerRow(name, None, None, "error", f"{ASTRAY} names {tracker.target.name}, which holds no checkpoint")
    named = next((row for row in led if row.newest_whole), led[0])
    if named.whole is False:
        return TrackerRow(name, named.name, named.step, "error", f"{ASTRAY} names {named.name}, which is not whole")
    # Compare a tracker only with checkpoints below its folder: each DeepSpeed save of a Trainer has its own tracker.
    below = [row for row in rows if path_of(row.path).is_relative_to(tracker.path.parent)]
    proven = (row for row in below if row.newest_whole)
    newest = next(proven, None) or next((row for row in below if row.whole is not False), None)
    if newest in (None, named) or named.newest_whole or (named.step is not None and named.step == newest.step):
        return TrackerRow(name, named.name, named.step)
    text = f"{ASTRAY} names {step_or_name(named)}; the newest whole one is {step_or_name(newest)}"
    return TrackerRow(name, named.name, named.step, "warning", text)


def step_or_name(row: CheckpointRow) -> str:
    """Name a checkpoint by its step, or by its name if the step is unknown."""
    return row.name if row.step is None else f"step {row.step}"


def _leads_to(target: Path, row: CheckpointRow, files: Sequence[Path]) -> bool:
    path = path_of(row.path)
    return any(one.is_relative_to(target) for one in (path, *files))
