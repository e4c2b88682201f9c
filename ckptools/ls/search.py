"""Find and open every checkpoint in a folder: rank files by their names, recognised folders, single files.

Also finds trackers, which name a checkpoint. Notes list every skipped entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.dtypes import is_floating
from ckptools.errors import CkptoolsError, ReadError, SeveralError, TrackerError, UnknownFormatError
from ckptools.files.opening import common_folder, content_of, head_at
from ckptools.formats.folder_search import MAX_DEPTH, FolderSearch, is_named_so
from ckptools.formats.rank_search.rank_names import is_temporary, parse
from ckptools.formats.registry import FORMATS, formats_from_outside, recognised
from ckptools.formats.shared.companions import is_companion
from ckptools.formats.shared.several_checkpoints import LINK, Tracker, trackers_in
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import grouped
from ckptools.model.tree import tensors_in
from ckptools.model.verdict import Verdict
from ckptools.rules.verdict import verdict_of
from ckptools.text import few
from ckptools.training_state.steps import group_rates
from ckptools.verify.run import counted_steps, step_counter

Opener = Callable[[Path, Sequence[Path]], "Opened"]
"""Opens a path; also gets the files that belong to the same checkpoint by their names."""

OnCheckpoint = Callable[[Path, "Opened | CkptoolsError", Sequence[Path]], None]
"""Gets the path of a checkpoint, the opened checkpoint or the error, and its known files."""


class Opened(NamedTuple):
    """An opened checkpoint without its tree: the trees of a long run would fill the memory."""

    facts: Checkpoint
    verdict: Verdict
    holds_weights: bool
    rates: tuple[float, ...] = ()
    counter: Any = None

    @classmethod
    def of(cls, ck: Checkpoint) -> Opened:
        """Keep the facts of a checkpoint, and drop its tree."""
        weights = any(is_floating(tensor.dtype) for _, tensor in tensors_in(ck.tree))
        facts = replace(ck, tree=None, per_rank={}, names=(), differing=(), rounded=())
        return cls(
            facts, verdict_of(ck), weights, group_rates(ck), None if ck.step.value is not None else step_counter(ck)
        )

    def counted(self) -> int | None:
        """Read the steps that the optimizer counts; None if it counts none or they cannot be read."""
        try:
            found = None if self.counter is None else counted_steps(self.counter)
        except CkptoolsError:
            return None
        return found if isinstance(found, int) else None


@dataclass
class RunSearch(FolderSearch):
    """Searches a folder for the checkpoints of a run, and hands over each as soon as it is found.

    `opened` opens a path, and `on_checkpoint` gets the result.
    """

    opened: Opener = field(kw_only=True)
    on_checkpoint: OnCheckpoint = field(kw_only=True)
    trackers: list[Tracker] = field(default_factory=list)
    _paths: list[Path] = field(default_factory=list)

    def run(self, levels: int = MAX_DEPTH) -> None:
        """Search the folder and its subfolders, at most so many levels down.

        Raises:
            ReadError: the folder itself cannot be listed.
        """
        try:
            self.enter(self.root, levels)
        except OSError as error:
            raise ReadError(self.root, (error.strerror or "").lower(), "no access") from error
        for path in self.damaged_saves(self._paths):
            self._failed(path, self._why_unknown(path), [path, *(path.iterdir() if path.is_dir() else ())])
        # Links named as trackers have rows of their own.
        links = [link for link in self.not_followed if not LINK.fullmatch(link.name)]
        self.notes = self.skipped(links, "the folder")

    def look_into(self, folder: Path, depth: int) -> None:
        """Open the checkpoint that a folder is, and checkpoints among its files and sub-folders."""
        entries = [path for path in self.entries(folder) if not is_temporary(path.name)]
        trackers = trackers_in(folder)
        self.trackers += trackers
        # A Trainer leaves its own files beside the DeepSpeed tag folder and tracker: they are one checkpoint.
        of_a_run = any(map(_names_another, trackers)) and not any(map(is_companion, entries))
        itself = None if of_a_run else self._recognised(folder)
        if isinstance(itself, UnknownFormatError):  # a refused format: all files belong to it
            self._failed(folder, itself, [path for path in entries if path.is_file()])
            return
        if isinstance(itself, Opened) and not in_one_below(folder, itself.facts):
            self._found(folder, itself)
        files = [path for path in entries if path not in self.known and path.is_file()]
        before, found_before = len(self.known), len(self._paths)
        ranked = grouped(filter(None, map(parse, files)), lambda name: (name.group, name.world_size))
        for group in ranked.values():
            self._first_that_opens([n.path for n in sorted(group, key=lambda n: (n.rank, n.path))])
        if isinstance(itself, CkptoolsError) and len(self.known) == before:
            self._failed(folder, itself, files)
        self._single_files(files)
        if depth:
            self.enter_each(entries, depth - 1)
        self.unknown += [folder] if len(self._paths) == found_before and itself is None else []
        others = isinstance(itself, Opened) and not self.known.issuperset(_here(itself.facts))
        if isinstance(itself, Opened) and others and not _is_left_over(folder, itself.facts):
            self._found(folder, itself)

    def _recognised(self, folder: Path) -> Opened | CkptoolsError | None:
        """Open the checkpoint that a folder is or points to; return the error if that fails, None if it is not one."""
        try:
            if recognised(folder, (*formats_from_outside(), *FORMATS)) is None:
                return None
            return self.opened(folder, ())
        except (SeveralError, TrackerError):
            return None
        except CkptoolsError as error:
            return error

    def _first_that_opens(self, paths: Sequence[Path]) -> None:
        """Open a checkpoint by the first readable one of its rank files; it fails only if all are damaged."""
        first: CkptoolsError | None = None
        for path in paths:
            try:
                self._found(path, self.opened(path, paths), paths)
                return
            except CkptoolsError as error:
                first = first or error
        if first is not None:
            self._failed(paths[0], first, paths)

    def _single_files(self, files: Iterable[Path]) -> None:
        for path in files:
            if path not in self.known and not is_companion(path) and _may_be_one(path):
                # Any file with weights is a checkpoint; a damaged or empty file is one only if its name says so.
                try:
                    found = self.opened(path, (path,))
                except CkptoolsError as error:
                    known = not isinstance(error, UnknownFormatError)
                    if is_named_so(path) and (known or (path.exists() and not path.stat().st_size)):
                        self._failed(path, error, (path,))
                    elif is_named_so(path):
                        self.unknown.append(path)
                else:
                    if found.holds_weights:
                        self._found(path, found)

    def _found(self, path: Path, opened: Opened, files: Sequence[Path] = ()) -> None:
        if path == self.root:
            path = _file_instead_of_folder(opened.facts) or path
        if opened.facts.format == "step_files":  # any of its files opens it; the model's names it
            path = opened.facts.path
        mine = _here(opened.facts)
        above = {folder for file in mine for folder in file.parents if folder.is_relative_to(self.root)}
        self.known |= {*files, *mine, *above} - {self.root}
        self._paths.append(path)
        self.on_checkpoint(path, opened, sorted(mine))

    def _failed(self, path: Path, error: CkptoolsError, files: Sequence[Path]) -> None:
        self.known.update(files)
        self._paths.append(path)
        self.on_checkpoint(path, error, files)

    def _why_unknown(self, path: Path) -> CkptoolsError:
        """Return why nothing can be opened at a path that is named like a save."""
        entries = list(path.iterdir()) if path.is_dir() else [path]
        if all(is_temporary(entry.name) for entry in entries):
            left = f"holds nothing but {few([entry.name for entry in entries])}, whose write did not end"
            return ReadError(path, left if entries else "is an empty folder")
        try:
            self.opened(path, ())
        except CkptoolsError as error:
            return error
        return ReadError(path, "holds no weights")


def _here(checkpoint: Checkpoint) -> set[Path]:
    return {file.path for file in checkpoint.files if file.status != "missing"}


def _is_left_over(folder: Path, checkpoint: Checkpoint) -> bool:
    """Whether all files of a checkpoint that a folder points to are in temporary folders below it."""
    below = [file.relative_to(folder).parts for file in _here(checkpoint) if file.is_relative_to(folder)]
    return bool(below) and all(any(map(is_temporary, parts[:-1])) for parts in below)


def _names_another(tracker: Tracker) -> bool:
    """Whether a tracker marks its folder as a run folder: it is a file, or a link to a folder."""
    return not tracker.path.is_symlink() or (tracker.target is not None and tracker.target.is_dir())


def in_one_below(folder: Path, checkpoint: Checkpoint) -> bool:
    """Whether all files of a checkpoint are in one sub-folder, so that the folder itself is not the checkpoint."""
    parents = [file.path.parent for file in checkpoint.files]
    home = common_folder(parents) if parents else folder
    return home != folder and home.is_relative_to(folder)


def _file_instead_of_folder(checkpoint: Checkpoint) -> Path | None:
    """Return the only file, or a rank file that finds the others; None if only the folder opens all files."""
    if len(checkpoint.files) == 1:
        return checkpoint.files[0].path
    names = [parse(file.path) for file in checkpoint.files if file.status != "missing"]
    groups = {(name.group, name.world_size, name.part) if name else None for name in names}
    alone = checkpoint.format == "rank_files" and len(groups) == 1 and None not in groups
    return next(file.path for file in checkpoint.files if file.is_here) if alone else None


def _may_be_one(path: Path) -> bool:
    if is_named_so(path):
        return True
    try:
        return content_of(head_at(path)) in ("zip", "legacy")
    except ReadError:
        return False
