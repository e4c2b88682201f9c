"""Open a checkpoint: locate its files, detect its format, read it, name its parameters, judge it; in this order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckptools.errors import CkptoolsError, ReadError, SeveralError, UnknownFormatError, UsageError
from ckptools.files.opening import check_path, common_folder, head_at, location, path_of, reading, real_path, what_is
from ckptools.files.remote.path import RemotePath
from ckptools.files.storage import takes_less
from ckptools.formats.file_reader import FileReader
from ckptools.formats.options import TAKEN_BY, OnFile, Options, Reader, Weights, is_small
from ckptools.formats.registry import FORMATS, RANK_FILES, Format, formats_from_outside, recognised
from ckptools.formats.shared.checkpoint_builder import SalvagingReader
from ckptools.formats.shared.model_config import with_config
from ckptools.formats.shared.provenance import with_provenance
from ckptools.formats.shared.several_checkpoints import check_not_astray, tracker_in
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import GivenNames
from ckptools.option import spelled
from ckptools.pickles.machine import gc_paused
from ckptools.rules import with_problems
from ckptools.training_state import modules
from ckptools.training_state.sections import sections_of_kind

if TYPE_CHECKING:
    from ckptools.formats.shared.given_names_and_shapes import NamesFrom, ShapesFrom


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
    every_item: bool = True,
    salvage: bool = False,
    model: str | None = None,
) -> Checkpoint:
    """Open a checkpoint: its structure, none of its tensor values. Runs no code of the file.

    `path` is a rank file (its siblings are found), a folder of rank files, any torch.save file; or several rank files
    with any names, which together are the checkpoint. `shapes` and `names` are given as Python objects, JSON or another
    checkpoint; the other arguments are those of `Options`.

    Raises:
        ReadError: it cannot be read in the claimed format.
        UnknownFormatError: no format detects it.
        UsageError: a folder contains several checkpoints; or names are given that nothing here needs.
        RefusedError: given names do not fit.
    """
    if weights not in ("fp32", "module"):
        raise UsageError(None, f"{spelled('weights', weights)}: choose fp32 or module")
    if rules is not None:
        from ckptools.formats.shared.tensor_parallel import read_rules

        read_rules(path_of(rules))  # an error in the rules is reported for every format, and most formats need none
    options = Options(
        all_ranks,
        only_this_file,
        follow_symlinks,
        _salvaging(read_file) if salvage else read_file,
        jobs=jobs,
        on_file=on_file,
        shapes=None if shapes is None else read_given("shapes", shapes, follow_symlinks),
        weights=weights,
        rules=None if rules is None else path_of(rules),
        ranks=ranks,
        names=None if names is None else read_given("names", names, follow_symlinks),
        every_item=every_item,
        model=model,
    )
    return _opened(*_located(path, options))


def read_given(kind: Literal["shapes", "names"], source: Any, follow_symlinks: bool = False) -> Any:
    """Read the user's shapes or names: a Python object, a JSON, or another checkpoint.

    Raises:
        ReadError: it cannot be read.
        UsageError: it has none, or names that are not in the module's order.
    """
    from ckptools.files.opening import is_json
    from ckptools.formats.shared.given_names_and_shapes import SOURCES

    from_python, from_json, from_checkpoint = SOURCES[kind]
    if not isinstance(source, (str, Path)):
        return from_python(source)
    path = location(source)
    if is_json(path):
        return from_json(path)
    return from_checkpoint(open_checkpoint(path, follow_symlinks=follow_symlinks), path)


def open_again(path: Path, options: Options | None) -> Checkpoint:
    """Open a checkpoint once more with the `options` of its first opening, but with every rank."""
    return _opened(path, replace(options or Options(), all_ranks=True))


def with_all_ranks(checkpoint: Checkpoint | str | Path) -> Checkpoint:
    """A checkpoint, or the one at a path, with every rank's structure read."""
    if isinstance(checkpoint, (str, Path)):
        return open_checkpoint(checkpoint, all_ranks=True)
    return checkpoint if checkpoint.all_ranks else open_again(checkpoint.path, checkpoint.options)


