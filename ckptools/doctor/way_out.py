"""The command that leads out of a broken checkpoint: write the newest whole one, or list the files to copy again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from ckptools.model.problems import Problem
from ckptools.rules.verdict import is_alone, verdict_of
from ckptools.verify.files_to_fetch import files_to_fetch

MOST_ENTRIES = 64
"""A folder with more entries is not searched, as that may take minutes; `doctor` searches it."""


def way_out(ck: Checkpoint, how: Mapping[str, Any], problems: Iterable[Problem]) -> NextCommand | None:
    """Choose the command that gets a user going again; None if the checkpoint is usable, or no way is known.

    Args:
        ck: an opened checkpoint.
        how: the options that opened it.
        problems: of the checkpoint, as far as they are known.
    """
    verdict, named = verdict_of(ck), command_arguments(ck)
    if verdict.whole is not False or verdict.recoverable or is_alone(ck) or not named:
        return None
    run = run_of(ck, how)
    newest = next((row for row in run.rows if row.newest_whole), None) if run is not None else None
    if newest is not None and newest.path != str(ck.path):
        comment = f"{step_or_name(newest)}: the newest whole one here"
        return NextCommand("consolidate", f"{quoted([newest.path])} -o OUT.safetensors", comment)
    if run is not None and files_to_fetch(ck, problems):
        return NextCommand("verify", f"{named} --to-fetch", "the files to copy again, for rsync")
    return None


def run_of(ck: Checkpoint, how: Mapping[str, Any]) -> RunFolder | None:
    """List the checkpoints in the folder around one; None if there are too many files, or none can be listed."""
    with suppress(CkptoolsError, OSError):
        folder, levels = folder_around(ck.path)
        if len(ck.files) <= MOST_ENTRIES and _few_entries(folder):
            return checkpoints_in(folder, known=ck if ck.all_ranks else None, levels=levels, **of_run(how))
    return None


def _few_entries(folder: Path) -> bool:
    return len(list(islice(folder.iterdir(), MOST_ENTRIES + 1))) <= MOST_ENTRIES
