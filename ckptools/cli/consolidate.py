"""`ckptools consolidate`: many shards into one file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckptools.cli.inspect import CheckpointPaths, NamesFrom, RanksPattern, RulesFile, ShapesFrom, Weights, WhichWeights
from ckptools.cli.printing import show

if TYPE_CHECKING:
    from ckptools.consolidate import Consolidated


def consolidate(
    paths: CheckpointPaths,
    out: Annotated[
        str,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="What to write: .pt, .safetensors or .dcp (a folder) says how; DIR/ gets model.safetensors in it.",
        ),
    ],
    format: Annotated[
        str | None,
        typer.Option(help="pt, safetensors or dcp, for a name without suffix (a file gets that suffix) or DIR/."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="model (the bare state dict), optimizer, or all (the same tree). safetensors: model; else: all."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="dtype for the model's floating-point tensors, such as bf16; others keep theirs.")
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(help="Tensors per file of safetensors (several get an index) or of a DCP, such as 5GB."),
    ] = None,
    tied: Annotated[
        str, typer.Option(help="safetensors: keep writes a tied weight under each name, drop only under the first.")
    ] = "keep",
    keep_types: Annotated[
        bool,
        typer.Option(
            "--keep-types", help="Keep timedeltas, numpy arrays and the like, which plain torch.load refuses."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an output that exists.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Leave out and list what is not whole, instead of refusing.")
    ] = False,
    fill: Annotated[
        str | None, typer.Option(help="With --allow-missing: nan or zero in the place of holes, which are listed.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Let torch or safetensors read the output back, and compare it with the shards, byte for byte; "
            "with --dry-run: compare the source with its checksums.",
        ),
    ] = False,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Do not compare the source with the checksums that it states.")
    ] = False,
    manifest: Annotated[
        bool, typer.Option("--manifest", help="Write sha256 of every tensor and file into OUT.manifest.json.")
    ] = False,
    prefer_rank: Annotated[
        int | None, typer.Option(help="Where ranks hold different copies of one tensor, take this rank's.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and plan; write nothing.")] = False,
    copies: Annotated[bool, typer.Option("--copies", help="With --dry-run: print every copy of bytes.")] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Threads.")] = None,
    weights: WhichWeights = Weights.fp32,
    rules: RulesFile = None,
    shapes: ShapesFrom = None,
    ranks: RanksPattern = None,
    names: NamesFrom = None,
    only_this_file: Annotated[bool, typer.Option("--only-this-file", help="Do not look for other ranks.")] = False,
    follow_symlinks: Annotated[
        bool, typer.Option("--follow-symlinks", help="Accept rank files that are links out of the folder.")
    ] = False,
) -> None:
    """Write full tensors into a .pt, .safetensors or DCP.

    A DCP folder is one to resume from, at any world size.
    """
    from ckptools.cli.opening import opened
    from ckptools.cli.progress import ProgressLine
    from ckptools.consolidate import consolidate as write

    checkpoint = opened(paths, ranks, only_this_file, follow_symlinks, weights, rules, shapes, names)
    with ProgressLine() as line:
        done = write(
            checkpoint,
            out,
            format=format,
            only=only,
            dtype=dtype,
            max_shard_size=_bytes(max_shard_size),
            tied=tied,
            keep_types=keep_types,
            force=force,
            allow_missing=allow_missing,
            fill=fill,
            check=check,
            unchecked=unchecked,
            manifest=manifest,
            prefer_rank=prefer_rank,
            dry_run=dry_run,
            jobs=jobs,
            progress=line,
            planned=line.expect,
        )
    _tell(done, dry_run, copies)


_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


def _bytes(text: str | None) -> int | None:
    """`5GB` (decimal, as Hugging Face means it), `500MiB`, or a plain number of bytes."""
    import re

    from ckptools.errors import UsageError

    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) <= 0:
        raise UsageError(None, f"--max-shard-size {text}: expected a size such as 5GB or 500MiB")
    unit = _UNITS[found[2].upper()]
    if found[3]:
        unit = 1024 ** ("KMGT".index(found[2].upper()) + 1) if found[2] else 1
    return int(float(found[1]) * unit)


def _tell(done: Consolidated, dry_run: bool, copies: bool) -> None:
    from ckptools.cli import say
    from ckptools.views import written

    for row in written.summary(done, dry_run):
        show(row)
    if dry_run and copies:
        for row in written.copies(done):
            show(row)
    for row in written.remarks(done, dry_run):
        say(row)