def _opened(path: Path, options: Options) -> Checkpoint:
    found = _named(_detected(path, options), options.names)
    if isinstance(options.read_file, SalvagingReader):
        found = options.read_file.judged(found)
    return with_problems(with_config(found))


def _salvaging(read: Reader) -> Reader:
    """A reader that reads cut files as far as they go; torch's reader cannot."""
    if read is not modules.read_file:
        raise UsageError(None, f"{spelled('salvage', True)} goes with the inert reader alone")
    return SalvagingReader()


# -- locate: the local or remote files that the user named -------------------------------------------------------------


def _located(path: str | Path | Sequence[str | Path], options: Options) -> tuple[Path, Options]:
    """The path to open: the named one, or the folder above several rank files."""
    if isinstance(path, (str, Path)):
        return location(path), options
    if not isinstance(path, Iterable):
        check_path(path)
    paths = [location(one) for one in path]
    if len(paths) == 1:
        return paths[0], options
    _check_files(paths, options)
    if len({path.is_absolute() for path in paths}) > 1:
        paths = [path.absolute() for path in paths]
    above = common_folder([path.absolute().parent for path in paths])
    folder = next((p for p in (paths[0].parent, *paths[0].parent.parents) if p.absolute() == above), above)
    return folder, replace(options, files=tuple(paths))


def _check_files(paths: Sequence[Path], options: Options) -> None:
    """Refuse several paths unless the first is a rank file, by its format."""
    if not paths:
        raise UsageError(None, "no path was given")
    if options.ranks is not None or options.only_this_file:
        word = spelled("ranks" if options.ranks is not None else "only-this-file")
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


def _check_here(path: Path) -> None:
    with reading(path):
        if not path.exists():
            raise ReadError(path, "no such file or folder")


# -- detect: the format of the path, or of the only checkpoint in the folder -------------------------------------------


def _detected(path: Path, options: Options) -> Checkpoint:
    if not options.files:  # named files were examined already, and a web server does not list their folder
        _check_here(path)
    if options.files or options.ranks is not None:
        with gc_paused():
            return _read(RANK_FILES, path, options)
    formats = (*formats_from_outside(), *FORMATS)
    try:
        with reading(path):
            format_ = recognised(path, formats)
        if format_ is not None:
            with gc_paused():
                read = _read(format_, path, options)
                if not path.is_dir():
                    return read
                check_not_astray(path, read)
                return _beside_others(read, path, options, formats)
    except SeveralError:
        tracker = tracker_in(path, options.follow_symlinks)
        if tracker is None or tracker.target is None:
            raise
        return _detected(tracker.target, options)
    return _only_one_in(path, formats, options)


def _only_one_in(path: Path, formats: Sequence[Format], options: Options) -> Checkpoint:
    """Find the only checkpoint in a folder that is not one itself, with a note of links that may lead to others."""
    if not path.is_dir():
        what = what_is(head_at(path)) if path.is_file() else ""
        unknown = "not a checkpoint that ckptools knows; `ckptools formats` lists what it reads"
        raise UnknownFormatError(path, f"is {what}" if what else unknown)
    from ckptools.formats import folder_search
    from ckptools.formats.shared.several_checkpoints import with_links

    folder_search.check_nothing_lacks(path)
    found, passed_over = folder_search.find(path, formats, options.follow_symlinks)
    if found is None:
        raise UnknownFormatError(path, folder_search.described(path, passed_over))
    return with_links(_detected(found, options), path, passed_over)


