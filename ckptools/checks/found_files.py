"""Checks of files: all are there, complete, and of one save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptools.checks.results import judged
from ckptools.files.opening import reading
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.verification import Check
from ckptools.text import plural, size

PRESENCE = (
    Code.FILE_MISSING,
    Code.FILE_CUT,
    Code.VALUE_LOST,
    Code.STRAY_FILE,
    Code.NAME_CONTRADICTS,
    Code.ONE_OF_SEVERAL,
    Code.NOT_READ,
    Code.FILE_UNREADABLE,
    Code.NEVER_WRITTEN,
    Code.MODEL_PART_MISSING,
)
ONE_SAVE = (Code.ODD_FILE_SIZE, Code.MIXED_SAVES)

FAR_APART = 3600.0
"""Seconds between the first and the last file of one save; more makes one think of two saves."""


def presence(ck: Checkpoint) -> Check:
    """Whether every file is there and complete, and none is that does not belong to the checkpoint."""
    here = sum(f.is_here for f in ck.files)
    problems = [*(p for p in ck.problems if p.kind in PRESENCE), *_left_over(ck)]
    return judged("files", problems, f"{here} of {len(ck.files)} here and complete")


def one_save(ck: Checkpoint) -> Check:
    """Whether the sizes, times and steps of the files are those of one save."""
    here = [f for f in ck.files if f.is_here]
    sizes = sorted({f.nbytes for f in here})
    times = [f.modified for f in ck.files if f.modified]
    apart = max(times) - min(times) if times else 0.0
    problems = [p for p in ck.problems if p.kind in ONE_SAVE]
    if apart > FAR_APART:
        text = f"files were written {apart / 3600:.1f} hours apart; they may be of two saves, or copied one by one"
        problems.append(Problem(Code.MIXED_SAVES, text, severity="warning"))
    span = f"{size(sizes[0])} to {size(sizes[-1])}" if len(sizes) > 1 else size(sizes[0]) if sizes else "no size"
    return judged("one save", problems, f"{plural(len(here), 'file')} of {span}, written within {apart:.0f} s")


def _left_over(ck: Checkpoint) -> Iterator[Problem]:
    """What an interrupted save, or an interrupted consolidate, leaves behind."""
    for folder in dict.fromkeys(f.path.parent for f in ck.files):
        if not folder.is_dir():
            continue
        with reading(folder):
            names = sorted(entry.name for entry in folder.iterdir())
        for name in names:
            if name.endswith((".metadata.tmp", ".partial")):
                yield Problem(Code.LEFT_OVER, f"{Path(name).name} is left over from a write that was interrupted")
