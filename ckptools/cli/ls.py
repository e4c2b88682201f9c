"""`ckptools ls`: the checkpoints of a run, and which of them is the newest whole one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptools.cli.answers import AS_TEXT, AnswerOptions, show_answer
from ckptools.cli.opening import AS_A_USER_WOULD, OpeningOptions, answered_in_json
from ckptools.cli.printing import remark, say
from ckptools.cli.selection import IN_ORDER, RowOptions, arranged
from ckptools.errors import UsageError

if TYPE_CHECKING:
    from ckptools.cli.arguments import DeepOfNewest, Every, RunFolderPath, Watched
    from ckptools.model.run_folder import RunFolder


def ls(
    folder: RunFolderPath,
    deep: DeepOfNewest = False,
    watch: Watched = False,
    every: Every = 5.0,
    rows: RowOptions = IN_ORDER,
    form: AnswerOptions = AS_TEXT,
    opening: OpeningOptions = AS_A_USER_WOULD,
) -> None:
    """List a run's checkpoints, and the newest that is whole.

    Each is looked into as inspect does. Every rank of the newest is read, and of older ones until one is whole.

    Exit code: 0 no checkpoint was found not to be whole, 1 one was, or a tracker such as `latest` leads to none that
    is whole, 2 usage, 3 no checkpoint here, or none can be opened. --watch that is interrupted ends with 0.
    """
    if watch:
        _watch(folder, deep, every, form, opening)
        return
    from ckptools.checks.run_folder.listing import checkpoints_in
    from ckptools.cli.progress import CheckpointLine

    with answered_in_json(form.json, "ckptools/ls/1", "ok", [folder]), CheckpointLine() as line:
        found = checkpoints_in(folder, deep=deep, on_found=line, **_how(opening))
    if not found.readable:
        say(f"error: {folder}: none of its checkpoints can be opened; the answer says why")
    _show(found, rows, form)
    if not found.ok:
        raise SystemExit(1 if found.readable else 3)


def _how(opening: OpeningOptions) -> dict[str, Any]:
    """How each checkpoint is opened.

    Raises:
        UsageError: an option goes with one checkpoint alone.
    """
    for word, given in (("--ranks", opening.ranks is not None), ("--only-this-file", opening.only_this_file)):
        if given:
            raise UsageError(None, f"{word} goes with one checkpoint; ls looks for those of a run by itself")
    return {name: value for name, value in opening.keywords().items() if name not in ("ranks", "only_this_file")}


def _watch(folder: str, deep: bool, every: float, form: AnswerOptions, opening: OpeningOptions) -> None:
    """Print what changes until somebody interrupts it, which is its end and no failure."""
    from contextlib import suppress

    from ckptools.checks.run_folder.listing import Listing
    from ckptools.cli.watching import watch
    from ckptools.files.location import location

    if form.json:
        raise UsageError(None, "--watch prints a line for each change: --jsonl, not --json")
    with suppress(KeyboardInterrupt):
        watch(Listing(location(folder), deep, may_be_empty=True, how=_how(opening)), form.jsonl, every)


def _show(found: RunFolder, rows: RowOptions, form: AnswerOptions) -> None:
    from ckptools.views.run_folder import cost_line, run_folder_text

    shown = replace(found, rows=arranged(found.rows, rows))
    show_answer(form, "ls", shown, shown.rows, run_folder_text)
    if not (form.json or form.jsonl):
        remark(f"\n{cost_line(found)}")
        if found.newest_whole is not None:
            from ckptools.views.next_command import quoted

            remark(f"next: ckptools inspect {quoted([found.newest_whole])}")
