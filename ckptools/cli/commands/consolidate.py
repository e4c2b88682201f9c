"""`ckptools consolidate`: write many shards into one file."""

from __future__ import annotations

import sys
from dataclasses import MISSING
from typing import TYPE_CHECKING

from ckptools.cli.options import JsonOptions, OpeningOptions
from ckptools.cli.printing import answered_in_json, opened, say, say_rendered, screen, show
from ckptools.cli.progress import Progress
from ckptools.cli.terminal import Printing
from ckptools.consolidate.options import ConsolidateOptions
from ckptools.display.screen import mark_of
from ckptools.errors import UsageError
from ckptools.option import option
from ckptools.text import encodable, printable

if TYPE_CHECKING:
    from ckptools.cli.arguments import CheckpointPaths
    from ckptools.consolidate.record import Consolidated


def consolidate(
    paths: CheckpointPaths,
    *,
    out: str = option(
        MISSING,
        "What to write: .pt, .safetensors or .dcp (a folder) says how; DIR/ gets model.safetensors in it. "
        "Also a URL: s3://, gs://, az://.",
        flag="--out -o",
        common=True,
        metavar="PATH",
    ),
    how: ConsolidateOptions,
    copies: bool = option(False, "With --dry-run: print every copy of bytes."),
    opening: OpeningOptions,
    form: JsonOptions,
) -> None:
    """Write full tensors into a .pt, .safetensors or DCP.

    A DCP folder is one to resume from, at any world size.

    Exit code: 0 written, 2 usage, 3 unreadable, or the output cannot be written, 4 refused: not whole, damaged, an
    output that exists, or too large for the disk.

    Examples:
        ckptools consolidate PATH -o model.safetensors
        ckptools consolidate PATH -o model.pt --allow-missing --dry-run
    """
    from ckptools.consolidate import record
    from ckptools.consolidate.run import consolidate as run

    if copies and not how.dry_run:
        raise UsageError(None, "--copies prints the copies of a plan; add --dry-run")
    if copies and form.json:
        raise UsageError(None, "--copies prints a table, and --json has the place of each key: give one of them")
    with answered_in_json(form.json, "ckptools/consolidate/1", "", paths):
        checkpoint = opened(paths, opening)
        with Progress(stage="planning") as progress:
            done = run(checkpoint, out, how, progress, progress.expect)
    if form.json:
        show(record.consolidation_json(checkpoint.path, done))
    else:
        _tell(done, copies)
    if done.planned and done.planned.no_room:
        raise done.planned.no_room


def _tell(done: Consolidated, copies: bool) -> None:
    from ckptools.consolidate import record
    from ckptools.display.page import page_text

    at = screen()
    lines = [page_text(done, at)]
    lines += record.copies(done.planned, at) if copies and done.planned else []
    show(encodable("\n".join(lines), sys.stdout.encoding))
    for row in record.remarks(done):
        if Printing.quiet and row.startswith("load: "):  # hide the hint, but not the notes on tensors left out
            continue
        if row.startswith("load: "):  # code to copy is never wrapped
            say_rendered([printable(row)])
        else:
            say(row, mark_of(row))
