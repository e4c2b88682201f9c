"""A row for each checkpoint of a run: what opening it told, and how it was saved."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from ckptools.checks.run_folder.search import Opened
from ckptools.errors import CkptoolsError
from ckptools.model.problems import Problem
from ckptools.model.run_folder import CheckpointRow, LeftOverRow, LookedInto
from ckptools.model.verdict import Verdict, without_consequences
from ckptools.text import and_others, moment_utc
from ckptools.training_state.steps import step_in

MOST = 3
"""Problems of a checkpoint that its row tells in full."""

JUST_NOW = 120.0
"""Seconds since the last write within which a checkpoint that is not whole may be about to become so."""


def row_of(name: str, path: Path, found: Opened | CkptoolsError, files: Sequence[Path]) -> CheckpointRow:
    """The row of a checkpoint.

    Args:
        name: how it is typed behind the folder.
        path: what opens it.
        found: the checkpoint, or why it cannot be opened.
        files: those that are known to be its.
    """
    made = _opened(name, path, found) if isinstance(found, Opened) else _unreadable(name, path, found, files)
    return made if made.whole else replace(made, notes=(*made.notes, *_just_now(made.saved)))


def _opened(name: str, path: Path, found: Opened) -> CheckpointRow:
    ck = found.facts
    here = [file for file in ck.files if file.status != "missing"]
    times = [file.modified for file in here if file.modified]
    world = ck.world_size.exact
    made = CheckpointRow(
        name=name,
        path=str(path),
        format=ck.format,
        step=ck.step.value,
        step_agrees=ck.step.agree,
        ranks=len(ck.ranks),
        world_size=world if isinstance(world, int) else None,
        files=len(here),
        bytes=sum(file.nbytes for file in here),
        whole=None,
        verdict="",
        why="",
        codes=(),
        looked_into="inspect",
        saved=moment_utc(max(times)) if times else None,
        lr=found.rates,
    )
    return judged(made, found.verdict, ck.problems, "inspect")


def judged(row: CheckpointRow, verdict: Verdict, problems: Iterable[Problem], looked_into: LookedInto) -> CheckpointRow:
    """A row with the verdict on its checkpoint.

    Args:
        row: without it.
        verdict: what was found.
        problems: what is wrong or doubtful; notes are left out.
        looked_into: by which command it would have been found.
    """
    told = [problem for problem in problems if problem.severity != "note"]
    errors = [problem for problem in without_consequences(told) if problem.severity == "error"]
    return replace(
        row,
        whole=verdict.whole,
        recoverable=verdict.recoverable,
        joinable=verdict.joinable,
        depth=verdict.depth,
        verdict=verdict.headline,
        why="; ".join(map(str, errors[:MOST])) + and_others(len(errors) - MOST),
        codes=tuple(dict.fromkeys(problem.code for problem in told)),
        looked_into=looked_into,
    )


def _unreadable(name: str, path: Path, error: CkptoolsError, files: Sequence[Path]) -> CheckpointRow:
    nbytes, last = written(files)
    about = error.reason if error.path == path else str(error)
    return CheckpointRow(
        name=name,
        path=str(path),
        format="",
        step=_step_of(path),
        step_agrees=True,
        ranks=0,
        world_size=None,
        files=sum(file.is_file() for file in files),
        bytes=nbytes,
        whole=False,
        verdict="NOT WHOLE: cannot be opened",
        why=about,
        codes=(),
        looked_into="nothing",
        saved=None if last is None else moment_utc(last),
    )


def _step_of(path: Path) -> int | None:
    """The step that the names of a checkpoint that cannot be opened tell."""
    found = (step_in(part.name) for part in (path, path.parent, path.parent.parent))
    return next((step for step in found if step is not None), None)


def _just_now(saved: str | None) -> tuple[str, ...]:
    if saved is None:
        return ()
    ago = time.time() - datetime.fromisoformat(saved.replace("Z", "+00:00")).timestamp()
    return (f"last written {max(0, round(ago))} s ago: it may not be finished",) if ago < JUST_NOW else ()


def left_over_row(name: str, path: Path) -> LeftOverRow:
    """The row of a temporary file or folder."""
    nbytes, last = written([path])
    return LeftOverRow(name, nbytes, None if last is None else moment_utc(last))


def written(paths: Iterable[Path]) -> tuple[int, float | None]:
    """Bytes in files and folders, and when the last of them was written; None where none is."""
    nbytes, last = 0, None
    for path in paths:
        for file in _files_in(path):
            try:
                status = file.lstat()
            except OSError:  # gone by now, or not ours to look at: it tells nothing
                continue
            nbytes += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            last = status.st_mtime if last is None else max(last, status.st_mtime)
    return nbytes, last


def _files_in(path: Path) -> Iterable[Path]:
    """A path, and everything in it where it is a folder; links are not followed."""
    yield path
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            yield from _files_in(entry)
