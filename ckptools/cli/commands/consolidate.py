"""`ckptools consolidate`: many shards into one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptools.cli.arguments import CheckpointPaths, Force
from ckptools.cli.printing import say, show
from ckptools.cli.shared_options import AS_A_USER_WOULD, OpeningOptions, opened
from ckptools.text import parse_bytes

if TYPE_CHECKING:
    from ckptools.consolidate.record import Consolidated

Out = Annotated[
    str,
    typer.Option(
        "--out",
        "-o",
        metavar="PATH",
        help="What to write: .pt, .safetensors or .dcp (a folder) says how; DIR/ gets model.safetensors in it. "
        "Also a URL: s3://, gs://, az://.",
    ),
]
OutputFormat = Annotated[
    str | None,
    typer.Option(help="pt, safetensors or dcp, for a name without suffix (a file gets that suffix) or DIR/."),
]
Only = Annotated[
    str | None,
    typer.Option(
        help="model (the bare state dict), optimizer, or all (the same tree); or a glob of names of the model, such as"
        " 'blocks.*'. safetensors: model; else: all."
    ),
]
MapFile = Annotated[
    Path | None,
    typer.Option("--map", readable=False, help="A JSON of old name to new, such as match --write-map writes."),
]
StripPrefix = Annotated[
    str | None, typer.Option(metavar="PREFIX", help="Take this beginning of names away, such as module.")
]
Renames = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="OLD=NEW",
        help="Rename a tensor, or a module with all below it; with a dot behind both, a beginning of names.",
    ),
]
Dtype = Annotated[
    str | None, typer.Option(help="dtype for the model's floating-point tensors, such as bf16; others keep theirs.")
]
MaxShardSize = Annotated[
    str | None, typer.Option(help="Tensors per file of safetensors (several get an index) or of a DCP, such as 5GB.")
]
Tied = Annotated[
    str, typer.Option(help="safetensors: keep writes a tied weight under each name, drop only under the first.")
]
KeepTypes = Annotated[
    bool,
    typer.Option("--keep-types", help="Keep timedeltas, numpy arrays and the like, which plain torch.load refuses."),
]
AllowMissing = Annotated[
    bool, typer.Option("--allow-missing", help="Leave out and list what is not whole, instead of refusing.")
]
Fill = Annotated[
    str | None, typer.Option(help="With --allow-missing: nan or zero in the place of holes, which are listed.")
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Let torch or safetensors read the output back, and compare it with the shards, byte for byte; "
        "with --dry-run: compare the source with its checksums.",
    ),
]
Unchecked = Annotated[
    bool, typer.Option("--unchecked", help="Do not compare the source with the checksums that it states.")
]
Manifest = Annotated[
    bool, typer.Option("--manifest", help="Write sha256 of every tensor and file into OUT.manifest.json.")
]
NoProvenance = Annotated[
    bool,
    typer.Option(
        "--no-provenance",
        help="Do not let the output say which checkpoint it was made of, and what was filled in or left out.",
    ),
]
Dequantize = Annotated[
    bool,
    typer.Option(
        "--dequantize",
        help="Write the values of quantized tensors, as their class (torchao's) computes them; else they are refused.",
    ),
]
PreferRank = Annotated[
    int | None, typer.Option(help="Where ranks hold different copies of one tensor, take this rank's.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and plan; write nothing.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Cut short, keep what was written; take up what the same command has kept.")
]
Copies = Annotated[bool, typer.Option("--copies", help="With --dry-run: print every copy of bytes.")]


def consolidate(
    paths: CheckpointPaths,
    out: Out,
    format: OutputFormat = None,
    only: Only = None,
    map: MapFile = None,
    strip_prefix: StripPrefix = None,
    rename: Renames = None,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = None,
    tied: Tied = "keep",
    keep_types: KeepTypes = False,
    force: Force = False,
    allow_missing: AllowMissing = False,
    fill: Fill = None,
    check: Check = False,
    unchecked: Unchecked = False,
    manifest: Manifest = False,
    no_provenance: NoProvenance = False,
    dequantize: Dequantize = False,
    prefer_rank: PreferRank = None,
    dry_run: DryRun = False,
    copies: Copies = False,
    resume: Resume = False,
    opening: OpeningOptions = AS_A_USER_WOULD,
) -> None:
    """Write full tensors into a .pt, .safetensors or DCP.

    A DCP folder is one to resume from, at any world size.
    """
    from ckptools.cli.progress import ProgressLine
    from ckptools.consolidate.options import ConsolidateOptions
    from ckptools.consolidate.run import consolidate as run

    checkpoint = opened(paths, opening)
    options = ConsolidateOptions(
        format=format,
        only=only,
        map=map,
        strip_prefix=strip_prefix,
        rename=rename or (),
        dtype=dtype,
        max_shard_size=_bytes(max_shard_size),
        tied=tied,
        keep_types=keep_types,
        force=force,
        allow_missing=allow_missing,
        fill=fill,
        dequantize=dequantize,
        prefer_rank=prefer_rank,
        check=check,
        unchecked=unchecked,
        manifest=manifest,
        provenance=not no_provenance,
        dry_run=dry_run,
        resume=resume,
        jobs=opening.jobs,
    )
    with ProgressLine() as line:
        done = run(checkpoint, out, options, line, line.expect)
    _tell(done, copies)
    if done.planned and done.planned.no_room:
        raise done.planned.no_room


def _bytes(text: str | None) -> int | None:
    from ckptools.errors import UsageError

    nbytes = None if text is None else parse_bytes(text)
    if text is not None and nbytes is None:
        raise UsageError(None, f"--max-shard-size {text}: expected a size such as 5GB or 500MiB")
    return nbytes


def _tell(done: Consolidated, copies: bool) -> None:
    from ckptools.consolidate import text as consolidate_text

    for row in consolidate_text.summary(done):
        show(row)
    for row in consolidate_text.copies(done.planned) if copies and done.planned else ():
        show(row)
    for row in consolidate_text.remarks(done):
        say(row)
