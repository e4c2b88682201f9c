"""Opening a checkpoint, or listing those of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.api.checkpoint import Checkpoint
from ckptools.api.plots import RunFolder, with_plots
from ckptools.api.python_words import in_python
from ckptools.api.tensor import with_lazy_tensors

if TYPE_CHECKING:
    from ckptools.formats.options import Reader, Weights
    from ckptools.formats.shared.given import NamesFrom, ShapesFrom
    from ckptools.model.checkpoint import Checkpoint as CheckpointData


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
    salvage: bool = False,
) -> Checkpoint:
    """Open a checkpoint: its structure, none of its tensor values. Runs nothing that the file names.

    Args:
        path: a rank file (its siblings are found), a folder of rank files, any torch.save file; or several rank
            files, by any name, which together are the checkpoint.
        all_ranks: read every rank's structure now; otherwise the others are read when something needs them.
        only_this_file: do not look for siblings.
        follow_symlinks: accept siblings that are links out of the folder.
        read_file: what reads one file; the inert reader unless torch's is asked for.
        jobs: processes that read rank files, from 16 files on; None for as many as there are cores, where the files
            take a while.
        shapes: the source of shapes that the checkpoint lacks (FSDP1 flat parameters): another checkpoint, a folder
            of safetensors, a JSON of name to shape, or the `nn.Module` before it was wrapped.
        weights: where the model is stored twice, `fp32` (master copy) or `module`.
        rules: a JSON file that says how tensor-parallel weights are joined.
        ranks: what the rank files in the folder `path` are called, such as `model-{rank}-of-{world}.pt`.
        names: what names the parameters of an optimizer that is keyed by number: a checkpoint that keeps the module's
            order, a JSON list in the optimizer's order, such a list itself, or the `nn.Module`.
        salvage: read a `.pt` that is cut short up to the cut; what is behind it is a gap, and it is not whole.

    Raises:
        ReadError: it cannot be read as what it claims to be.
        UnknownFormatError: no format recognises it.
        UsageError: a folder holds several checkpoints; or names are given that nothing here needs.
        RefusedError: names are given that do not fit.
    """
    given = locals()  # the arguments, and nothing else yet
    from ckptools.formats.open import open_checkpoint
    from ckptools.training_state import modules

    given["read_file"] = read_file or modules.read_file
    return with_methods(open_checkpoint(**given))


def with_methods(data: CheckpointData) -> Checkpoint:
    """The checkpoint that a reader made, with methods; the tensors in its tree are replaced by ones that load."""
    from ckptools.formats.resolver import Resolver

    resolver = Resolver(data.path, data.options, data.files)
    found = {f.name: getattr(data, f.name) for f in fields(data) if f.init}
    found["tree"] = with_lazy_tensors(data.tree, None if data.all_ranks else resolver, data.files)
    for name in ("per_rank", "unequal"):
        by_path = getattr(data, name).items()
        found[name] = {key: {r: with_lazy_tensors(v, None, data.files) for r, v in of.items()} for key, of in by_path}
    return Checkpoint(**found, resolver=resolver)


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
    salvage: bool = False,
    on_found: Callable[[Path], None] | None = None,
) -> RunFolder:
    """The checkpoints of a run, the newest first, with `.newest_whole` to open; as a table: `.to_dicts()`.

    Each is looked into as `open` does, whose arguments these are. Every rank of the newest is read, and of older ones
    until one is whole; `deep` compares their checksums too. `on_found` is called with each that was looked into.

    Raises:
        UnknownFormatError: no checkpoint is in it.
        ReadError: it cannot be listed.
        UsageError: it is no folder.
    """
    given = locals()  # the arguments, and nothing else yet
    from ckptools.ls import listing

    return with_plots(listing.checkpoints_in(**given), RunFolder)
