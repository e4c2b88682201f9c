"""`ckptools report`: write one HTML page about a checkpoint."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.cli.options import CheckOptions, OpeningOptions
from ckptools.cli.printing import opened, remark, screen, show
from ckptools.cli.progress import Progress
from ckptools.errors import CkptoolsError, ReadError
from ckptools.option import option
from ckptools.text import encodable, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptools.cli.arguments import CheckpointPaths

STDOUT = "-"


@dataclass(frozen=True)
class ReportedChecks(CheckOptions):
    """Options for the checks that a report shows."""

    values: bool = option(False, "Read every tensor; look for NaN, and put figures of each on the page.")


def report(
    paths: CheckpointPaths,
    *,
    out: str = option(MISSING, "The page to write, x.html; - for standard output.", flag="--out -o", metavar="FILE"),
    checks: ReportedChecks,
    force: bool = option(False, "Overwrite an output that exists."),
    interactive: bool = option(False, "Let one script in the page sort and filter tables, and link what is related."),
    opening: OpeningOptions,
) -> None:
    """Write a page of HTML about a checkpoint, to mail or keep.

    It shows what inspect and verify find, the verdict first; every rank is read. It is one file, without network or
    (but for --interactive) script, with the JSON of both in it. If the checkpoint cannot be opened, it shows why, and
    the answers of doctor.

    Exit code: that of verify. 0 no check failed, 1 a check failed (the page is written), 2 usage, 3 unreadable, 4 the
    page would overwrite something.
    """
    from ckptools.report.html import check_place, findings, outcome_lines, report_page, write_report
    from ckptools.verify.run import bytes_to_verify

    if out != STDOUT:
        check_place(Path(out), force)
    try:
        checkpoint = opened(paths, opening)
    except ReadError as error:
        raise _reported(error, paths, out, force, opening) from error
    total = bytes_to_verify(checkpoint, checks.deep, checks.values, checks.manifest)
    with Progress(total) as progress:
        how = {**vars(checks), "jobs": opening.jobs, "progress": progress}
        if out == STDOUT:
            found = findings(checkpoint, **how)
        else:
            found = write_report(checkpoint, out, force=force, interactive=interactive, **how)
    if out == STDOUT:
        show(report_page(found, interactive, out).rstrip("\n"))
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
        page = unreadable_page(examined(paths, **vars(opening)), str(error), Path(out).name)
    except CkptoolsError:
        return error  # the path does not exist, or options contradict each other
    if out == STDOUT:
        show(page.rstrip("\n"))
    else:
        write_text(Path(out), page, force)
    return ReadError(error.path, error.reason if out == STDOUT else f"{error.reason}; {out} says so", error.kind)
