"""Which files of a damaged checkpoint to copy again from where it was saved, as `rsync --files-from` takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ckptools.files.opening import common_folder
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.incidents import without_consequences
from ckptools.model.problems import NO_OBJECT, Code, Problem
from ckptools.model.records import grouped

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
    folder, found = folder_of(ck), set[Path]()
    by_name = grouped((file.path for file in ck.files), lambda path: path.name)
    for problem in without_consequences(problems):
        if problem.severity == "error" and problem.kind in FETCHED and problem.found != NO_OBJECT:
            found |= _blamed(ck, problem, folder, by_name)
    inside = (path for path in found if path.is_relative_to(folder) and not path.is_dir())
    return tuple(sorted(path.relative_to(folder).as_posix() for path in inside))


def _blamed(ck: Checkpoint, problem: Problem, folder: Path, by_name: Mapping[str, Sequence[Path]]) -> set[Path]:
    """The files that a problem names, or else those of the ranks that it names.

    Several files may have one name, in several folders; if the rank does not tell which one is meant, all are listed:
    a sound file that is copied again stays sound.
    """
    ranks = set(problem.all_ranks)
    of_ranks = {file.path for file in ck.files if file.rank in ranks}
    if not problem.files:
        return set() if problem.kind in ELSEWHERE else of_ranks
    found = set[Path]()
    for name in problem.files:
        parts = Path(name).parts
        alike = [path for path in by_name.get(Path(name).name, ()) if path.parts[-len(parts) :] == parts]
        of_them = [path for path in alike if path in of_ranks] or alike
        found.update(of_them or [folder / name])
    return found
