"""The command that leads out of a broken checkpoint: write the newest whole one, or list the files to copy again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from ckptools.display.next_command import NextCommand, command_arguments, quoted
from ckptools.errors import CkptoolsError
from ckptools.ls.folder_around import folder_around, of_run
from ckptools.ls.record import RunFolder
from ckptools.ls.rows import checkpoints_in, step_or_name
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.verdict import Verdict
from ckptools.rules.verdict import is_alone, verdict_of

MOST_ENTRIES = 64
"""A folder with more entries is not searched, as that may take minutes; `doctor` searches it."""


def way_out(
    ck: Checkpoint, how: Mapping[str, Any], verdict: Verdict, to_fetch: Collection[str], deep: bool = False
) -> NextCommand | None:
    """Choose the command that gets a user going again; None if the checkpoint is usable, or no way is known.

    Args:
        ck: an opened checkpoint.
        how: the options that opened it.
        verdict: on the checkpoint, as far as it was looked at.
        to_fetch: files to copy again, as far as is known.
        deep: whether every byte was read to find them.
    """
    named = command_arguments(ck)
    if verdict.whole is not False or verdict.recoverable or is_alone(ck) or not named:
        return None
    fetch = NextCommand(
        "verify", f"{named}{' --deep' if deep else ''} --to-fetch", "the files to copy again, for rsync"
    )
    if verdict_of(ck).whole is not False:  # only its bytes are wrong, which the search of a folder does not read
        return fetch if to_fetch else None
    run = run_of(ck, how)
    newest = run.newest if run is not None else None
    if newest is not None and newest.path != str(ck.path):
        comment = f"{step_or_name(newest)}: the newest whole one here"
        return NextCommand("consolidate", f"{quoted([newest.path])} -o OUT.safetensors", comment)
    return fetch if run is not None and to_fetch else None


def run_of(ck: Checkpoint, how: Mapping[str, Any]) -> RunFolder | None:
    """List the checkpoints in the folder around one; None if there are too many files, or none can be listed."""
    with suppress(CkptoolsError, OSError):
        folder, levels = folder_around(ck.path)
        if len(ck.files) <= MOST_ENTRIES and _few_entries(folder):
            return checkpoints_in(folder, known=ck if ck.all_ranks else None, levels=levels, **of_run(how))
    return None


def _few_entries(folder: Path) -> bool:
    return len(list(islice(folder.iterdir(), MOST_ENTRIES + 1))) <= MOST_ENTRIES
