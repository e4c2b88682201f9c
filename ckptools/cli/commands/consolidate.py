"""`ckptools consolidate`: many shards into one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptools.cli.answers import opened
from ckptools.cli.arguments import CheckpointPaths
from ckptools.cli.printing import say, show
from ckptools.cli.shared_options import OpeningOptions
from ckptools.errors import UsageError
from ckptools.option import option
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


@dataclass(frozen=True)
class WritingOptions:
    """What is written, how, and what is checked: `ConsolidateOptions` as they are typed."""

    format: str | None = option(
        None, "pt, safetensors or dcp, for a name without suffix (a file gets that suffix) or DIR/."
    )
    only: str | None = option(
        None,
        "model (the bare state dict), optimizer, or all (the same tree); or a glob of names of the model, such as"
        " 'blocks.*'. safetensors: model; else: all.",
    )
    map: Path | None = option(None, "A JSON of old name to new, such as match --write-map writes.")
    strip_prefix: str | None = option(None, "Take this beginning of names away, such as module.", metavar="PREFIX")
    rename: list[str] | None = option(
        None,
        "Rename a tensor, or a module with all below it; with a dot behind both, a beginning of names.",
        metavar="OLD=NEW",
    )
    dtype: str | None = option(None, "dtype for the model's floating-point tensors, such as bf16; others keep theirs.")
    max_shard_size: str | None = option(
        None, "Tensors per file of safetensors (several get an index) or of a DCP, such as 5GB."
    )
    tied: str = option("keep", "safetensors: keep writes a tied weight under each name, drop only under the first.")
    keep_types: bool = option(False, "Keep timedeltas, numpy arrays and the like, which plain torch.load refuses.")
    force: bool = option(False, "Overwrite an output that exists.")
    allow_missing: bool = option(False, "Leave out and list what is not whole, instead of refusing.")
    fill: str | None = option(None, "With --allow-missing: nan or zero in the place of holes, which are listed.")
    check: bool = option(
        False,
        "Let torch or safetensors read the output back, and compare it with the shards, byte for byte; "
        "with --dry-run: compare the source with its checksums.",
    )
    unchecked: bool = option(False, "Do not compare the source with the checksums that it states.")
    manifest: bool = option(False, "Write sha256 of every tensor and file into OUT.manifest.json.")
    no_provenance: bool = option(
        False, "Do not let the output say which checkpoint it was made of, and what was filled in or left out."
    )
    dequantize: bool = option(
        False, "Write the values of quantized tensors, as their class (torchao's) computes them; else they are refused."
    )
    prefer_rank: int | None = option(None, "Where ranks hold different copies of one tensor, take this rank's.")
    dry_run: bool = option(False, "Check and plan; write nothing.")
    copies: bool = option(False, "With --dry-run: print every copy of bytes.")
    resume: bool = option(False, "Cut short, keep what was written; take up what the same command has kept.")


def consolidate(paths: CheckpointPaths, out: Out, how: WritingOptions, opening: OpeningOptions) -> None:
    """Write full tensors into a .pt, .safetensors or DCP.

    A DCP folder is one to resume from, at any world size.
    """
    from ckptools.cli.progress import ProgressLine
    from ckptools.consolidate.options import ConsolidateOptions
    from ckptools.consolidate.run import consolidate as run

    checkpoint = opened(paths, opening)
    given = {name: value for name, value in vars(how).items() if name not in ("copies", "no_provenance")}
    given["rename"], given["max_shard_size"] = how.rename or (), _bytes(how.max_shard_size)
    options = ConsolidateOptions(**given, provenance=not how.no_provenance, jobs=opening.jobs)
    with ProgressLine() as line:
        done = run(checkpoint, out, options, line, line.expect)
    _tell(done, how.copies)
    if done.planned and done.planned.no_room:
        raise done.planned.no_room


def _bytes(text: str | None) -> int | None:
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
