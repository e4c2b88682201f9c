"""All of `ls`: find the checkpoints of a run, put them in order, prove which is the newest whole one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ckptools.checks.run_folder.newest import newest_first, newest_whole, times_that_contradict, verified
from ckptools.checks.run_folder.rows import left_over_row, row_of
from ckptools.checks.run_folder.search import Opened, Search
from ckptools.checks.run_folder.trackers import tracker_rows
from ckptools.errors import CkptoolsError, ReadError, UnknownFormatError, UsageError
from ckptools.files.location import location
from ckptools.formats.opening import open_checkpoint
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.rows import Rows
from ckptools.model.run_folder import CheckpointRow, RunFolder

Stamp: TypeAlias = "tuple[tuple[int, int] | None, ...]"
"""Size and time of some files and folders, None of one that is not there: it changes when they do."""

OnFound = Callable[[Path], None]


def checkpoints_in(
    folder: str | Path,
    *,
    deep: bool = False,
    on_found: OnFound | None = None,
    **how: Any,
) -> RunFolder:
    """The checkpoints in a folder, the newest first, and the newest that is whole.

    Each is opened as `inspect` does. The newest is verified: every rank is read, and of older ones until one is whole.

    Args:
        folder: the folder of a run.
        deep: compare also the checksums of those that are verified.
        on_found: called with each checkpoint that was looked into.
        how: how each is opened, as `open_checkpoint` takes it.

    Raises:
        UnknownFormatError: no checkpoint is in it.
        ReadError: it cannot be listed.
        UsageError: it is no folder.
    """
    return Listing(location(folder), deep, on_found, how=how).look()


@dataclass
class Listing:
    """Looks at the checkpoints in a folder, also again and again: what did not change is not read twice.

    Attributes:
        folder: of the run.
        deep: compare checksums of those that are verified.
        on_found: called with each checkpoint that was looked into.
        may_be_empty: whether a folder without checkpoints is an answer too.
        how: how each is opened, as `open_checkpoint` takes it; links that lead out of the folder are followed if so.
    """

    folder: Path
    deep: bool = False
    on_found: OnFound | None = None
    may_be_empty: bool = False
    how: Mapping[str, Any] = field(default_factory=dict)
    _opened: dict[Path, tuple[tuple[Path, ...], Stamp, Opened]] = field(default_factory=dict)
    _verified: dict[str, tuple[CheckpointRow, CheckpointRow]] = field(default_factory=dict)

    def look(self) -> RunFolder:
        """Look at the folder as it is now.

        Raises:
            UnknownFormatError, ReadError, UsageError: as `checkpoints_in`.
        """
        started = time.perf_counter()
        _check_folder(self.folder)
        rows: list[CheckpointRow] = []
        files: dict[str, Sequence[Path]] = {}

        def take(path: Path, found: Opened | CkptoolsError, its: Sequence[Path]) -> None:
            rows.append(row_of(search.name(path), path, found, its))
            files[rows[-1].name] = its
            if self.on_found is not None:
                self.on_found(path)

        search = Search(self.folder, self._open, take, bool(self.how.get("follow_symlinks")))
        search.run()
        if not rows and not self.may_be_empty:
            raise UnknownFormatError(self.folder, _empty(search))
        ordered, by = newest_first(rows)
        proven = newest_whole(ordered, self._verify)
        contradiction = times_that_contradict(proven)
        trackers = tracker_rows(self.folder, search.trackers, proven, files)
        return RunFolder(
            path=self.folder,
            ok=all(row.whole is not False and not row.why for row in proven)
            and all(t.severity != "error" for t in trackers),
            rows=Rows(proven),
            checkpoints=len(proven),
            newest_whole=next((row.path for row in proven if row.newest_whole), None),
            ordered_by=by,
            trackers=Rows(trackers),
            left_over=Rows(left_over_row(search.name(path), path) for path in search.left_over),
            notes=(*search.notes, *([contradiction] if contradiction else [])),
            seconds=time.perf_counter() - started,
        )

    def _open(self, path: Path, group: Sequence[Path]) -> Opened:
        """What a path opens; what was opened before, where none of its files changed since."""
        before = self._opened.get(path)
        if before is not None and before[0] == tuple(group) and _stamp(_stamped(self.folder, before[2])) == before[1]:
            return before[2]
        opened = Opened.of(open_checkpoint(path, **self.how))
        self._opened[path] = tuple(group), _stamp(_stamped(self.folder, opened)), opened
        return opened

    def _verify(self, row: CheckpointRow) -> CheckpointRow:
        """The row of a verified checkpoint; that from before, where what opening it tells is the same."""
        if row.path not in self._verified or self._verified[row.path][0] != row:
            self._verified[row.path] = row, verified(row, self._every_rank, self.deep, self.how.get("jobs"))
        return self._verified[row.path][1]

    def _every_rank(self, path: Path) -> Checkpoint:
        return open_checkpoint(path, **{**self.how, "all_ranks": True})


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise ReadError(folder, "no such file or folder", "absent")
    if not folder.is_dir():
        import shlex

        raise UsageError(folder, f"is a file; the checkpoints around it: ckptools ls {shlex.quote(str(folder.parent))}")


def _empty(search: Search) -> str:
    temporary = f"; {search.name(search.left_over[0])} is temporary" if search.left_over else ""
    tracker = f"; {search.name(search.trackers[0].path)} {search.trackers[0].why}" if search.trackers else ""
    return (
        f"no checkpoint that ckptools knows in this folder{temporary}{tracker}; `ckptools formats` lists what it reads"
    )


def _stamped(root: Path, opened: Opened) -> list[Path]:
    """What has to stay as it is: the files of a checkpoint, missing ones too, and the folders that are all its own."""
    paths = [file.path for file in opened.facts.files]
    return [*paths, *{path.parent for path in paths if path.parent != root}]


def _stamp(paths: Sequence[Path]) -> Stamp:
    return tuple(map(_size_and_time, paths))


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
