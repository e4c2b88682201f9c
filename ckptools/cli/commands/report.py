"""`ckptools report`: write one HTML page about a checkpoint."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.cli.options import OpeningOptions
from ckptools.cli.printing import opened, remark, screen, show
from ckptools.errors import CkptoolsError, ReadError
from ckptools.text import encodable, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptools.cli.arguments import (
        CheckpointPaths,
        Deep,
        Force,
        Ignored,
        Interactive,
        ManifestFile,
        ReportFile,
        WithFigures,
    )
    from ckptools.model.checkpoint import Checkpoint

STDOUT = "-"


def report(
    paths: CheckpointPaths,
    out: ReportFile,
    deep: Deep = False,
    values: WithFigures = False,
    manifest: ManifestFile = None,
    ignore: Ignored = None,
    force: Force = False,
    interactive: Interactive = False,
    *,
    opening: OpeningOptions,
) -> None:
    """Write a page of HTML about a checkpoint, to mail or keep.

    It shows what inspect and verify find, the verdict first; every rank is read. It is one file, without network or
    (but for --interactive) script, with the JSON of both in it. If the checkpoint cannot be opened, it shows why, and
    the answers of doctor.

    Exit code: that of verify. 0 no check failed, 1 a check failed (the page is written), 2 usage, 3 unreadable, 4 the
    page would overwrite something.
    """
    from ckptools.report.html import check_place

    if out != STDOUT:
        check_place(Path(out), force)
    try:
        checkpoint = opened(paths, opening)
    except ReadError as error:
        raise _reported(error, paths, out, force, opening) from error
    how: dict[str, Any] = {
        "deep": deep,
        "values": values,
        "manifest": manifest,
        "ignore": ignore or (),
        "jobs": opening.jobs,
    }
    _write(checkpoint, out, force, interactive, **how)


def _write(checkpoint: Checkpoint, out: str, force: bool, interactive: bool, *, values: bool, **how: Any) -> None:
    """Write the page, and print its first lines; `how` are options of `verify`."""
    from ckptools.cli.printing import ProgressLine
    from ckptools.report.html import findings, outcome_lines, report_page, write_report

    total = sum(f.nbytes for f in checkpoint.files)
    with ProgressLine(total * 2 if values else total) as line:
        if out == STDOUT:
            found = findings(checkpoint, values=values, progress=line, **how)
        else:
            own = {"force": force, "interactive": interactive}
            found = write_report(checkpoint, out, **own, values=values, progress=line, **how)
    if out == STDOUT:
        show(report_page(found, interactive).rstrip("\n"))
        remark("\n".join(outcome_lines(found, screen(sys.stderr))))
    else:
        lines = [*outcome_lines(found, screen()), f"wrote {printable(out)}"]
        show(encodable("\n".join(lines), sys.stdout.encoding))
    if not found.verification.ok:
        raise SystemExit(1)


def _reported(error: ReadError, paths: Sequence[str], out: str, force: bool, opening: OpeningOptions) -> CkptoolsError:
    """Write a page about an unreadable checkpoint, so that no older page is taken for it; return the error to raise."""
    from ckptools.doctor.examination import examined
    from ckptools.files.partial_files import write_text
    from ckptools.report.html import unreadable_page

    try:
        page = unreadable_page(examined(paths, **vars(opening)), str(error), time.time())
    except CkptoolsError:
        return error  # the path does not exist, or options contradict each other
    if out == STDOUT:
        show(page.rstrip("\n"))
    else:
        write_text(Path(out), page, force)
    return ReadError(error.path, error.reason if out == STDOUT else f"{error.reason}; {out} says so", error.kind)
