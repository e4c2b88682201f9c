"""`ckptools inspect`: what is this checkpoint, is it whole, what is inside."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ckptools.cli.choices import Engine
from ckptools.cli.opening import AS_A_USER_WOULD, OpeningOptions, answered_in_json, opened
from ckptools.cli.printing import remark, remark_private, show
from ckptools.cli.selection import WITHOUT_PRIVATE, PrivateOption
from ckptools.cli.terminal import screen
from ckptools.text import encodable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptools.cli.arguments import AllRanks, AsJson, CheckpointPaths, EngineName, SectionName, Trust
    from ckptools.formats.options import Reader
    from ckptools.model.checkpoint import Checkpoint
    from ckptools.views.report import Report
    from ckptools.views.section_rows import Detail


def inspect(
    paths: CheckpointPaths,
    json: AsJson = False,
    section: SectionName = None,
    all_ranks: AllRanks = False,
    engine: EngineName = Engine.inert,
    trust: Trust = False,
    hidden: PrivateOption = WITHOUT_PRIVATE,
    opening: OpeningOptions = AS_A_USER_WOULD,
) -> None:
    """Show what a checkpoint is, and whether it is whole.

    Reads no tensor values and runs nothing that the file names; torch is not needed. Up to 64 ranks are read and
    compared, of more the one that was named; --all-ranks reads and compares all.

    Exit code: 0 nothing wrong, 1 not whole or an error found (also one rank's file without the others), 2 usage
    (also a folder with several checkpoints), 3 unreadable.
    """
    from ckptools.views.report import inspect_report

    with answered_in_json(json, "ckptools/inspect/1", "whole", paths):
        checkpoint = opened(paths, opening, all_ranks, reader_of(engine, trust))
    report = inspect_report(checkpoint)
    details = details_of(checkpoint, section, hidden.private)
    if json:
        show_json(report, details)
    else:
        show_text(report, details, hidden.private)
    if report.verdict.level == "bad":
        raise SystemExit(1)


def reader_of(engine: Engine, trust: bool) -> Reader:
    """What reads one file.

    Raises:
        UsageError: there is nothing to trust, for the inert reader runs nothing.
    """
    if engine is Engine.torch:
        import functools

        from ckptools.torch_engine import describe

        return functools.partial(describe.read, trust=trust)
    if trust:
        from ckptools.errors import UsageError

        raise UsageError(
            None, "--trust needs --engine torch; the inert reader runs nothing, so there is nothing to trust"
        )
    from ckptools.training_state import modules

    return modules.read_file


def details_of(checkpoint: Checkpoint, section: str | None, private: bool = False) -> tuple[Detail, ...]:
    """The sections that were asked for in full; private values only on request."""
    if section is None:
        return ()
    from ckptools.views.section_rows import section_details

    return section_details(checkpoint, section, private)


def show_json(report: Report, details: Sequence[Detail]) -> None:
    """Print one JSON object."""
    from ckptools.views.report_json import report_json

    show(report_json(report, details))


def show_text(report: Report, details: Sequence[Detail], private: bool = False) -> None:
    """Print the report, or the sections that were asked for; what was read and what comes next go to stderr."""
    from ckptools.views.report_text import next_line, read_line, report_text

    if details:
        from ckptools.views.section_text import section_text

        shown = section_text(report, details, screen())
    else:
        shown = report_text(report, screen(), private)
    show(encodable(shown, sys.stdout.encoding), "inspect")
    remark_private(sum(detail.private for detail in details))
    told = "\n".join(filter(None, (read_line(report), next_line(report))))
    remark(f"\n{told}")
