"""What users of the package call; `ckptools` has these names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.checks import verify
from ckptools.errors import CkptoolsError
from ckptools.formats import open_checkpoint as open
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Problem
from ckptools.model.tensor import Shard, Tensor
from ckptools.model.values import Opaque
from ckptools.torch_engine.offline import load_shard, offline

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptools.consolidate.execute import Progress
    from ckptools.consolidate.result import Consolidated

__all__ = [
    "Checkpoint",
    "CkptoolsError",
    "Opaque",
    "Problem",
    "Shard",
    "Tensor",
    "consolidate",
    "load_shard",
    "offline",
    "open",
    "verify",
]


def consolidate(
    checkpoint: Checkpoint | str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    only: str | None = None,
    dtype: str | None = None,
    max_shard_size: int | None = None,
    tied: str = "keep",
    keep_types: bool = False,
    force: bool = False,
    allow_missing: bool = False,
    fill: str | None = None,
    prefer_rank: int | None = None,
    check: bool = False,
    unchecked: bool = False,
    manifest: bool = False,
    dry_run: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    planned: Callable[[int], None] = lambda _: None,
) -> Consolidated:
    """Write a checkpoint's full tensors into one `.pt`, one or several `.safetensors`, or a DCP folder to resume from.

    Args:
        checkpoint: an opened checkpoint, or its path.
        out: the file or folder to write; its suffix (`.dcp` for a folder) says the format. With a `/` at its end, or
            where it is a folder, `model.safetensors` or `model.pt` in it.
        format: `pt`, `safetensors` or `dcp`, where no suffix says it; a file gets that suffix.
        only: `model` (the bare state dict), `optimizer`, or `all` (the same tree). Default: `model` for
            `.safetensors`, else `all`.
        dtype: torch dtype for the floating-point tensors of the model, such as `bfloat16`.
        max_shard_size: bytes of tensors per file of safetensors (which get a Hugging Face index) or of a DCP.
        tied: for safetensors: `keep` writes a tied weight under each name, `drop` only under the first.
        keep_types: keep what plain `torch.load` does not make (timedeltas, numpy's values …) in a `.pt`, instead of
            the nearest that it does.
        force: overwrite an existing output.
        allow_missing: leave out tensors that are not whole, and list them, instead of refusing.
        fill: with `allow_missing`: `nan` or `zero` to put into holes, which are listed; without it a tensor with a hole
            is left out.
        prefer_rank: where ranks hold different copies of a tensor that should be equal, take this rank's.
        check: let the format's own library read the output back before it gets its name, and compare it with the
            shards; for a dry run, compare the source with its checksums.
        unchecked: do not compare the source with the checksums that it states.
        manifest: write sha256 of every tensor and file into a JSON beside the output.
        dry_run: plan and check, write nothing.
        jobs: threads.
        progress: called with bytes written, or read back, and the tensor they belong to.
        planned: called before that with how many bytes they will be, and again when more is known.

    Raises:
        NotWholeError: something is missing, overlaps, contradicts, or was found damaged before anything was written.
        DamagedError: a record is not what its checksum says.
        OutputExistsError, NoSpaceError: the output is in the way or does not fit.
        ReadError, WriteError: a file cannot be read or written; nothing that looks finished is left.
    """
    from ckptools.consolidate.options import ConsolidateOptions
    from ckptools.consolidate.run import consolidate as run

    options = ConsolidateOptions(
        format=format,
        only=only,
        dtype=dtype,
        max_shard_size=max_shard_size,
        tied=tied,
        keep_types=keep_types,
        force=force,
        allow_missing=allow_missing,
        fill=fill,
        prefer_rank=prefer_rank,
        check=check,
        unchecked=unchecked,
        manifest=manifest,
        dry_run=dry_run,
        jobs=jobs,
    )
    return run(checkpoint, out, options, progress, planned)
