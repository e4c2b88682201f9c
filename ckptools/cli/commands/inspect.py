"""`ckptools inspect`: show the format and contents of a checkpoint, and whether it is whole."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Literal

from ckptools.cli.options import OpeningOptions, TableOptions
from ckptools.cli.printing import answered_in_json, opened, remark, remark_next, remark_private, screen, show
from ckptools.cli.terminal import Printing
from ckptools.errors import UsageError
from ckptools.option import option
from ckptools.text import encodable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptools.cli.arguments import CheckpointPaths
    from ckptools.formats.options import Reader
    from ckptools.inspect.record import Report
    from ckptools.inspect.sections import Detail


def inspect(
    paths: CheckpointPaths,
    *,
    section: str | None = option(
        None,
        "Show one section in full: model, optimizer, scheduler, rng, other, or a section's own name.",
        common=True,
        metavar="NAME",
        completed="sections",
    ),
    all_ranks: bool = option(False, "Read the structure of every rank, and compare them.", common=True),
    every: bool = option(
        False, "Of the folder of a run, every checkpoint, in order of steps.", flag="--all", common=True
    ),
    engine: Literal["inert", "torch"] = option(
        "inert", "inert: names are only names, nothing is run. torch: through torch.load, as a check."
    ),
    trust: bool = option(False, "With --engine torch: let the file name any class. Runs its code."),
    private: bool = option(False, "Show also values whose names begin with '_'.", common=True),
    form: TableOptions,
    opening: OpeningOptions,
) -> None:
    """Show what a checkpoint is, and whether it is whole.

    Reads no tensor values and runs nothing that the file names; torch is not needed. Up to 64 ranks are read and
    compared; with more, only the rank of PATH is read, unless --all-ranks is given.

    Exit code: 0 nothing wrong, 1 not whole or an error found (also one rank's file without the others), 2 usage
    (also a folder with several checkpoints if steps do not prove which whole one is the newest), 3 unreadable; with
    --all the highest of all checkpoints.

    Examples:
        ckptools inspect PATH
        ckptools inspect PATH --section optimizer
    """
    from ckptools.inspect.record import inspect_report

    if section is not None and form.table_format is not None:
        raise UsageError(
            None, "--table-format prints the table of sections; ckptools tree --section prints one in full"
        )
    if every:
        from ckptools.cli.every_checkpoint import OneOfRun, every_checkpoint
        from ckptools.inspect.sections import report_json

        if section is not None or form.table_format is not None or engine != "inert":
            text = "--all is about several checkpoints: it takes no --section, --table-format or --engine"
            raise UsageError(None, text)
        one = OneOfRun(
            "inspect",
            "whole",
            inspect_report,
            partial(report_json, indent=None),
            is_wrong=lambda found: found.verdict.level == "bad",
            with_verdict=lambda found, verdict: found._replace(verdict=verdict),
            all_ranks=all_ranks,
        )
        every_checkpoint(paths, opening, form.json, one)
        return
    with answered_in_json(form.json, "ckptools/inspect/1", "whole", paths):
        checkpoint = opened(paths, opening, all_ranks, reader_of(engine, trust))
    report = inspect_report(checkpoint)
    if report.verdict.level == "bad":
        from ckptools.doctor.way_out import way_out
        from ckptools.verify.files_to_fetch import files_to_fetch

        to_fetch = files_to_fetch(checkpoint, checkpoint.problems)
        following = way_out(checkpoint, opening.arguments, report.verdict, to_fetch)
        report = report._replace(next=str(following or report.next))
    details: tuple[Detail, ...] = ()
    if section is not None:
        from ckptools.inspect.sections import section_details

        details = section_details(checkpoint, section, private)
    if form.json:
        from ckptools.inspect.sections import report_json

        show(report_json(report, details))
    elif form.is_text:
        show_text(report, details, private)
    else:
        from ckptools.display.tables import table_text
        from ckptools.inspect.record import SECTION_COLUMNS, section_cells

        cells = section_cells(report.sections)
        show(encodable(table_text(SECTION_COLUMNS, cells, str(form.table_format)), sys.stdout.encoding))
    if report.verdict.level == "bad":
        raise SystemExit(1)


def reader_of(engine: str, trust: bool) -> Reader | None:
    """Return the function that reads one file; None for the inert reader.

    Raises:
        UsageError: `trust` was given for the inert reader, which runs nothing.
    """
    if engine == "torch":
        import functools

        from ckptools.torch_engine import describe

        return functools.partial(describe.read, trust=trust)
    if trust:
        raise UsageError(
            None, "--trust: the inert reader runs nothing, so there is nothing to trust; add --engine torch"
        )
    return None


def show_text(report: Report, details: Sequence[Detail], private: bool) -> None:
    """Print the report, or the requested sections; on stderr, the files read and the next command."""
    from ckptools.inspect.record import read_line, report_text

    if details:
        from ckptools.inspect.sections import section_text

        shown = section_text(report, details, screen())
    else:
        shown = report_text(report, screen(), private, everything=Printing.verbose)
    show(encodable(shown, sys.stdout.encoding))
    remark_private(sum(detail.private for detail in details))
    remark(f"\n{read_line(report)}")
    if report.next:
        remark_next(report.next)
