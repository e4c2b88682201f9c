"""Arguments and options that several commands have, each with its help; those of opening are in `opening.py`.

What commands are called with most often, paths and flags, is not parsed; so their modules do not import this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptools.cli import completion
from ckptools.cli.choices import Engine

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
CheckpointPath = Annotated[
    str,
    typer.Argument(metavar="PATH", show_default=False, help="A rank file, a folder, or any checkpoint file."),
]
ShownKeys = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY...",
        show_default=False,
        autocompletion=completion.keys,
        help="A name as `tree` has it, its beginning, or a glob.",
    ),
]
FirstSide = Annotated[
    str, typer.Argument(metavar="A", show_default=False, help="A checkpoint, or a file of digests that --hash wrote.")
]
SecondSide = Annotated[
    str | None,
    typer.Argument(metavar="[B]", show_default=False, help="Another one; left out with --hash."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for other programs.")]
SectionName = Annotated[
    str | None,
    typer.Option(
        autocompletion=completion.sections,
        help="Show one section in full: model, optimizer, scheduler, rng, other, or a section's own name.",
    ),
]
AllRanks = Annotated[bool, typer.Option("--all-ranks", help="Read the structure of every rank, and compare them.")]
RunFolderPath = Annotated[
    str, typer.Argument(metavar="DIR", show_default=False, help="The folder of a run, in which its checkpoints are.")
]
Watched = Annotated[
    bool, typer.Option("--watch", help="Look again and again, and print a line for each change; Ctrl-C ends it.")
]
Every = Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.05, help="With --watch: between two looks.")]
DeepOfNewest = Annotated[
    bool, typer.Option("--deep", help="Compare the CRC-32s of the newest too, and of older ones until one is whole.")
]
AnyPaths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        show_default=False,
        help="A checkpoint, as for inspect; or the folder of a run, or a file that cannot be opened.",
    ),
]
LoadsInto = Annotated[
    str | None, typer.Option("--to", metavar="MODEL", help="What it should load into, as match takes it.")
]
EngineName = Annotated[
    Engine, typer.Option(help="inert: names are only names, nothing is run. torch: through torch.load, as a check.")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="With --engine torch: let the file name any class. Runs its code.")
]
Deep = Annotated[bool, typer.Option("--deep", help="Read every tensor; compare the CRC-32 that files carry.")]
Histogram = Annotated[bool, typer.Option("--hist", help="Draw how values are spread; reads them twice.")]
PerRank = Annotated[bool, typer.Option("--per-rank", help="A row for what each rank holds: which one is odd?")]
OfMoments = Annotated[
    bool, typer.Option("--moments", help="Adam's moments beside the parameters, and how far a step moves them.")
]
Dead = Annotated[
    bool, typer.Option("--dead-rows", help="Rows of matrices that are all zero, or that never got a gradient.")
]
Values = Annotated[bool, typer.Option("--values", help="Read every tensor; look for NaN and infinities.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an output that exists.")]
ReportFile = Annotated[
    str, typer.Option("--out", "-o", metavar="FILE", help="The page to write, x.html; - for standard output.")
]
WithFigures = Annotated[
    bool, typer.Option("--values", help="Read every tensor; look for NaN, and put figures of each on the page.")
]
ManifestFile = Annotated[
    Path | None,
    typer.Option(readable=False, help="A JSON that consolidate --manifest wrote: compare every digest in it."),
]
Ignored = Annotated[list[str] | None, typer.Option(help="Problem codes that do not count, such as CK206,CK105.")]
