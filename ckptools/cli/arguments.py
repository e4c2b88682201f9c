"""The arguments and options that several commands have, and those of `inspect` and `verify`, each with its help.

What those two are called with most often, paths and nothing else, is not parsed; so their modules do not import this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptools.cli.choices import Engine, Weights

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
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", help="Threads, and processes that open many rank files.")]
Processes = Annotated[int | None, typer.Option("--jobs", "-j", help="Processes that open many rank files.")]
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
Deep = Annotated[bool, typer.Option("--deep", help="Read every tensor; compare the CRC-32 that files carry.")]
Values = Annotated[bool, typer.Option("--values", help="Read every tensor; look for NaN and infinities.")]
ManifestFile = Annotated[
    Path | None,
    typer.Option(readable=False, help="A JSON that consolidate --manifest wrote: compare every digest in it."),
]
Ignored = Annotated[
    list[str] | None, typer.Option(help="A problem code that does not count, such as CK206; may be repeated.")
]
