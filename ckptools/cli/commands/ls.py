"""`ckptools ls`: list the checkpoints of a run, and find the newest whole one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptools.cli.options import AnswerOptions, RowOptions, RunOptions
from ckptools.cli.printing import answered_in_json, arranged, remark, say, show_answer
from ckptools.cli.progress import Progress
from ckptools.option import option

if TYPE_CHECKING:
    from ckptools.cli.arguments import RunFolderPath
    from ckptools.ls.record import RunFolder


def ls(
    folder: RunFolderPath,
    *,
    deep: bool = option(
        False, "Compare the CRC-32s of the newest too, and of older ones until one is whole.", common=True
    ),
    rows: RowOptions,
    form: AnswerOptions,
    opening: RunOptions,
) -> None:
    """List a run's checkpoints, and the newest that is whole.

    Each is looked into as inspect does. Every rank of the newest is read, and of older ones until one is whole.

    Exit code: 0 no checkpoint is known to be broken, 1 one is, or a tracker such as `latest` names none that is whole,
    2 usage, 3 no checkpoint found, or none can be opened.

    Examples:
        ckptools ls DIR
        ckptools ls DIR --deep
    """
    from ckptools.ls.rows import checkpoints_in

    progress = Progress(stage="looking into the run", noun="checkpoint")
    with answered_in_json(form.json, "ckptools/ls/1", "ok", [folder]), progress:
        found = checkpoints_in(folder, deep=deep, on_found=progress.item, **opening.of_run("ls"))
    if not found.readable:
        say(f"error: {folder}: none of its checkpoints can be opened; the answer says why")
    _show(found, rows, form)
    if not found.ok:
        raise SystemExit(1 if found.readable else 3)


def _show(found: RunFolder, rows: RowOptions, form: AnswerOptions) -> None:
    from ckptools.ls.record import cost_line

    shown = replace(found, rows=arranged(found.rows, rows))
    show_answer(form, "ls", shown, shown.rows)
    if form.is_text:
        remark(f"\n{cost_line(found)}")
        if found.newest_whole is not None:
            from ckptools.display.next_command import quoted

            remark(f"next: ckptools inspect {quoted([found.newest_whole])}")
