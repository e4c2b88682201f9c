"""Writing a report: one page of HTML about a checkpoint, to be mailed or kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.errors import UsageError

if TYPE_CHECKING:
    from ckptools.model.checkpoint import Checkpoint
    from ckptools.views.html.report import Findings

Progress = Callable[[int, str], None]

SUFFIXES = (".html", ".htm")


def check_place(out: Path, force: bool, checkpoint: Checkpoint | None = None) -> None:
    """Refuse a report that would overwrite something, before anything is read for it.

    Args:
        out: the file.
        force: overwrite an earlier report.
        checkpoint: what it is about, once that is known.

    Raises:
        OutputExistsError: it is in the way of something.
        UsageError: its name ends in something else than `.html`, or there is no folder for it.
    """
    from ckptools.consolidate import output
    from ckptools.files.partial_files import check_place_of_file

    if out.suffix.lower() not in SUFFIXES:
        raise UsageError(out, "a report is a page of HTML: give it a name that ends in .html")
    if checkpoint is None:
        check_place_of_file(out, force)
    else:
        output.check_place(checkpoint, [out], force)


def findings(
    checkpoint: Checkpoint,
    *,
    deep: bool = False,
    values: bool = False,
    manifest: str | Path | None = None,
    ignore: Iterable[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Findings:
    """Look into a checkpoint for a report: verify it, draw it, and take figures of its values where that is asked for.

    Args:
        checkpoint: the checkpoint, of which every rank was read.
        deep: compare the CRC-32 of every tensor.
        values: look for NaN and infinities, and take figures of each tensor.
        manifest: a JSON that `consolidate(manifest=True)` wrote; every tensor and file in it is compared.
        ignore: codes of problems that the checks do not count.
        jobs: threads.
        progress: called with bytes read and the file or tensor they are of.
    """
    from ckptools.checks.statistics.chosen import parts_of
    from ckptools.checks.statistics.values import statistics
    from ckptools.checks.verify import verify
    from ckptools.contents.selection import EVERYTHING
    from ckptools.views.html.report import Findings
    from ckptools.views.report import inspect_report

    verified = verify(
        checkpoint, deep=deep, values=values, manifest=manifest, ignore=ignore, jobs=jobs, progress=progress
    )
    parts = parts_of(checkpoint, EVERYTHING) if values else []
    figures = statistics(checkpoint.path, parts, False, jobs, progress) if values else None
    return Findings(checkpoint, inspect_report(checkpoint), verified, deep, values, figures, time.time())


def write_report(checkpoint: Checkpoint, out: str | Path, *, force: bool = False, **how: Any) -> Findings:
    """Write the report on a checkpoint into a file, which appears whole or not at all; see `Checkpoint.report`.

    Args:
        checkpoint: the checkpoint, of which every rank was read.
        out: the file.
        force: overwrite it.
        how: what `findings` takes.
    """
    from ckptools.files.partial_files import write_text
    from ckptools.views.html.report import report_page

    check_place(Path(out), force, checkpoint)
    found = findings(checkpoint, **how)
    write_text(Path(out), report_page(found), force)
    return found
