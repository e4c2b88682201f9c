"""Opening a checkpoint, and what can be asked of one by its path alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.api.answers import Difference, RunFolder, run_with_plots, with_plots
from ckptools.api.checkpoint import Checkpoint
from ckptools.api.python_words import in_python
from ckptools.api.tensor import with_lazy_tensors
from ckptools.files.location import check_path, path_of
from ckptools.tensor_io.progress import Progress

if TYPE_CHECKING:
    from ckptools.consolidate.result import Consolidated
    from ckptools.formats.options import Reader, Weights
    from ckptools.formats.shared.given_names import NamesFrom
    from ckptools.formats.shared.shapes import ShapesFrom
    from ckptools.model.checkpoint import Checkpoint as CheckpointData
    from ckptools.model.verification import Verification


@in_python
def open(
    path: str | Path | Sequence[str | Path],
    *,
    all_ranks: bool = False,
    only_this_file: bool = False,
    follow_symlinks: bool = False,
    read_file: Reader | None = None,
    jobs: int | None = None,
    shapes: ShapesFrom | None = None,
    weights: Weights = "fp32",
    rules: str | Path | None = None,
    ranks: str | None = None,
    names: NamesFrom | None = None,
) -> Checkpoint:
    """Open a checkpoint: its structure, none of its tensor values. Runs nothing that the file names.

    Args:
        path: a rank file (its siblings are found), a folder of rank files, any torch.save file; or several rank
            files, by any name, which together are the checkpoint.
        all_ranks: read every rank's structure now; otherwise the others are read when something needs them.
        only_this_file: do not look for siblings.
        follow_symlinks: accept siblings that are links out of the folder.
        read_file: what reads one file; the inert reader unless somebody asks for torch's.
        jobs: processes that read rank files, from 16 files on; None for as many as there are cores, where the files
            take a while.
        shapes: where shapes are told that the checkpoint lacks (FSDP1 flat parameters): another checkpoint, a folder
            of safetensors, a JSON of name to shape, or the `nn.Module` before it was wrapped.
        weights: where the model is held twice, `fp32` (master copy) or `module`.
        rules: a JSON file that says how tensor-parallel weights are joined.
        ranks: what the rank files in the folder `path` are called, such as `model-{rank}-of-{world}.pt`.
        names: what names the parameters of an optimizer that is keyed by number: a checkpoint that keeps the module's
            order, a JSON list in the optimizer's order, such a list itself, or the `nn.Module`.

    Raises:
        ReadError: it cannot be read as what it claims to be.
        UnknownFormatError: no format recognises it.
        UsageError: a folder holds several checkpoints; or names are given that nothing here needs.
        RefusedError: names are given that do not fit.
    """
    from ckptools.formats.opening import open_checkpoint
    from ckptools.training_state import modules

    opened = open_checkpoint(
        path,
        all_ranks=all_ranks,
        only_this_file=only_this_file,
        follow_symlinks=follow_symlinks,
        read_file=read_file or modules.read_file,
        jobs=jobs,
        shapes=shapes,
        weights=weights,
        rules=rules,
        ranks=ranks,
        names=names,
    )
    return with_methods(opened)


def with_methods(data: CheckpointData) -> Checkpoint:
    """The checkpoint that a reader made, with methods; the tensors in its tree are replaced by ones that load."""
    from ckptools.formats.resolver import Resolver

    resolver = Resolver(data.path, data.options, data.files)
    found = {f.name: getattr(data, f.name) for f in fields(data) if f.init}
    found["tree"] = with_lazy_tensors(data.tree, None if data.all_ranks else resolver)
    for name in ("per_rank", "unequal"):
        by_path = getattr(data, name).items()
        found[name] = {key: {r: with_lazy_tensors(v) for r, v in of.items()} for key, of in by_path}
    return Checkpoint(**found, resolver=resolver)


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
    """What differs between two checkpoints, of any formats and world sizes; layouts are told, and are no difference.

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
    from ckptools.checks.difference.compare import Wanted, compare
    from ckptools.contents.selection import Selection

    selection = Selection(tuple(filter), tuple(exclude), section)
    wanted = Wanted(values, rtol, atol, every_byte, selection, jobs)
    return with_plots(compare(_side(a), _side(b), wanted, progress))


def _side(side: Checkpoint | str | Path) -> CheckpointData | Path:
    from ckptools.checks.difference.digest_file import is_digest_file

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
def checkpoints_in(
    folder: str | Path,
    *,
    deep: bool = False,
    follow_symlinks: bool = False,
    jobs: int | None = None,
    shapes: str | Path | None = None,
    weights: Weights = "fp32",
    rules: str | Path | None = None,
    names: NamesFrom | None = None,
    on_found: Callable[[Path], None] | None = None,
) -> RunFolder:
    """The checkpoints of a run, the newest first, with `.newest_whole` to open; as a table: `.to_dicts()`.

    Each is looked into as `open` does. Every rank of the newest is read, and of older ones until one is whole.

    Args:
        folder: the folder of a run, of any format.
        deep: compare also the checksums of those of which every rank is read.
        follow_symlinks: look behind links that lead out of the folder.
        jobs: threads, and processes that read rank files.
        shapes: what tells shapes that the checkpoints lack, as in `open`.
        weights: where the model is held twice, `fp32` (master copy) or `module`.
        rules: a JSON file that says how tensor-parallel weights are joined.
        names: what names the parameters of optimizers that are keyed by number, as in `open`.
        on_found: called with each checkpoint that was looked into.

    Raises:
        UnknownFormatError: no checkpoint is in it.
        ReadError: it cannot be listed.
        UsageError: it is no folder.
    """
    from ckptools.checks.run_folder import listing

    found = listing.checkpoints_in(
        folder,
        deep=deep,
        on_found=on_found,
        follow_symlinks=follow_symlinks,
        jobs=jobs,
        shapes=shapes,
        weights=weights,
        rules=rules,
        names=names,
    )
    return run_with_plots(found)


def _opened(checkpoint: Checkpoint | str | Path) -> Checkpoint:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    check_path(checkpoint)
    return open(checkpoint, all_ranks=True)
