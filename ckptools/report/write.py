"""Writer of a report: one page of HTML about a checkpoint, to be mailed or kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.errors import UsageError

if TYPE_CHECKING:
    from ckptools.model.checkpoint import Checkpoint
    from ckptools.report.html import PageContents

Progress = Callable[[int, str], None]

SUFFIXES = (".html", ".htm")


def check_place(out: Path, force: bool, checkpoint: Checkpoint | None = None) -> None:
    """Refuse a report that would overwrite a file, before anything is read for it.

    Args:
        out: the file.
        force: overwrite an earlier report.
        checkpoint: its checkpoint, once that is known.

    Raises:
        OutputExistsError: a file would be overwritten.
        UsageError: its name does not end with `.html`, or its folder does not exist.
    """
    from ckptools.consolidate import output_place
    from ckptools.files.partial_files import check_place_of_file

    if out.suffix.lower() not in SUFFIXES:
        raise UsageError(out, "a report is a page of HTML: give it a name that ends in .html")
    if checkpoint is None:
        check_place_of_file(out, force)
    else:
        output_place.check_place(checkpoint, [out], force)


def findings(
    checkpoint: Checkpoint,
    *,
    deep: bool = False,
    values: bool = False,
    manifest: str | Path | None = None,
    ignore: Iterable[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> PageContents:
    """Collect the contents of a report: verify the checkpoint, and compute figures of its values if asked for.

    Args:
        checkpoint: the checkpoint, opened with every rank.
        deep: compare the CRC-32 of every tensor.
        values: look for NaN and infinities, and compute figures of each tensor.
        manifest: a JSON written by `consolidate(manifest=True)`; every tensor and file in it is compared.
        ignore: codes of problems that the checks ignore.
        jobs: number of threads.
        progress: called with bytes read and the file or tensor they are of.
    """
    from ckptools.inspect.record import inspect_report
    from ckptools.keys.entries import EVERYTHING
    from ckptools.report.html import PageContents
    from ckptools.stats.figures import statistics
    from ckptools.stats.reading import parts_of
    from ckptools.verify.run import verify

    verified = verify(
        checkpoint, deep=deep, values=values, manifest=manifest, ignore=ignore, jobs=jobs, progress=progress
    )
    parts = parts_of(checkpoint, EVERYTHING) if values else []
    figures = statistics(checkpoint.path, parts, False, jobs, progress) if values else None
    return PageContents(checkpoint, inspect_report(checkpoint), verified, deep, values, figures, time.time())


def write_report(checkpoint: Checkpoint, out: str | Path, *, force: bool = False, **how: Any) -> PageContents:
    """Write the report on a checkpoint into a file, which appears whole or not at all; see `Checkpoint.report`.

    Args:
        checkpoint: the checkpoint, opened with every rank.
        out: the file.
        force: overwrite it.
        how: arguments of `findings`.
    """
    from ckptools.files.partial_files import write_text
    from ckptools.report.html import report_page

    check_place(Path(out), force, checkpoint)
    found = findings(checkpoint, **how)
    write_text(Path(out), report_page(found), force)
    return found
