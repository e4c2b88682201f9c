"""`ckptools browse`: explore a checkpoint in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ckptools.cli.options import OpeningOptions
from ckptools.cli.printing import opened
from ckptools.errors import UsageError

if TYPE_CHECKING:
    from ckptools.browse.app import Browser
    from ckptools.cli.arguments import CheckpointPath, OtherCheckpoint

SWITCH_SECONDS = 0.001
"""Interval at which Python switches threads, so that reading does not delay key presses."""


def browse(path: CheckpointPath, other: OtherCheckpoint = None, *, opening: OpeningOptions) -> None:
    """Look around in a checkpoint, in the terminal.

    Tabs show who is to blame and the facts of inspect, the keys as a tree, a map of ranks, optimizer, values that
    differ between ranks, files, and the checkpoints of the run; with OTHER, the differences, the largest change
    first. Tensor values are read only on request. `?` lists the keys, `q` leaves. Needs textual: pip install
    'ckptools[browse]'.

    Exit code: 0 looked at, 2 usage (also without a terminal, or without textual), 3 unreadable.

    Examples:
        ckptools browse PATH
        ckptools browse PATH OTHER
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(None, "browse needs a terminal; ckptools inspect and tree print what it shows")
    app = _program()(_of_step(path, opening), other or "", opening.arguments)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        app.run()
    finally:
        app.end_writing()
    if app.bug is not None:
        raise app.bug
    if app.error is not None:
        raise app.error


def _of_step(path: str, opening: OpeningOptions) -> str:
    """Return the path of the checkpoint of the step that the user wants, or the path itself if no step was given."""
    if opening.step is None:
        return path
    return str(opened([path], opening, all_ranks=False).path)


def _program() -> type[Browser]:
    """Import the application; only it needs textual.

    Raises:
        UsageError: textual is not installed.
    """
    try:
        from ckptools.browse.app import Browser
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("textual", "rich"):
            raise
        raise UsageError(None, "browse needs textual: pip install 'ckptools[browse]'") from error
    return Browser