def _beside_others(checkpoint: Checkpoint, path: Path, options: Options, formats: Sequence[Format]) -> Checkpoint:
    """Add a note to a checkpoint that was opened by its folder, which names other checkpoints in the folder.

    If it has only weights, a single file beside it with weights and an optimizer is opened instead: the weights may be
    an export of it.
    """
    from ckptools.formats.folder_search import others_in
    from ckptools.formats.shared.several_checkpoints import with_links, with_others

    others, links = others_in(path, formats, checkpoint, options.follow_symlinks)
    training = None if sections_of_kind(checkpoint, "optimizer") else _training_file(path, others, options)
    if training is not None:
        checkpoint, (others, links) = training, others_in(path, formats, training, options.follow_symlinks)
    return with_others(with_links(checkpoint, path, links), path, others)


def _training_file(folder: Path, found: Sequence[Path], options: Options) -> Checkpoint | None:
    """The only file in a folder with weights and an optimizer; None if there is none, or there are several."""
    files = [path for path in found if path.parent == folder and path.is_file()]
    if len(files) != 1:
        return None
    with suppress(CkptoolsError):  # a damaged file is named beside the weights
        opened = _detected(files[0], options)
        return opened if sections_of_kind(opened, "optimizer") and sections_of_kind(opened, "model") else None
    return None


# -- read: the structure, by the format --------------------------------------------------------------------------------


def _read(format_: Format, path: Path, options: Options) -> Checkpoint:
    """Read a checkpoint; with few ranks all of it, because only then it is known whether its files fit together."""
    with FileReader(options.read_file, options.jobs, options.on_file) as files:
        reading = replace(options, read_file=files, read_ahead=files.ahead, said=files.said)
        made = format_.read(path, reading)
        broken = any(p.severity == "error" and p.kind.lacks == "file" for p in made.problems)
        if not made.all_ranks and (broken or not made.structure_read) and _is_small(made):
            made = format_.read(path, replace(reading, all_ranks=True))
    # Refuse options that have no effect on this checkpoint.
    given = {"rules": options.rules is not None, "weights": options.weights != "fp32"}
    for name in [name for name, is_given in given.items() if is_given]:
        if format_ in FORMATS and made.format not in (*TAKEN_BY[name], "composite"):
            text = f"{spelled(name)}: does nothing for {made.saved_as}; it is for {', '.join(TAKEN_BY[name])}"
            raise UsageError(made.path, text)
    made = with_provenance(made, files.said)
    if _may_be_sparse(made):
        from ckptools.formats.shared.hollow import with_hollow

        made = with_hollow(made)
    return replace(made, options=options)


def _is_small(opened: Checkpoint) -> bool:
    """Whether the ranks and their structure are few enough to be read in full by default."""
    here = [f for f in opened.files if f.is_here]
    far = any(isinstance(f.path, RemotePath) for f in here)
    if far and not opened.structure_read and opened.cost.files >= len(here):
        return False  # every file was read; the rest are items, each of which takes a request to the store
    nbytes = opened.cost.nbytes * len(opened.files) // max(opened.cost.files, 1)
    return is_small(len({f.rank for f in here}), nbytes)


def _may_be_sparse(checkpoint: Checkpoint) -> bool:
    """Whether one of a checkpoint's local files takes less room on the disk than its size."""
    here = [f.path for f in checkpoint.files if f.is_here and not isinstance(f.path, RemotePath)]
    try:
        return any(map(takes_less, here))
    except (OSError, AttributeError):  # deleted meanwhile, or a system without holes
        return False


# -- name: the parameters of an optimizer that is keyed by number, by the user's names ---------------------------------


def _named(checkpoint: Checkpoint, given: GivenNames | None) -> Checkpoint:
    """Add the user's names to its only optimizer that is keyed by number, if they fit."""
    if given is None or checkpoint.names_given is given:
        return checkpoint
    from ckptools.training_state.optimizers import optimizers_of

    numbered = [o.name for o in optimizers_of(checkpoint).values() if o.naming.by != "fqn"]
    if len(numbered) != 1:
        here = ", ".join(numbered) or "no optimizer here"
        raise UsageError(
            checkpoint.path, f"{spelled('names')} gives the names of one optimizer, and {here} is keyed by number"
        )
    named = replace(checkpoint, names_given=given)
    return named if optimizers_of(named) else checkpoint
