"""Opening a checkpoint: which format it is, what its options tell, and what else lies beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.errors import CkptoolsError, ReadError, SeveralError, UsageError
from ckptools.files.holes import takes_less
from ckptools.files.location import check_path, common_folder, location, path_of, real_path
from ckptools.files.opening import reading
from ckptools.files.remote_path import RemotePath
from ckptools.formats import not_read
from ckptools.formats.options import OnFile, Options, Reader, Weights, is_small
from ckptools.formats.plugins import formats_from_outside
from ckptools.formats.registry import FORMATS, RANK_FILES, Format, recognised
from ckptools.formats.shared.file_reader import FileReader
from ckptools.formats.shared.provenance import with_provenance
from ckptools.formats.structure import with_structure_problems
from ckptools.model.checkpoint import Checkpoint, GivenNames
from ckptools.pickles.loading import gc_paused
from ckptools.training_state import modules
from ckptools.training_state.sections import sections_of_kind

if TYPE_CHECKING:
    from ckptools.formats.shared.given_names import NamesFrom
    from ckptools.formats.shared.shapes import Shapes, ShapesFrom


def open_checkpoint(
    path: str | Path | Sequence[str | Path],
    *,
    all_ranks: bool = False,
    only_this_file: bool = False,
    follow_symlinks: bool = False,
    read_file: Reader = modules.read_file,
    jobs: int | None = None,
    on_file: OnFile | None = None,
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
        on_file: called for each torch.save file that has been read.
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
    if weights not in ("fp32", "module"):
        raise UsageError(None, f"--weights {weights}: choose fp32 or module")
    options = Options(
        all_ranks,
        only_this_file,
        follow_symlinks,
        read_file,
        jobs=jobs,
        on_file=on_file,
        weights=weights,
        shapes=None if shapes is None else read_shapes(shapes, follow_symlinks),
        rules=None if rules is None else path_of(rules),
        names=None if names is None else read_names(names, follow_symlinks),
    )
    if isinstance(path, (str, Path)):
        return _judged(_open(location(path), replace(options, ranks=ranks)), options.names)
    if not isinstance(path, Iterable):
        check_path(path)
    return _judged(_open_files([location(one) for one in path], options, ranks), options.names)


def _judged(opened: Checkpoint, names: GivenNames | None) -> Checkpoint:
    """The checkpoint with the names that were given for it, and what its structure tells to be wrong."""
    return with_structure_problems(_named(opened, names))


def open_again(path: Path, options: Options | None) -> Checkpoint:
    """Open what was opened before with `options` once more, this time with every rank."""
    options = options or Options()
    return _judged(_open(path, replace(options, all_ranks=True)), options.names)


def with_all_ranks(checkpoint: Checkpoint | str | Path) -> Checkpoint:
    """A checkpoint, or what is at a path, with every rank's structure read."""
    if isinstance(checkpoint, (str, Path)):
        return open_checkpoint(checkpoint, all_ranks=True)
    return checkpoint if checkpoint.all_ranks else open_again(checkpoint.path, checkpoint.options)


def read_shapes(told_by: ShapesFrom, follow_symlinks: bool = False) -> Shapes:
    """The shapes that a module, a JSON, or the model of another checkpoint tells.

    Raises:
        ReadError: it cannot be read.
        UsageError: it tells no shapes.
    """
    from ckptools.files.json_file import is_json
    from ckptools.formats.shared import shapes

    if not isinstance(told_by, (str, Path)):
        return shapes.from_python(told_by)
    path = location(told_by)
    if is_json(path):
        return shapes.from_json(path)
    return shapes.from_checkpoint(open_checkpoint(path, follow_symlinks=follow_symlinks), path)


def read_names(names: NamesFrom, follow_symlinks: bool = False) -> GivenNames:
    """The names of parameters that a list, a module, a JSON or another checkpoint tells.

    Raises:
        ReadError: it cannot be read.
        UsageError: it tells no names, or has lost their order.
    """
    from ckptools.files.json_file import is_json
    from ckptools.formats.shared import given_names

    if not isinstance(names, (str, Path)):
        return given_names.from_python(names)
    path = location(names)
    if is_json(path):
        return given_names.from_json(path)
    return given_names.from_checkpoint(open_checkpoint(path, follow_symlinks=follow_symlinks), path)


def _open_files(paths: Sequence[Path], options: Options, ranks: str | None) -> Checkpoint:
    """Open one path, or several rank files as one checkpoint."""
    if len(paths) == 1:
        return _open(paths[0], replace(options, ranks=ranks))
    _check_files(paths, options, ranks)
    if len({path.is_absolute() for path in paths}) > 1:
        paths = [path.absolute() for path in paths]
    above = common_folder([path.absolute().parent for path in paths])
    folder = next((p for p in (paths[0].parent, *paths[0].parent.parents) if p.absolute() == above), above)
    return _open_rank_files(folder, replace(options, files=tuple(paths)))


def _check_files(paths: Sequence[Path], options: Options, ranks: str | None) -> None:
    """Refuse several paths that are not, by what is recognised of the first, rank files of one checkpoint."""
    if not paths:
        raise UsageError(None, "no path was given")
    if ranks is not None or options.only_this_file:
        word = "--ranks" if ranks is not None else "--only-this-file"
        raise UsageError(None, f"{word} goes with one path, and {len(paths)} were given")
    seen: set[Path] = set()
    for path in paths:
        _check_here(path)
        if path.is_dir():
            raise UsageError(path, "is a folder; of several paths each must be a rank file")
        if real_path(path) in seen:
            raise UsageError(path, "was given twice")
        seen.add(real_path(path))
    if len({isinstance(path, RemotePath) for path in paths}) > 1:
        raise UsageError(None, "some of the paths are of this machine and some are URLs; give them all in one place")
    with reading(paths[0]):
        first = recognised(paths[0], FORMATS)
    if first is not None and not first.per_rank:
        text = f"several files are read as rank files, and this is {first.NAME}; open it alone, or the folder it is in"
        raise UsageError(paths[0], text)


