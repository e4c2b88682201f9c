"""Find the run that a checkpoint is of: the folder around it, and the options that apply to every checkpoint there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptools.formats.folder_search import MAX_DEPTH
from ckptools.training_state.steps import step_in

OF_A_RUN = ("follow_symlinks", "jobs", "weights", "rules", "shapes", "names")
"""Options that apply to every checkpoint of a run; the others apply to a single checkpoint."""


def of_run(how: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the options that apply to every checkpoint of a run."""
    return {name: how[name] for name in OF_A_RUN if name in how}


def folder_around(path: Path) -> tuple[Path, int]:
    """Find the run folder of a checkpoint, and how many levels of it are searched.

    It is the parent of a folder named after a step, else the folder itself. Around a file that no step names, only
    its own folder is searched: what lies below may be of anybody, as in a home folder.
    """
    start = path if path.is_dir() else path.absolute().parent
    for folder in (start.absolute(), start.absolute().parent):
        if step_in(folder.name) is not None:
            return _as_given(folder.parent), MAX_DEPTH
    return _as_given(start), MAX_DEPTH if path.is_dir() else 0


def _as_given(folder: Path) -> Path:
    """Shorten a folder as a user would type it: relative to the current directory if it lies below."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
