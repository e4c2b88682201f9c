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
from ckptools.files.location import leads_out, real_path
from ckptools.files.opening import reading
from ckptools.formats.rank_search.rank_names import COMPRESSED, is_temporary
from ckptools.formats.rank_search.sibling_search import are_of_one
from ckptools.formats.registry import Format, recognised
from ckptools.formats.shared.companions import is_companion
from ckptools.formats.shared.several import listed, names, several, tracker_in
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tree import tensors_in
from ckptools.model.values import describe_for_error
from ckptools.pickles.machine import gc_paused
from ckptools.text import few, plural
from ckptools.training_state import modules
from ckptools.training_state.steps import step_in

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".tgz")
"""Suffixes of torch.save files; a damaged one counts by its name."""

WEIGHTS_ELSEWHERE = (".safetensors",)
"""Suffixes of single files in other formats."""

FOREIGN = re.compile(
    r"\.(?:gguf|ggml|keras|msgpack)$|\.weights\.h5$|\.data-\d{5}-of-\d{5}$|^manifest\.ocdbt$"
    r"|(?:weight|model|param).*\.(?:h5|hdf5|npz|npy)$",
    re.IGNORECASE,
)
"""Files of weights that no format here reads, by their names."""

MAX_DEPTH = 4
MAX_ENTRIES = 1000
"""Most entries of one folder, and most folders, that are looked at."""

MAX_READ = 64
"""Most single files whose structure is read."""


@dataclass
class FolderSearch:
    """A search for checkpoints below one folder, bounded in the entries that it looks at.

    Attributes:
        folders: how many more folders are entered.
        files: how many more single files are read.
        skip: files and folders that are ignored.
        not_followed: links out of the folder that may lead to a checkpoint.
        deeper: folders that lie too deep to be entered.
        foreign: files of weights in unknown formats.
    """

    formats: Sequence[Format]
    root: Path
    follow_symlinks: bool = False
    folders: int = MAX_ENTRIES
    files: int = MAX_READ
    skip: frozenset[Path] = frozenset()
    not_followed: list[Path] = field(default_factory=list)
    deeper: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)

    def below(self, folder: Path, depth: int = MAX_DEPTH) -> list[Path]:
        """The checkpoints in a folder and its subfolders; links in it are other names of its content."""
        found: list[Path] = []
        for entry in self._entries(folder):
            with suppress(OSError, ReadError):  # an unreadable folder does not stop the search
                found += self.at(entry, depth)
        return found

    def at(self, path: Path, depth: int = MAX_DEPTH) -> list[Path]:
        """The checkpoint at a path, or those below it."""
        if path in self.skip or path.name.startswith(".") or (path.is_symlink() and not self._is_followed(path)):
            return []
        if not path.is_dir():
            self.foreign += [path] if FOREIGN.search(path.name) else []
            return [path] if self._is_file_of_one(path) else []
        if self._is_known(path):
            return [path]
        if depth > 1:
            return self.below(path, depth - 1)
        self.deeper.append(path)
        return []

    def weights_deeper(self) -> list[Path]:
        """Some files of weights, by their names, in and below the folders that were not entered."""
        found: list[Path] = []
        ahead = list(self.deeper)
        while ahead and not found:
            with suppress(OSError, ReadError):
                entries = self._entries(ahead.pop(0))
                found += [e for e in entries if e.suffix in (*WEIGHTS_ELSEWHERE, *SUFFIXES) and not is_companion(e)]
                ahead += [e for e in entries if e.is_dir() and not e.is_symlink()]
        return found

    def _is_followed(self, link: Path) -> bool:
        """Whether to follow a link: it leads out of the folder, and not to one that contains it."""
        above = real_path(self.root)
        if not leads_out(link, self.root) or above.is_relative_to(real_path(link)):
            return False
        if not self.follow_symlinks and (link.is_dir() or is_named_so(link) or link.suffix in WEIGHTS_ELSEWHERE):
            self.not_followed.append(link)
        return self.follow_symlinks

    def passed_over(self) -> str:
        """Describe the links out of the folder that were not followed; empty for none."""
        names = [str(link.relative_to(self.root)) for link in self.not_followed]
        links = plural(len(names), "link")
        return f"{links} out of it, not followed (--follow-symlinks): {few(names)}" if names else ""

    def _entries(self, folder: Path) -> list[Path]:
        if self.folders <= 0:
            return []
        self.folders -= 1
        with reading(folder):
            return sorted(islice(folder.iterdir(), MAX_ENTRIES))

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
            content = content_of(head_at(path))
        except ReadError:
            return named
        if not content:
            return self._is_known(path)  # safetensors
        self.files -= 1
        return named if content in COMPRESSIONS.values() or self.files < 0 else _holds_weights(path, named)


def is_named_so(path: Path) -> bool:
    """Whether a file has a name of torch.save files, compressed or not."""
    plain = path.with_suffix("") if path.suffix in COMPRESSED else path
    return plain.suffix in SUFFIXES


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
    search = FolderSearch(formats, folder, follow_symlinks)
    tracker = tracker_in(folder, follow_symlinks)
    if tracker is None:
        found = search.below(folder)
        finished = [path for path in found if not any(map(is_temporary, path.relative_to(folder).parts))]
        one = _one_of(folder, finished or found)
        _check_no_stray(folder, one, search)
        return one, search.passed_over()
    found = search.at(tracker.target) if tracker.target else []
    if tracker.target is None or not found:
        here = listed(folder, search.below(folder))
        target = describe_for_error(tracker.target and tracker.target.name)
        why = tracker.why or f"names {target}, which holds no checkpoint"
        raise ReadError(tracker.path, f"{why}; {here or 'and no other checkpoint is here'}")
    return _one_of(tracker.target, found), ""


def _check_no_stray(folder: Path, found: Path | None, search: FolderSearch) -> None:
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
        return sum(e.suffix in (*WEIGHTS_ELSEWHERE, *SUFFIXES) for e in islice(found.iterdir(), MAX_ENTRIES)) == 1


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
    search = FolderSearch(formats, folder, follow_symlinks, skip=frozenset(mine))
    return search.below(folder), search.passed_over()
