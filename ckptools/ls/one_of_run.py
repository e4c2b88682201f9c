"""Is a path the folder of a run, and which checkpoint of it is of one step?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from ckptools.errors import CkptoolsError, SeveralError, UnknownFormatError, UsageError
from ckptools.files.opening import location, reading
from ckptools.formats.open import open_checkpoint
from ckptools.formats.shared.several_checkpoints import names
from ckptools.ls.record import CheckpointRow
from ckptools.ls.rows import OnFound, unverified
from ckptools.ls.search import in_one_below
from ckptools.model.checkpoint import Checkpoint
from ckptools.option import spelled
from ckptools.text import few, plural
from ckptools.training_state.steps import step_in

MOST = 20
"""At most this many steps are listed in a message."""

OF_A_SEARCH = ("follow_symlinks", "salvage", "jobs")
"""Options of `open_checkpoint` with which a run is searched; the others do not matter for the step."""


def paths_of_step(
    given: str | Path | Sequence[str | Path], step: int, on_found: OnFound | None = None, **how: Any
) -> Sequence[str | Path]:
    """Find the path of the checkpoint of a step; what is not the folder of a run is returned as it is.

    Every checkpoint of the run is opened, since two may be of one step; a tracker such as `latest` is not followed.

    Args:
        given: the path that the user gave; several are the rank files of one checkpoint.
        step: the training step.
        on_found: called with the path of each checkpoint once it is opened.
        how: options of `open_checkpoint`.

    Raises:
        UsageError: the run has no checkpoint of this step, or several.
        ReadError: the folder cannot be listed.
    """
    paths = [given] if isinstance(given, (str, Path)) or not isinstance(given, Sequence) else given
    if len(paths) != 1 or how.get("ranks") is not None or how.get("only_this_file"):
        return paths
    folder = location(paths[0])
    with reading(folder):
        if not folder.is_dir():
            return paths
    try:
        run = unverified(folder, on_found, _of_search(how))
    except UnknownFormatError:
        return paths  # what opens it says why it cannot be read
    if len(run.rows) == 1:
        return paths
    found = [row for row in run.rows if row.step == step]
    if len(found) == 1:
        return [found[0].path]
    if found:
        which = names(folder, [folder / row.name for row in found])
        raise UsageError(folder, f"{len(found)} checkpoints are of step {step}: {which}; name the one you mean")
    steps = sorted({row.step for row in run.rows if row.step is not None})
    here = f"there are {few(list(map(str, steps)), MOST)}" if steps else "none of them states its step"
    named = [f"{row.name} has it in its name, and states step {row.step}" for row in run.rows if _named(row) == step]
    silent = [row.name for row in run.rows if row.step is None] if steps else []
    unknown = [f"no step is known of {few(silent, MOST)}"] if silent else []
    text = f"none of {plural(len(run.rows), 'checkpoint')} is of step {step}: {'; '.join([here, *named, *unknown])}"
    raise UsageError(folder, text)


def _named(row: CheckpointRow) -> int | None:
    """The step in the name of a checkpoint whose contents state another one."""
    return None if row.step_agrees else step_in(PurePath(row.name).name)


def is_run(path: str | Path, on_found: OnFound | None = None, **how: Any) -> bool:
    """Whether a path is the folder of a run: it holds several checkpoints, and is not one itself.

    Args:
        path: the path that the user gave.
        on_found: called with the path of each checkpoint once it is opened.
        how: options of `open_checkpoint`.
    """
    folder = location(path)
    with reading(folder):
        if not folder.is_dir():
            return False
    options = _of_search(how)
    try:
        opened = open_checkpoint(folder, **options)
        if opened.path == folder and not in_one_below(folder, opened):
            return False
    except SeveralError:
        return True
    except CkptoolsError:
        pass  # its checkpoints may be broken, or a tracker name none of them
    try:
        return unverified(folder, on_found, options).checkpoints > 1
    except UnknownFormatError:
        return False


def _of_search(how: Mapping[str, Any]) -> dict[str, Any]:
    return {name: how[name] for name in OF_A_SEARCH if name in how}


def check_step(checkpoint: Checkpoint, step: int) -> Checkpoint:
    """Return a checkpoint that is of a step.

    Raises:
        UsageError: it is of another step, or states none.
    """
    stated = checkpoint.step.value
    if stated is None:
        text = f"states no step, so that nothing proves that it is of step {step}: leave out {spelled('step')}"
        raise UsageError(checkpoint.path, text)
    if stated != step:
        raise UsageError(checkpoint.path, f"is of step {stated}, not of step {step}")
    return checkpoint
