"""The functions of `ckptools` that take a checkpoint or its path, such as `verify` and `diff`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.api.checkpoint import Checkpoint
from ckptools.api.opening import open
from ckptools.api.plots import Difference, with_plots
from ckptools.api.python_words import in_python
from ckptools.files.location import check_path, path_of
from ckptools.tensor_io.threads import Progress

if TYPE_CHECKING:
    from ckptools.consolidate.record import Consolidated
    from ckptools.doctor.record import Diagnosis
    from ckptools.formats.options import Weights
    from ckptools.formats.shared.given import NamesFrom
    from ckptools.model.checkpoint import Checkpoint as CheckpointData
    from ckptools.verify.record import Verification


@in_python
def verify(
    checkpoint: Checkpoint | str | Path,
    *,
    deep: bool = False,
    values: bool = False,
    manifest: str | Path | None = None,
    ignore: Iterable[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Check whether a checkpoint, or what is at a path, is whole, unharmed and coherent; see `Checkpoint.verify`."""
    return _opened(checkpoint).verify(
        deep=deep, values=values, manifest=manifest, ignore=ignore, jobs=jobs, progress=progress
    )


@in_python
def report(
    checkpoint: Checkpoint | str | Path,
    out: str | Path,
    *,
    deep: bool = False,
    values: bool = False,
    manifest: str | Path | None = None,
    ignore: Iterable[str] = (),
    force: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a page of HTML about a checkpoint, or about what is at a path; see `Checkpoint.report`."""
    return _opened(checkpoint).report(
        out,
        deep=deep,
        values=values,
        manifest=manifest,
        ignore=ignore,
        force=force,
        jobs=jobs,
        progress=progress,
    )


@in_python
def diff(
    a: Checkpoint | str | Path,
    b: Checkpoint | str | Path,
    *,
    values: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    every_byte: bool = False,
    filter: Iterable[str] = (),
    exclude: Iterable[str] = (),
    section: str = "",
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Compare two checkpoints, of any formats and world sizes; layouts are shown, and are no difference.

    Without further arguments keys, shapes, dtypes and plain values are compared: step, lr, param groups, scheduler,
    random states, position in the data.

    Args:
        a: a checkpoint, its path, or that of a file that `Checkpoint.write_digests` wrote.
        b: another one.
        values: compare the values of tensors too, bit for bit: NaN equals NaN of the same bits alone. Tensors of two
            dtypes are compared by value, in float64.
        rtol: relative tolerance: what is no further apart than `atol + rtol * |b|` is within it, whatever the dtypes.
        atol: absolute tolerance.
        every_byte: read also shards of which both sides state the same CRC-32.
        filter: only keys that match one of these globs.
        exclude: no keys that match one of these.
        section: only one section: its kind, or its name on either side.
        jobs: threads.
        progress: called with bytes read and the tensor they are of.

    Raises:
        ReadError: one of them cannot be opened.
        UsageError: neither has such a section or key, or a tolerance is negative.
    """
    from ckptools.diff.compare import Wanted, compare
    from ckptools.keys.entries import Selection

    selection = Selection(tuple(filter), tuple(exclude), section)
    wanted = Wanted(values, rtol, atol, every_byte, selection, jobs)
    return with_plots(compare(_side(a), _side(b), wanted, progress))


def _side(side: Checkpoint | str | Path) -> CheckpointData | Path:
    from ckptools.diff.digest_file import is_digest_file

    if isinstance(side, (str, Path)) and side != "" and is_digest_file(path_of(side)):
        return path_of(side)
    return _opened(side)._with_all_ranks()


@in_python
def consolidate(
    checkpoint: Checkpoint | str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    only: str | None = None,
    map: Mapping[str, str] | str | Path | None = None,
    strip_prefix: str | None = None,
    rename: Sequence[str] = (),
    dtype: str | None = None,
    max_shard_size: int | None = None,
    tied: str = "keep",
    keep_types: bool = False,
    force: bool = False,
    allow_missing: bool = False,
    fill: str | None = None,
    dequantize: bool = False,
    prefer_rank: int | None = None,
    check: bool = False,
    unchecked: bool = False,
    manifest: bool = False,
    provenance: bool = True,
    dry_run: bool = False,
    resume: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Consolidated:
    """Write the full tensors of a checkpoint, or of what is at a path; see `Checkpoint.consolidate`."""
    return _opened(checkpoint).consolidate(
        out,
        format=format,
        only=only,
        map=map,
        strip_prefix=strip_prefix,
        rename=rename,
        dtype=dtype,
        max_shard_size=max_shard_size,
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
        provenance=provenance,
        dry_run=dry_run,
        resume=resume,
        jobs=jobs,
        progress=progress,
    )


@in_python
def doctor(
    path: str | Path | Sequence[str | Path],
    to: Any = None,
    *,
    only_this_file: bool = False,
    follow_symlinks: bool = False,
    jobs: int | None = None,
    shapes: str | Path | None = None,
    weights: Weights = "fp32",
    rules: str | Path | None = None,
    ranks: str | None = None,
    names: NamesFrom | None = None,
) -> Diagnosis:
    """Answer the first questions about a checkpoint, with what says so, and with what to type next.

    It asks `verify`, `checkpoints_in` and, with `to`, `match`. What cannot be opened has an answer too.

    Args:
        path: as for `open`; of a folder of several the newest whole one is looked at.
        to: what it should load into, as `Checkpoint.match` takes it; None leaves that out.
        only_this_file: do not look for siblings.
        follow_symlinks: accept links out of the folder.
        jobs: threads, and processes that read rank files.
        shapes: the source of shapes that the checkpoint lacks, as in `open`.
        weights: where the model is stored twice, `fp32` (master copy) or `module`.
        rules: a JSON file that says how tensor-parallel weights are joined.
        ranks: what the rank files in the folder `path` are called.
        names: what names the parameters of an optimizer that is keyed by number, as in `open`.

    Raises:
        UsageError: options that do not fit together.
        ReadError: `to` cannot be read.
    """
    from ckptools.api import examination

    return examination.doctor(
        path,
        to,
        only_this_file=only_this_file,
        follow_symlinks=follow_symlinks,
        jobs=jobs,
        shapes=shapes,
        weights=weights,
        rules=rules,
        ranks=ranks,
        names=names,
    )


def _opened(checkpoint: Checkpoint | str | Path) -> Checkpoint:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    check_path(checkpoint)
    return open(checkpoint, all_ranks=True)
