"""`ckptools verify`: is this checkpoint whole, unharmed and coherent?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ckptools.cli.inspect import (
    AsJson,
    CheckpointPaths,
    FollowSymlinks,
    NamesFrom,
    OnlyThisFile,
    RanksPattern,
    RulesFile,
    ShapesFrom,
    Weights,
    WhichWeights,
)
from ckptools.cli.printing import show


def verify(
    paths: CheckpointPaths,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every tensor; compare the CRC-32 that files carry.")
    ] = False,
    values: Annotated[bool, typer.Option("--values", help="Read every tensor; look for NaN and infinities.")] = False,
    manifest: Annotated[
        Path | None,
        typer.Option(readable=False, help="A JSON that consolidate --manifest wrote: compare every digest in it."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="A problem code that does not count, such as CK206; may be repeated.")
    ] = None,
    json: AsJson = False,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Threads.")] = None,
    ranks: RanksPattern = None,
    only_this_file: OnlyThisFile = False,
    follow_symlinks: FollowSymlinks = False,
    weights: WhichWeights = Weights.fp32,
    rules: RulesFile = None,
    shapes: ShapesFrom = None,
    names: NamesFrom = None,
) -> None:
    """Check that a checkpoint is whole, unharmed and coherent.

    Every rank is read. Without options only structure, replicas and counters are read. safetensors carry no
    checksums, and that is said.

    Exit code: 0 no check failed (warnings may be shown), 1 a check failed, 3 unreadable.
    """
    from ckptools.checks.verifying import verify as check
    from ckptools.cli.inspect import screen
    from ckptools.cli.opening import answered_in_json, opened
    from ckptools.cli.progress import ProgressLine
    from ckptools.text import encodable
    from ckptools.views.verified import verification_json, verification_text

    with answered_in_json(json, "ckptools/verify/1", "ok", paths):
        checkpoint = opened(paths, ranks, only_this_file, follow_symlinks, weights, rules, shapes, names)
    with ProgressLine(sum(f.nbytes for f in checkpoint.files)) as line:
        found = check(
            checkpoint, deep=deep, values=values, manifest=manifest, ignore=ignore or (), jobs=jobs, progress=line
        )
    shown = verification_json(found) if json else verification_text(found, screen())
    show(encodable(shown, sys.stdout.encoding))
    if not found.ok:
        raise typer.Exit(1)