def _open_rank_files(path: Path, options: Options) -> Checkpoint:
    with gc_paused():
        return _read(RANK_FILES, path, options)


def _check_here(path: Path) -> None:
    with reading(path):
        if not path.exists():
            raise ReadError(path, "no such file or folder")


def _open(path: Path, options: Options) -> Checkpoint:
    _check_here(path)
    if options.files or options.ranks is not None:
        return _open_rank_files(path, options)
    formats = (*formats_from_outside(), *FORMATS)
    try:
        with reading(path):
            format_ = recognised(path, formats)
        if format_ is not None:
            with gc_paused():
                return _beside_others(_read(format_, path, options), path, options, formats)
    except SeveralError:
        from ckptools.formats.shared.trackers import tracker_in

        tracker = tracker_in(path, options.follow_symlinks)
        if tracker is None or tracker.target is None:
            raise
        return _open(tracker.target, options)
    return _only_one_in(path, formats, options)


def _only_one_in(path: Path, formats: Sequence[Format], options: Options) -> Checkpoint:
    """The one checkpoint in a folder that is none itself, with a note of the links that may lead to others.

    Raises:
        UnknownFormatError: it is no folder, or none is in it.
    """
    found, passed_over = None, ""
    if path.is_dir():
        from ckptools.formats import folder_search

        found, passed_over = folder_search.find(path, formats, options.follow_symlinks)
    if found is None:
        raise not_read.unknown_format(path, passed_over)
    return not_read.with_links(_open(found, options), path, passed_over)


def _read(format_: Format, path: Path, options: Options) -> Checkpoint:
    """Read a checkpoint; of few ranks all of it, which alone tells whether its files fit together."""
    with FileReader(options.read_file, options.jobs, options.on_file) as files:
        reading = replace(options, read_file=files, read_ahead=files.ahead, said=files.said)
        made = format_.read(path, reading)
        broken = any(p.severity == "error" and p.kind.lacks == "file" for p in made.problems)
        if not made.all_ranks and (broken or not made.structure_read) and _is_small(made):
            made = format_.read(path, replace(reading, all_ranks=True))
    made = with_provenance(made, files.said)
    return replace(_with_holes(made) if _may_be_sparse(made) else made, options=options)


def _may_be_sparse(checkpoint: Checkpoint) -> bool:
    """Whether a file of it on this machine takes less room than it has bytes."""
    here = [f.path for f in checkpoint.files if f.is_here and not isinstance(f.path, RemotePath)]
    try:
        return any(map(takes_less, here))
    except (OSError, AttributeError):  # gone by now, or a system that knows no holes
        return False


def _with_holes(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with what of its tensors lies in holes."""
    from ckptools.formats.shared.hollow import with_hollow

    return with_hollow(checkpoint)


def _beside_others(checkpoint: Checkpoint, path: Path, options: Options, formats: Sequence[Format]) -> Checkpoint:
    """A checkpoint that was opened by its folder, with a note that names what else the folder holds.

    Weights alone give way to the one file beside them that holds an optimizer too: they may be an export of it.
    """
    others, links = not_read.others_beside(checkpoint, path, formats, options)
    training = None if sections_of_kind(checkpoint, "optimizer") else _training_file(path, others, options)
    if training is not None:
        checkpoint, (others, links) = training, not_read.others_beside(training, path, formats, options)
    return not_read.with_others(not_read.with_links(checkpoint, path, links), path, others)


def _training_file(folder: Path, found: Sequence[Path], options: Options) -> Checkpoint | None:
    """The one file in a folder that holds weights and an optimizer; None where there is none, or several files."""
    files = [path for path in found if path.parent == folder and path.is_file()]
    if len(files) != 1:
        return None
    with suppress(CkptoolsError):  # a damaged one is named beside the weights
        opened = _open(files[0], options)
        return opened if sections_of_kind(opened, "optimizer") and sections_of_kind(opened, "model") else None
    return None


def _is_small(opened: Checkpoint) -> bool:
    """Whether so few ranks, with so little structure, are here that every one is read without being asked to."""
    ranks = len({f.rank for f in opened.files if f.is_here})
    nbytes = opened.cost.nbytes * len(opened.files) // max(opened.cost.files, 1)
    return is_small(ranks, nbytes)


def _named(checkpoint: Checkpoint, given: GivenNames | None) -> Checkpoint:
    """The checkpoint with names for its one optimizer that is keyed by number, once they are seen to fit."""
    if given is None or checkpoint.names_given is given:
        return checkpoint
    from ckptools.training_state.optimizers import optimizers_of

    numbered = [o.name for o in optimizers_of(checkpoint).values() if o.naming.by != "fqn"]
    if len(numbered) != 1:
        here = ", ".join(numbered) or "no optimizer here"
        raise UsageError(checkpoint.path, f"--names tells the names of one optimizer, and {here} is keyed by number")
    named = replace(checkpoint, names_given=given)
    return named if optimizers_of(named) else checkpoint
