"""`ckptools inspect`: what is this checkpoint, is it whole, what is inside."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptools.cli.printing import show
from ckptools.text import encodable
from ckptools.views.tables import Screen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptools.formats.options import Reader
    from ckptools.model.checkpoint import Checkpoint
    from ckptools.views.details import Detail
    from ckptools.views.report import Report

ROWS = 40
"""Rows of a table on a terminal."""


class Engine(str, Enum):
    """What reads the files."""

    inert = "inert"
    torch = "torch"


class Weights(str, Enum):
    """Which copy of the model is read where there are two."""

    fp32 = "fp32"
    module = "module"


# readable=False everywhere: what cannot be read is our own line with exit code 3, not typer's usage error.
CheckpointPaths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        show_default=False,
        help="A rank file (its siblings are found), a folder (of a run: what its tracker names, or the only checkpoint"
        " in it), any checkpoint file; or several rank files, by any name.",
    ),
]
RanksPattern = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="PATTERN",
        help="What the rank files in the folder PATH are called, such as 'model-{rank}-of-{world}.pt'.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for other programs.")]
SectionName = Annotated[
    str | None,
    typer.Option(help="Show one section in full: model, optimizer, scheduler, rng, other, or a section's own name."),
]
AllRanks = Annotated[bool, typer.Option("--all-ranks", help="Read the structure of every rank, and compare them.")]
OnlyThisFile = Annotated[bool, typer.Option("--only-this-file", help="Do not look for the other ranks' files.")]
FollowSymlinks = Annotated[bool, typer.Option("--follow-symlinks", help="Accept links that lead out of the folder.")]
WhichWeights = Annotated[
    Weights, typer.Option(help="Where the model is held twice (DeepSpeed, Megatron): fp32 master copy, or module.")
]
RulesFile = Annotated[
    Path | None,
    typer.Option(
        "--rules", readable=False, help="JSON that says how tensor-parallel weights are joined (Megatron, Meta Llama)."
    ),
]
ShapesFrom = Annotated[
    Path | None,
    typer.Option(
        "--shapes",
        readable=False,
        metavar="FROM",
        help="For FSDP1 flat parameters: what tells their shapes, another checkpoint or a JSON of name to shape.",
    ),
]
NamesFrom = Annotated[
    Path | None,
    typer.Option(
        "--names",
        readable=False,
        metavar="FROM",
        help="For an optimizer keyed by number: what names its parameters, a checkpoint that keeps the module's order "
        "or a JSON list in the optimizer's order.",
    ),
]
EngineName = Annotated[
    Engine, typer.Option(help="inert: names are only names, nothing is run. torch: through torch.load, as a check.")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="With --engine torch: let the file name any class. Runs its code.")
]


def inspect(
    paths: CheckpointPaths,
    json: AsJson = False,
    section: SectionName = None,
    all_ranks: AllRanks = False,
    ranks: RanksPattern = None,
    only_this_file: OnlyThisFile = False,
    follow_symlinks: FollowSymlinks = False,
    weights: WhichWeights = Weights.fp32,
    rules: RulesFile = None,
    shapes: ShapesFrom = None,
    names: NamesFrom = None,
    engine: EngineName = Engine.inert,
    trust: Trust = False,
) -> None:
    """Show what a checkpoint is, and whether it is whole.

    Reads no tensor values and runs nothing that the file names; torch is not needed. Of up to 32 other ranks it reads
    what tells rank, world size and step, of more that their files end well; --all-ranks reads and compares all.

    Exit code: 0 shown and nothing wrong (also for one rank's file alone), 1 problems found, 2 usage (also a
    folder with several checkpoints), 3 unreadable.
    """
    from ckptools.cli.opening import answered_in_json, opened
    from ckptools.views.report import inspect_report

    with answered_in_json(json, "ckptools/inspect/1", "whole", paths):
        read = reader_of(engine, trust)
        told = (weights, rules, shapes, names)
        checkpoint = opened(paths, ranks, only_this_file, follow_symlinks, *told, all_ranks, read)
    report = inspect_report(checkpoint)
    details = details_of(checkpoint, section)
    if json:
        show_json(report, details)
    else:
        show_text(report, details)
    if report.errors:
        raise typer.Exit(1)


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


def details_of(checkpoint: Checkpoint, section: str | None) -> tuple[Detail, ...]:
    """The sections that were asked for in full."""
    if section is None:
        return ()
    from ckptools.views.details import section_details

    return section_details(checkpoint, section)


def show_json(report: Report, details: Sequence[Detail]) -> None:
    """Print one JSON object."""
    from ckptools.views.json import report_json

    show(report_json(report, details))


def show_text(report: Report, details: Sequence[Detail]) -> None:
    """Print the report, or the sections that were asked for; what was read and what comes next go to stderr."""
    from ckptools.views import text

    if details:
        from ckptools.views.detail_text import detail_text

        shown = detail_text(report, details, screen())
    else:
        shown = text.report_text(report, screen())
    show(encodable(shown, sys.stdout.encoding))
    told = "\n".join(filter(None, (text.read_line(report), text.next_line(report))))
    typer.echo(encodable(f"\n{told}", sys.stderr.encoding), err=True)


def screen() -> Screen:
    """Cut to the terminal, and not at all in a pipe."""
    if not sys.stdout.isatty():
        return Screen()
    import shutil

    return Screen(shutil.get_terminal_size().columns, ROWS)
