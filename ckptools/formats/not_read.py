"""What a folder holds that is not read: other checkpoints, links out of it, or nothing that any format knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckptools.errors import UnknownFormatError
from ckptools.files.file_type import head_at, what_is
from ckptools.formats.options import Options
from ckptools.formats.registry import Format
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem


def others_beside(
    checkpoint: Checkpoint, path: Path, formats: Sequence[Format], options: Options
) -> tuple[list[Path], str]:
    """Checkpoints beside one that was opened by its folder, and the links that were not followed."""
    if not path.is_dir():
        return [], ""
    from ckptools.formats import folder_search

    return folder_search.others_in(path, formats, (f.path for f in checkpoint.files), options.follow_symlinks)


def with_others(checkpoint: Checkpoint, folder: Path, others: Sequence[Path]) -> Checkpoint:
    """The checkpoint with a note that names others in its folder, unless a problem of it names them already."""
    known = {name for problem in checkpoint.problems for name in problem.files}
    unnamed = [path for path in others if path.name not in known]
    if not unnamed:
        return checkpoint
    from ckptools.formats.shared import several

    return _with_note(checkpoint, f"also here, and not read: {several.names(folder, unnamed)}; open it by its name")


def with_links(checkpoint: Checkpoint, folder: Path, links: str) -> Checkpoint:
    """The checkpoint with a note of the links that were not followed; empty for none."""
    return _with_note(checkpoint, f"also in {folder}: {links}") if links else checkpoint


def _with_note(checkpoint: Checkpoint, text: str) -> Checkpoint:
    return replace(checkpoint, problems=(*checkpoint.problems, Problem(Code.NOT_READ, text)))


def unknown_format(path: Path, links: str) -> UnknownFormatError:
    """The error for a path that no format recognises, which says what else it is.

    Args:
        path: a file or folder.
        links: those in the folder that were not followed; empty for none.
    """
    return UnknownFormatError(path, _what_else(path, links))


def _what_else(path: Path, links: str) -> str:
    if links:
        return f"no checkpoint that ckptools knows in this folder, and {links}"
    if path.is_dir():
        return "no checkpoint that ckptools knows in this folder; `ckptools formats` lists what it reads"
    if path.is_file():
        what = what_is(head_at(path))
        if what:
            return f"is {what}"
    return "not a checkpoint that ckptools knows; `ckptools formats` lists what it reads"
