"""Search a folder and its subfolders for checkpoints, within limits that all commands share.

`find` finds the checkpoint that `inspect RUN/` opens, `ls` lists all of them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ckptools.dtypes import is_floating
from ckptools.errors import CkptoolsError, ReadError, UnknownFormatError
from ckptools.files.opening import COMPRESSIONS, content_of, head_at, is_remote, leads_out, reading, real_path
from ckptools.files.storage import UNFINISHED
from ckptools.formats.rank_search.rank_groups import are_of_one
from ckptools.formats.rank_search.rank_names import COMPRESSED, COUNTS_STEPS, is_temporary
from ckptools.formats.rank_search.step_names import other_parts
from ckptools.formats.registry import Format, recognised
from ckptools.formats.shared.companions import is_companion
from ckptools.formats.shared.several_checkpoints import ASTRAY, MAX_ENTRIES, Save, listed, names, several, tracker_in
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tree import describe_for_error, tensors_in
from ckptools.option import spelled
from ckptools.pickles.machine import gc_paused
from ckptools.text import few, plural
from ckptools.training_state import modules
from ckptools.training_state.steps import step_in

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".tgz", ".nemo", ".safetensors")
"""Suffixes of single files of weights; a damaged file counts by its name."""

MAX_DEPTH = 4
"""Folders this far below the first one are entered, to detect checkpoints."""

MAX_FOLDERS = 20_000
"""At most this many folders are entered."""


@dataclass
class FolderSearch:
    """A walk through a folder and its subfolders; subclasses define `look_into`, which examines each of them.

    Attributes:
        known: files and folders of checkpoints that were found already: they are ignored.
        temporary: left-overs of interrupted writes, by their names.
        not_followed: links out of the folder that may lead to a checkpoint.
        notes: other skipped entries, a line each.
        unknown: files with names of weights but of unknown format, and folders in which nothing was found.
    """

    root: Path
    follow_symlinks: bool = False
    known: set[Path] = field(default_factory=set)
    temporary: list[Path] = field(default_factory=list)
    not_followed: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unknown: list[Path] = field(default_factory=list)
    _folders: int = 0
    _entered: set[Path] = field(default_factory=set)

    def look_into(self, folder: Path, depth: int) -> None:
        """Examine a folder and, by `enter_each`, its subfolders, at most `depth` levels down."""
        raise NotImplementedError

    def enter(self, folder: Path, depth: int = MAX_DEPTH) -> None:
        """Examine a folder, only once even if links lead to it too.

        Raises:
            OSError: the folder cannot be listed.
        """
        real = real_path(folder)
        if real not in self._entered:
            self._entered.add(real)
            self.look_into(folder, depth)

    def enter_each(self, entries: Sequence[Path], depth: int) -> None:
        """Examine the folders among some entries; a note names one that cannot be listed."""
        for folder in entries:
            if folder in self.known or not folder.is_dir():
                continue
            if self._folders == MAX_FOLDERS:
                return
            self._folders += 1
            try:
                self.enter(folder, depth)
            except (OSError, ReadError) as error:
                why = error.reason if isinstance(error, ReadError) else (error.strerror or "").lower()
                self.notes.append(f"{self.name(folder)} was not looked into: {why}")

    def entries(self, folder: Path) -> list[Path]:
        """The entries of a folder, except known and hidden entries, and links that are not followed."""
        listed = sorted(islice(folder.iterdir(), MAX_ENTRIES + 1))
        if len(listed) > MAX_ENTRIES:
            name = self.name(folder)
            self.notes.append(f"{name} holds more than {MAX_ENTRIES} entries; the others were not looked at")
        new = [path for path in listed if path not in self.known]
        self.temporary += [path for path in new if is_temporary(path.name)]
        shown = (path for path in new if not path.name.startswith("."))
        return [path for path in shown if not path.is_symlink() or self._is_followed(path)]

    def damaged_saves(self, found: Iterable[Path]) -> list[Path]:
        """The unknown files and folders whose names differ from a found checkpoint's only in numbers.

        A save that died leaves an empty folder, or a file of zeros. The step folder around a checkpoint is compared
        too: `global_step_6` beside `global_step_3/actor`.
        """
        if not self.unknown:
            return []
        known = {Save(path).pattern for one in found for path in (one, *self._step_folders(one))}
        return [path for path in self.unknown if Save(path).pattern in known]

    def _step_folders(self, checkpoint: Path) -> Iterator[Path]:
        above = (path for path in checkpoint.parents if path != self.root and path.is_relative_to(self.root))
        return (path for path in above if COUNTS_STEPS.fullmatch(path.name))

    def _is_followed(self, link: Path) -> bool:
        """Whether to follow a link: not if it leads out of the root, or to a folder above it."""
        if not leads_out(link, self.root) or real_path(self.root).is_relative_to(real_path(link)):
            return False
        if not self.follow_symlinks and (link.is_dir() or is_named_so(link)):
            self.not_followed.append(link)
        return self.follow_symlinks and link.exists()

    def skipped(self, links: Sequence[Path], folder: str = "it") -> list[str]:
        """Describe the skipped entries: links out of the folder, and the notes."""
        names = few(list(map(self.name, links)))
        text = (
            f"{plural(len(links), 'link')} out of {folder}, not followed ({spelled('follow-symlinks', True)}): {names}"
        )
        many = f"only {MAX_FOLDERS} folders were looked into"
        return [*([text] if links else []), *self.notes, *([many] if self._folders == MAX_FOLDERS else [])]

    def name(self, path: Path) -> str:
        """The name of a path to append to the root."""
        return str(path.relative_to(self.root))


def is_named_so(path: Path) -> bool:
    """Whether a file has a suffix of weight files: of torch.save, compressed or not, or of safetensors."""
    plain = path.with_suffix("") if path.suffix in COMPRESSED else path
    return plain.suffix in SUFFIXES


# -- guess the writer of a folder that no format detects, and the file that is missing ---------------------------------
# Names alone decide. A missing file is named only if the folder itself holds files that lie beside it, so a run with
# several checkpoints in it does not count.

NEAREST_ENTRIES = 1 << 12
NEAREST_DEPTH = 5
ASK = "to ask for a format: the issue form 'New format'"


class Sign(NamedTuple):
    """Names in a folder that only one writer gives.

    Attributes:
        writer: the framework.
        pattern: of paths below the folder.
        missing: a file that is beside them in a whole checkpoint; empty if the writer's files are not supported.
    """

    writer: str
    pattern: re.Pattern[str]
    missing: str = ""


LACKING = (
    Sign("Nanotron", re.compile(r"model/(.+/)?model_(weight|bias)[^/]*\.safetensors"), "checkpoint_metadata.json"),
    Sign("Nanotron", re.compile(r"optimizer/optimizer_pp-\d+-of-\d+_.*\.pt"), "checkpoint_metadata.json"),
    Sign(
        "torchsnapshot", re.compile(r"batched/[0-9a-f]{8}-[0-9a-f-]{27}|(sharded|replicated)/.+"), ".snapshot_metadata"
    ),
)
"""Folders of supported formats without the file by which the format is detected, which the writers write last.

