"""`ckptools doctor`: is a checkpoint whole, the newest of its run, loadable, and in step?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptools.cli.options import AnswerOptions, OpeningOptions
from ckptools.cli.printing import answered_in_json, say, show_answer
from ckptools.cli.progress import Progress
from ckptools.option import option

if TYPE_CHECKING:
    from ckptools.cli.arguments import AnyPaths


def doctor(
    paths: AnyPaths,
    *,
    to: str | None = option(None, "What it should load into, as match takes it.", common=True, metavar="MODEL"),
    deep: bool = option(
        False, "Read every byte: compare checksums, and name values that are worth a look.", common=True
    ),
    form: AnswerOptions,
    opening: OpeningOptions,
) -> None:
    """Answer the first questions about a checkpoint in one go.

    Whole? Are bytes and values right (--deep)? Which is the newest whole one of its run? Do step, name and world size
    agree? Does it load (--to)? Are optimizer and scheduler in step? Then at most three commands to type next. It only
    calls the others.

    Exit code: 0 nothing is wrong (warnings may be shown), 1 something is, 2 usage, 3 it cannot be opened.

    Examples:
        ckptools doctor PATH
        ckptools doctor PATH --deep
    """
    from ckptools.doctor.examination import examined as examine

    progress = Progress(stage="looking into the run", noun="checkpoint")
    with answered_in_json(form.json, "ckptools/doctor/1", "ok", paths), progress:
        found = examine(paths, to=to, on_found=progress.item, deep=deep, progress=progress, **vars(opening))
    show_answer(form, "doctor", found, found.rows)
    if not found.readable:
        say(f"error: {found.rows[0].evidence}")
    if not found.ok:
        raise SystemExit(1 if found.readable else 3)
