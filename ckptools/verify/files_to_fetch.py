"""Which files of a damaged checkpoint to copy again from where it was saved, as `rsync --files-from` takes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckptools.files.opening import common_folder
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.incidents import without_consequences
from ckptools.model.problems import NO_OBJECT, Code, Problem

FETCHED = (
    Code.FILE_MISSING,
    Code.FILE_CUT,
    Code.BAD_CHECKSUM,
    Code.VALUE_LOST,
    Code.MIXED_SAVES,
    Code.MANIFEST_DIFFERS,
    Code.NEVER_WRITTEN,
    Code.FILE_CONTRADICTS,
    Code.WORLD_SIZES_DISAGREE,
    Code.LAYOUT_DISAGREES,
    Code.COPIES_DIFFER,
    Code.MODEL_PART_MISSING,
)
"""Kinds of errors that another copy of the file may not have."""


ELSEWHERE = (Code.VALUE_LOST, Code.MODEL_PART_MISSING)
"""Kinds of errors whose reason may lie in the file of another rank than the one that they name."""


def folder_of(ck: Checkpoint) -> Path:
    """The folder that the names of `files_to_fetch` begin in: it holds all files of the checkpoint."""
    return common_folder([file.path.parent for file in ck.files]) if ck.files else ck.path


def files_to_fetch(ck: Checkpoint, problems: Iterable[Problem]) -> tuple[str, ...]:
    """List the files that errors blame, by name or by rank, relative to `folder_of` the checkpoint.

    A file in which the save itself failed is left out: where it was saved, it is no better.
    """
    folder, found = folder_of(ck), dict[Path, None]()
    for problem in without_consequences(problems):
        if problem.severity == "error" and problem.kind in FETCHED and problem.found != NO_OBJECT:
            found.update(dict.fromkeys(_blamed(ck, problem, folder)))
    inside = (path for path in found if path.is_relative_to(folder) and not path.is_dir())
    return tuple(sorted(path.relative_to(folder).as_posix() for path in inside))


def _blamed(ck: Checkpoint, problem: Problem, folder: Path) -> list[Path]:
    """The files that a problem names, or else those of the ranks that it names.

    Several files may have one name, in folders of several ranks; then the rank tells which one is meant.
    """
    of_ranks = [file.path for file in ck.files if file.rank in problem.all_ranks]
    if not problem.files:
        return [] if problem.kind in ELSEWHERE else of_ranks
    found = []
    for name in problem.files:
        alike = [file.path for file in ck.files if file.path.parts[-len(Path(name).parts) :] == Path(name).parts]
        of_them = [path for path in alike if path in of_ranks] or alike
        found += of_them if len(of_them) == 1 else [folder / name] if not of_them else []
    return found
