"""The work of `ls`: find the checkpoints of a run, sort them, and verify the newest whole one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ckptools.errors import CkptoolsError, ReadError, UnknownFormatError, UsageError
from ckptools.files.location import location, path_of
from ckptools.files.opening import reading
from ckptools.formats.open import open_checkpoint
from ckptools.formats.rank_search.rank_names import parse
from ckptools.formats.shared.several import ASTRAY, Tracker
from ckptools.ls.record import CheckpointRow, RunFolder, TrackerRow
from ckptools.ls.rows import (
    is_wrong,
    left_over_row,
    newest_first,
    newest_whole,
    not_older,
    order_notes,
    row_of,
    verified,
)
from ckptools.ls.search import Opened, RunSearch
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows
from ckptools.text import and_more

Stamp: TypeAlias = "tuple[tuple[int, int] | None, ...]"
"""Sizes and times of some files and folders, None for a missing one, to notice changes."""

OnFound = Callable[[Path], None]


def checkpoints_in(
    folder: str | Path,
    *,
    deep: bool = False,
    on_found: OnFound | None = None,
    known: Checkpoint | None = None,
    **how: Any,
) -> RunFolder:
    """List the checkpoints in a folder, the newest first, and find the newest whole one.

    Each is opened as by `inspect`. The newest is verified with every rank, then older ones until one is whole.

    Args:
        folder: the folder of a run.
        deep: also compare checksums of verified checkpoints.
        on_found: called with each checkpoint that was opened.
        known: a checkpoint of the folder that was opened with every rank and these options, and is not opened again.
        how: options of `open_checkpoint`.

    Raises:
        UnknownFormatError: no checkpoint is in the folder.
        ReadError: the folder cannot be listed.
        UsageError: the path is no folder.
    """
    return Listing(location(folder), deep, on_found, how=how, known=known).look()


@dataclass
class Listing:
    """List the checkpoints in a folder, also repeatedly: unchanged files are not read twice.

    The fields are the arguments of `checkpoints_in`; a folder without checkpoints is accepted if it `may_be_empty`.
    `judge` replaces verification: it gets every row, the oldest first, and its row is final. `files` are those that
    were found of each checkpoint, by its name.
    """

    folder: Path
    deep: bool = False
    on_found: OnFound | None = None
    may_be_empty: bool = False
    how: Mapping[str, Any] = field(default_factory=dict)
    known: Checkpoint | None = None
    judge: Callable[[CheckpointRow], CheckpointRow] | None = None
    files: dict[str, Sequence[Path]] = field(default_factory=dict)
    _opened: dict[Path, tuple[tuple[Path, ...], Stamp, Opened]] = field(default_factory=dict)
    _verified: dict[str, tuple[CheckpointRow, CheckpointRow]] = field(default_factory=dict)

    def look(self) -> RunFolder:
        """List the folder in its current state; raises what `checkpoints_in` does."""
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
        search.run()
        if not rows and not self.may_be_empty:
            raise UnknownFormatError(self.folder, _empty(search))
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
            left_over=Rows(left_over_row(search.name(path), path) for path in search.temporary),
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
        """The steps that the optimizer of a checkpoint counts."""
        known = self._opened.get(path_of(row.path))
        return None if known is None else known[2].counted()

    def _verify(self, row: CheckpointRow) -> CheckpointRow:
        """Verify the checkpoint of a row, or return the earlier row if opening it gave the same facts."""
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


def _empty(search: RunSearch) -> str:
    temporary = f"; {search.name(search.temporary[0])} is temporary" if search.temporary else ""
    tracker = f"; {search.name(search.trackers[0].path)} {search.trackers[0].why}" if search.trackers else ""
    return (
        f"no checkpoint that ckptools knows in this folder{temporary}{tracker}; `ckptools formats` lists what it reads"
    )


def _stamp(root: Path, opened: Opened) -> Stamp:
    """The state of what may change: files of a checkpoint, missing ones too, and folders with no other files."""
    paths = [file.path for file in opened.facts.files]
    return tuple(map(_size_and_time, [*paths, *{path.parent for path in paths if path.parent != root}]))


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


# -- trackers ---------------------------------------------------------------------------------------------------------


def tracker_rows(
    root: Path, trackers: Sequence[Tracker], rows: Sequence[CheckpointRow], files: Mapping[str, Sequence[Path]]
) -> list[TrackerRow]:
    """A row for each tracker; links of all ranks to one checkpoint share a row.

    The rows of checkpoints are the newest first, the newest whole one marked; `files` are those of each by its name.
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
    newest = _newest_below(tracker.path.parent, rows)
    if newest in (None, named) or named.newest_whole or (named.step is not None and named.step == newest.step):
        return TrackerRow(name, named.name, named.step)
    text = f"{ASTRAY} names {_called(named)}; the newest whole one is {_called(newest)}"
    return TrackerRow(name, named.name, named.step, "warning", text)


def _newest_below(folder: Path, rows: Sequence[CheckpointRow]) -> CheckpointRow | None:
    """The newest whole checkpoint that a tracker in `folder` may name: each DeepSpeed save of a Trainer has its own."""
    below = [row for row in rows if path_of(row.path).is_relative_to(folder)]
    proven = (row for row in below if row.newest_whole)
    return next(proven, None) or next((row for row in below if row.whole is not False), None)


def _called(row: CheckpointRow) -> str:
    return row.name if row.step is None else f"step {row.step}"


def _leads_to(target: Path, row: CheckpointRow, files: Sequence[Path]) -> bool:
    path = path_of(row.path)
    return any(one.is_relative_to(target) for one in (path, *files))