Source: nanotron/serialize/main.py (`save`), torchsnapshot/snapshot.py (`take`: "commit snapshot metadata only after all
ranks complete writing").
"""

FOREIGN = (
    Sign("Orbax (JAX)", re.compile(r"(.+/)?(manifest\.ocdbt|_CHECKPOINT_METADATA|_METADATA)")),
    Sign("TensorFlow", re.compile(r"(.+/)?(.+\.data-\d{5}-of-\d{5}|saved_model\.pb)")),
    Sign("Keras", re.compile(r"(.+/)?.+\.(keras|weights\.h5|h5)")),
    Sign("PaddlePaddle", re.compile(r"(.+/)?.+\.(pdparams|pdopt)")),
    Sign("llama.cpp", re.compile(r"(.+/)?.+\.(gguf|ggml)")),
    Sign("ONNX", re.compile(r"(.+/)?.+\.onnx")),
    Sign("Flax", re.compile(r"(.+/)?flax_model[^/]*\.msgpack")),
    Sign("MXNet", re.compile(r"(.+/)?.+-\d{4}\.params")),
)
"""Files of frameworks other than PyTorch."""


def described(folder: Path, links: str = "") -> str:
    """Describe in one line a folder that no format detects, given its links that were not followed."""
    if links:
        return f"no checkpoint that ckptools knows in this folder, and {links}"
    names = list(_names(folder))
    unknown = "no checkpoint that ckptools knows in this folder; `ckptools formats` lists what it reads"
    for sign in FOREIGN:
        name = next(filter(sign.pattern.fullmatch, names), None)
        if name is not None:
            shown = describe_for_error(name.rpartition("/")[2])
            return f"looks like {sign.writer} by {shown}, which is no PyTorch checkpoint and is not read; {unknown}"
    return f"{unknown}; {ASK}" if names else unknown


def check_nothing_lacks(folder: Path) -> None:
    """Refuse a folder that lacks the file by which its format is detected.

    Raises:
        UnknownFormatError: it lacks the file; the message names the framework and the file.
    """
    names = list(_names(folder))
    for sign in LACKING:
        if any(map(sign.pattern.fullmatch, names)) and not (folder / sign.missing).exists():
            text = f"looks like {sign.writer}: {sign.missing} is missing, which it writes last: {UNFINISHED}"
            raise UnknownFormatError(folder, text, "unfinished")


def _names(folder: Path) -> Iterator[str]:
    """Yield paths of files below a folder, the nearest first; no link is followed, and no store is listed."""
    if is_remote(folder):
        return
    ahead, seen = deque([(folder, "", 0)]), 0
    while ahead and seen < NEAREST_ENTRIES:
        at, above, depth = ahead.popleft()
        with suppress(OSError):
            for entry in islice(sorted(at.iterdir()), NEAREST_ENTRIES):
                seen += 1
                if entry.is_dir() and not entry.is_symlink() and depth < NEAREST_DEPTH:
                    ahead.append((entry, f"{above}{entry.name}/", depth + 1))
                elif entry.is_file():
                    yield f"{above}{entry.name}"


# -- checkpoints inside a folder that is not one itself: a single one is opened, of several the newest is proposed -----
# A training run keeps them in `checkpoints/step-5`, `checkpoint-500`, `global_step_3/actor`, `last.ckpt`. Only openable
# checkpoints count, and of single torch.save files only those with floating-point tensors: a data loader's state,
# random states and indices are not checkpoints.

FOREIGN_NAMES = re.compile(
    r"\.(?:gguf|ggml|keras|msgpack)$|\.weights\.h5$|\.data-\d{5}-of-\d{5}$|^manifest\.ocdbt$"
    r"|(?:weight|model|param).*\.(?:h5|hdf5|npz|npy)$",
    re.IGNORECASE,
)
"""Names of files of weights in unsupported formats."""

MAX_READ = 64
"""At most this many single files have their structure read."""

MAX_DEEPER = 1000
"""At most this many folders below `MAX_DEPTH` are searched for names of weights."""


@dataclass
class PathSearch(FolderSearch):
    """A search for the paths of checkpoints, by their names and first bytes; none is opened in full.

    Attributes:
        found: checkpoint files, and folders that a format detects; these folders are not entered.
        deeper: folders that lie too deep to be entered.
        foreign: files of weights in unknown formats.
    """

    formats: Sequence[Format] = ()
    found: list[Path] = field(default_factory=list)
    deeper: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)
    _read: int = 0

    def below(self) -> PathSearch:
        """Search the folders and files in the root, but not the root itself."""
        self._entered.add(real_path(self.root))
        with reading(self.root):
            entries = self.entries(self.root)
        self._look_at(entries, MAX_DEPTH)
        self.found += self.damaged_saves(self.found)
        return self

    def at(self, path: Path) -> PathSearch:
        """Search one entry, such as the one that a tracker names."""
        if not path.name.startswith(".") and (not path.is_symlink() or self._is_followed(path)):
            self._look_at([path], MAX_DEPTH)
        return self

    def look_into(self, folder: Path, depth: int) -> None:
        """Record a folder that is a checkpoint, or search its entries."""
        if self._is_known(folder):
            self.found.append(folder)
        elif depth:
            before = len(self.found)
            self._look_at(self.entries(folder), depth)
            self.unknown += [folder] if len(self.found) == before else []
        else:
            self.deeper.append(folder)

    def _look_at(self, entries: Sequence[Path], depth: int) -> None:
        parts = other_parts(entries)
        for file in entries:
            with suppress(OSError, ReadError):  # an unreadable file does not stop the search
                if not file.is_dir() and file not in parts:
                    self.foreign += [file] if FOREIGN_NAMES.search(file.name) else []
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
            return True  # it contains several, or reports its fault when opened

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
    """Whether a torch.save file has floating-point tensors; `otherwise` if it cannot be read."""
    try:
        with gc_paused():
            tree = modules.read_file(path).tree
    except ReadError:
        return otherwise
    return any(is_floating(tensor.dtype) for _, tensor in tensors_in(tree))


def find(folder: Path, formats: Sequence[Format], follow_symlinks: bool = False) -> tuple[Path | None, str]:
    """Find the checkpoint in a folder, or None, and a note on skipped entries.

    It is the one that the folder's tracker names, else the only one below it.

    Raises:
        SeveralError: there are several.
        ReadError: the tracker names no checkpoint.
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
    """Refuse a single found checkpoint if the folder has other weights that may belong to the same model.

    They lie deeper than was searched, or, beside a single file, are in an unknown format.
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
    """Find checkpoints in and below a folder other than the opened one, and a note on skipped entries."""
    mine = {folder_or_file for file in opened.files for folder_or_file in (file.path, *file.path.parents)}
    search = PathSearch(folder, follow_symlinks, mine, formats=formats).below()
    search.found += [path for path in search.damaged_saves(mine) if path not in search.found]
    return search.found, "; ".join(search.skipped(search.not_followed))
