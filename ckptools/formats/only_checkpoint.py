"""The checkpoints below a folder that is none itself: a single one is opened, of several the newest is proposed.

A training run keeps them in `checkpoints/step-5`, `checkpoint-500`, `global_step_3/actor`, `last.ckpt`. Only what can
be opened counts, and of single torch.save files only those that hold floating-point tensors: a data loader's state,
random states and indices are no checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from ckptools.dtypes import is_floating
from ckptools.errors import CkptoolsError, ReadError, UnknownFormatError
from ckptools.files.file_type import COMPRESSIONS, content_of, head_at
from ckptools.files.location import real_path
from ckptools.files.opening import reading
from ckptools.formats.folder_search import MAX_DEPTH, FolderSearch, is_named_so
from ckptools.formats.rank_search.rank_names import is_temporary
from ckptools.formats.rank_search.sibling_search import are_of_one
from ckptools.formats.registry import Format, recognised
from ckptools.formats.shared.companions import is_companion
from ckptools.formats.shared.several import ASTRAY, MAX_ENTRIES, listed, names, several, tracker_in
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tree import tensors_in
from ckptools.model.values import describe_for_error
from ckptools.pickles.machine import gc_paused
from ckptools.training_state import modules
from ckptools.training_state.steps import step_in

FOREIGN = re.compile(
    r"\.(?:gguf|ggml|keras|msgpack)$|\.weights\.h5$|\.data-\d{5}-of-\d{5}$|^manifest\.ocdbt$"
    r"|(?:weight|model|param).*\.(?:h5|hdf5|npz|npy)$",
    re.IGNORECASE,
)
"""Files of weights that no format here reads, by their names."""

MAX_READ = 64
"""Most single files whose structure is read."""

MAX_DEEPER = 1000
"""Most folders below `MAX_DEPTH` that are searched for names of weights."""


@dataclass
class PathSearch(FolderSearch):
    """A search for the paths of checkpoints, by their names and first bytes; none is opened as a whole.

    Attributes:
        found: files, and folders that a format recognises; these are not looked into.
        deeper: folders that lie too deep to be looked into.
        foreign: files of weights in unknown formats.
    """

    formats: Sequence[Format] = ()
    found: list[Path] = field(default_factory=list)
    deeper: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)
    _read: int = 0

    def below(self) -> PathSearch:
        """Search what is in the root, which is none of the paths itself."""
        self._entered.add(real_path(self.root))
        with reading(self.root):
            entries = self.entries(self.root)
        self._look_at(entries, MAX_DEPTH)
        self.found += self.damaged_saves(self.found)
        return self

    def at(self, path: Path) -> PathSearch:
        """Search one entry, such as what a tracker names."""
        if not path.name.startswith(".") and (not path.is_symlink() or self._is_followed(path)):
            self._look_at([path], MAX_DEPTH)
        return self

    def look_into(self, folder: Path, depth: int) -> None:
        """Find a folder that is a checkpoint, or those in it."""
        if self._is_known(folder):
            self.found.append(folder)
        elif depth:
            before = len(self.found)
            self._look_at(self.entries(folder), depth)
            self.unknown += [folder] if len(self.found) == before else []
        else:
            self.deeper.append(folder)

    def _look_at(self, entries: Sequence[Path], depth: int) -> None:
        for file in entries:
            with suppress(OSError, ReadError):  # an unreadable file does not stop the search
                if not file.is_dir():
                    self.foreign += [file] if FOREIGN.search(file.name) else []
                    self.found += [file] if self._is_file_of_one(file) else []
        self.enter_each(entries, depth - 1)

    def weights_deeper(self) -> list[Path]:
        """Some files of weights, by their names, in and below the folders that lie too deep."""
        found: list[Path] = []
        ahead = self.deeper[:MAX_DEEPER]
        for folder in ahead:
            with suppress(OSError):
                entries = self.entries(folder)
                found += [e for e in entries if is_named_so(e) and not is_companion(e)]
                ahead += [e for e in entries if e.is_dir()][: MAX_DEEPER - len(ahead)]
            if found:
                break
        return found

    def _is_known(self, folder: Path) -> bool:
        try:
            return recognised(folder, self.formats) is not None
        except CkptoolsError:
            return True  # it holds several, or reports its fault when it is opened

    def _is_file_of_one(self, path: Path) -> bool:
        """Whether a single file is a checkpoint."""
        if is_companion(path) or not path.is_file():
            return False
        named = is_named_so(path)
        try:
            head = head_at(path)
        except ReadError:
            return named
        content = content_of(head)
        if not content:
            known = (named and not head) or self._is_known(path)  # safetensors
            self.unknown += [path] if named and not known else []
            return known
        self._read += 1
        return named if content in COMPRESSIONS.values() or self._read > MAX_READ else _holds_weights(path, named)


def _holds_weights(path: Path, otherwise: bool) -> bool:
    """Whether a torch.save file holds floating-point tensors; `otherwise` where it cannot be read."""
    try:
        with gc_paused():
            tree = modules.read_file(path).tree
    except ReadError:
        return otherwise
    return any(is_floating(tensor.dtype) for _, tensor in tensors_in(tree))


def find(folder: Path, formats: Sequence[Format], follow_symlinks: bool = False) -> tuple[Path | None, str]:
    """The checkpoint that a folder leads to, or None, and a note on what was skipped.

    It is what the folder's tracker names, else the only one below it.

    Raises:
        SeveralError: there are several.
        ReadError: the tracker leads to no checkpoint.
    """
    search = PathSearch(folder, follow_symlinks, formats=formats)
    tracker = tracker_in(folder, follow_symlinks)
    if tracker is None:
        found = search.below().found
        finished = [path for path in found if not any(map(is_temporary, path.relative_to(folder).parts))]
        one = _one_of(folder, finished or found)
        skipped = "; ".join(search.skipped(search.not_followed))
        _check_no_stray(folder, one, search)
        return one, skipped
    found = search.at(tracker.target).found if tracker.target else []
    if tracker.target is None or not found:
        here = listed(folder, PathSearch(folder, follow_symlinks, formats=formats).below().found)
        target = describe_for_error(tracker.target and tracker.target.name)
        why = tracker.why or f"names {target}, which holds no checkpoint"
        raise ReadError(tracker.path, f"{why} ({ASTRAY}); {here or 'and no other checkpoint is here'}")
    return _one_of(tracker.target, found), ""


def _check_no_stray(folder: Path, found: Path | None, search: PathSearch) -> None:
    """Refuse the only thing found below a folder where other weights lie that may be of the same model.

    They lie deeper than was searched, or beside one file are in an unknown format.
    """
    if found is None:
        return
    deeper, foreign = search.weights_deeper(), search.foreign if _is_one_file(found) else []
    if not (deeper or foreign):
        return
    why = "lie deeper too" if deeper else "of another format lie there too"
    text = f"no checkpoint that ckptools knows: weights {why} ({names(folder, (deeper or foreign)[:1])})"
    raise UnknownFormatError(folder, f"{text}; name the one you mean, such as {names(folder, [found])}")


def _is_one_file(found: Path) -> bool:
    """Whether a checkpoint is a single file of weights, without a step in its name or its folder's."""
    if step_in(found.name) is not None:
        return False
    if found.is_file():
        return step_in(found.parent.name) is None
    with reading(found):
        return sum(map(is_named_so, islice(found.iterdir(), MAX_ENTRIES))) == 1


def _one_of(folder: Path, found: Sequence[Path]) -> Path | None:
    with gc_paused():
        if len(found) > 1 and not are_of_one(found):
            raise several(folder, found)
    return found[0] if found else None


def others_in(
    folder: Path, formats: Sequence[Format], opened: Checkpoint, follow_symlinks: bool
) -> tuple[list[Path], str]:
    """Checkpoints in and below a folder beside the opened one, and a note on what was skipped."""
    mine = {folder_or_file for file in opened.files for folder_or_file in (file.path, *file.path.parents)}
    search = PathSearch(folder, follow_symlinks, mine, formats=formats).below()
    search.found += [path for path in search.damaged_saves(mine) if path not in search.found]
    return search.found, "; ".join(search.skipped(search.not_followed))
