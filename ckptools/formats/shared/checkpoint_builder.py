"""Build the `Checkpoint` that a format returns, and find the state of each of its files: read, seen, cut or damaged."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from ckptools.errors import CkptoolsError, ReadError, ReadErrorKind
from ckptools.files.opening import File, check_stays_inside, is_remote, read_json, reading, status_inside
from ckptools.files.remote.path import RemotePath
from ckptools.formats.options import Options
from ckptools.formats.rank_search.rank_names import COUNTS_STEPS
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact, GivenNames, ModuleOrder, RankFile, ReadCost
from ckptools.model.problems import NO_OBJECT, Code, Problem, worst_first
from ckptools.model.records import Rows
from ckptools.model.tensor import Rounded
from ckptools.option import spelled
from ckptools.pickles import reader
from ckptools.pickles.reader import Saved
from ckptools.rules.files import ANOTHER, FileClaims, misplaced, missing
from ckptools.text import KeyPath, plural
from ckptools.training_state import modules
from ckptools.training_state.sections import Section
from ckptools.training_state.steps import by_majority, find_step

# -- the step of a file from a small JSON beside it that has the same number in its name: `meta_000010.json` -----------
# nanochat saves `model_000010.pt`, `meta_000010.json` and `optim_000010_rank0.pt` of each rank; only the JSON states
# `step`. The number in the name is the step if both are equal. Source: nanochat/checkpoint_manager.py
# (`save_checkpoint`).

NUMBERED = re.compile(r"[A-Za-z]+_(\d{6,12})(?:_rank\d+)?\.pt")


def find_step_with_beside(path: Path, sections: tuple[Section, ...]) -> Fact:
    """The step of the checkpoint at a path by `find_step`, else by the JSON beside it."""
    step = find_step(path, sections)
    found = NUMBERED.fullmatch(path.name) if step.value is None else None
    return step if found is None else _stated(path.with_name(f"meta_{found[1]}.json"), int(found[1])) or step


def _stated(path: Path, number: int) -> Fact | None:
    with suppress(CkptoolsError):
        if path.is_file():
            check_stays_inside(path, path.parent)
            content = read_json(path)
            stated = content.get("step") if isinstance(content, Mapping) else None
            if type(stated) is int and stated == number:
                return Fact(number, ("file name", path.name))
    return None


# -- files that are cut short, read up to the cut: missing tensors are gaps, and the checkpoint is not whole -----------


class SalvagingReader:
    """Reads a torch.save file as the inert reader does, and a file that is cut short as far as it goes.

    Attributes:
        cut: files that were cut short, with their sizes in bytes.
    """

    def __init__(self) -> None:
        self.cut: dict[Path, int] = {}

    def __call__(self, path: Path) -> Saved:
        """Read one file.

        Raises:
            ReadError: it is damaged, or cut in its pickle.
        """
        saved = modules.read_file(path, salvage=True)
        if saved.cut:
            self.cut[path] = saved.nbytes
        return saved

    def judged(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with each file that this reader found cut marked as cut, and a problem for the file."""
        cut = [file for file in checkpoint.files if file.path in self.cut]
        if not cut:
            return checkpoint
        marked = {file.path: file._replace(status="cut") for file in cut}
        problems = [Problem(Code.FILE_CUT, self._words(file.path), file.rank, files=(file.path.name,)) for file in cut]
        files = Rows(marked.get(file.path, file) for file in checkpoint.files)
        return replace(checkpoint, files=files, problems=worst_first([*checkpoint.problems, *problems]))

    def _words(self, path: Path) -> str:
        nbytes = plural(self.cut[path], "byte")
        return f"{path.name} is cut short: {nbytes}; what is in front of the cut is read ({spelled('salvage', True)})"


# -- files that torch saved under the name of another ------------------------------------------------------------------
# The root folder of a torch.save archive keeps the name of the file that was written (`root_of`). The content of a file
# often fits every rank alike, above all flat partitions and random states, so that only this name shows a swap. Numbers
# of steps are not a claim, since a whole checkpoint may be renamed; nor is any name of a file whose content states its
# rank, by which it is judged.

NUMBER = re.compile(r"[0-9]+")


def archive_claims(saved: Saved, rank: int | None = None, tensor: str | None = None) -> FileClaims:
    """The claims of a torch.save file: its name, and the name under which it was saved, if that is of the same kind."""
    (stem, dot, suffix), name = saved.path.name.rpartition("."), saved.path.name
    of_a_kind = dot and not saved.claims and NUMBER.sub("#", stem) == NUMBER.sub("#", saved.root)
    other = name if _numbers(stem) == _numbers(saved.root) else saved.root + dot + suffix
    named = {"folder": str(saved.path.parent), "file": name}
    inside = {"file": other} if of_a_kind else {}
    return FileClaims(saved.path, rank, named, inside, verb="was saved as", tensor=tensor)


def _numbers(name: str) -> list[str]:
    return NUMBER.findall(COUNTS_STEPS.sub("", name))


# -- files -------------------------------------------------------------------------------------------------------------

MAX_FILES = 64
"""Up to this many remote files have their end read."""

KINDS: Mapping[ReadErrorKind, Code] = {
    "absent": Code.FILE_MISSING,
    "no access": Code.FILE_UNREADABLE,
    "cut": Code.FILE_CUT,
    "unfinished": Code.FILE_MISSING,
    "damaged": Code.FILE_CUT,
    "without object": Code.FILE_CUT,
    "contradicts": Code.FILE_CONTRADICTS,
}
"""Problem codes of files that cannot be read, or contradict the metadata, by the kind of fault."""


class Fault(NamedTuple):
    """Why one file of a checkpoint cannot be read, while the others can; the reason does not name the file."""

    reason: str
    kind: ReadErrorKind

    @classmethod
    def of(cls, error: ReadError, path: Path) -> Fault:
        """The fault that an error states; an error about another file names that file."""
        return cls(error.reason if error.path == path else str(error), error.kind)

    @property
    def status(self) -> Literal["cut", "bad"]:
        """Status in the list of files."""
        return "cut" if self.kind == "cut" else "bad"

    def problem(self, name: str, rank: int | None = None, tensor: str | None = None) -> Problem:
        """The fault as a problem; `name` is the file's name in the message."""
        found = NO_OBJECT if self.kind == "without object" else None
        files = (name.removesuffix(":"),)
        return Problem(KINDS[self.kind], f"{name} {self.reason}", rank, tensor, files=files, found=found)


Found = TypeVar("Found", bound="StatedFile")


@dataclass(slots=True)
class StatedFile:
    """A file that the metadata of a checkpoint names, found or missing.

    Attributes:
        rank: its rank; None if it belongs to several ranks.
        size: bytes; None when it is missing.
        modified: file time; None when it is missing.
        needed: bytes that it must have; 0 if the metadata does not state it.
        fault: why all of its content is refused.
    """

    path: Path
    rank: int | None
    size: int | None
    modified: float | None
    needed: int
    fault: Fault | None = None

    @classmethod
    def found(
        cls: type[Found], path: Path, folder: Path, rank: int | None, needed: int, follow_symlinks: bool
    ) -> Found:
        """Find a file; a local file without read permission is refused, remote ones are not tried one by one.

        Raises:
            ReadError: the system refuses to report on it.
            UnsafePathError: it is a link out of the folder, or not a regular file.
        """
        status = status_inside(path, folder, follow_symlinks)
        if status is None:
            return cls(path, rank, None, None, needed)
        fault = None
        if not is_remote(path):
            try:
                File(path).close()
            except ReadError as error:
                fault = Fault(error.reason, "no access")
        return cls(path, rank, status.st_size, status.st_mtime, needed, fault)

    def holds(self, end: int) -> bool:
        """Whether the file is present, reaches to byte `end`, and is not refused."""
        return self.size is not None and end <= self.size and self.fault is None

    @property
    def state(self) -> str:
        """The file's fault in a few words, or `whole`."""
        if self.size is None:
            return "missing"
        if self.fault is None:
            return "whole" if self.holds(self.needed) else "cut short"
        return "unreadable" if self.fault.kind == "no access" else "not the one that was saved"

    def listed(self, part: str = "", read: bool = True) -> RankFile:
        """The file as an entry of the checkpoint's list; `read` only if every value in it was read."""
        if self.size is None:
            return RankFile(self.path, self.rank, part, "missing", 0, None)
        whole: Literal["read", "seen"] = "read" if read else "seen"
        status = self.fault.status if self.fault else whole if self.holds(self.needed) else "cut"
        return RankFile(self.path, self.rank, part, status, self.size, self.modified)

    def problems(
        self, name: str, content: str, tensor: str | None = None, ranks: tuple[int, ...] = ()
    ) -> Iterator[Problem]:
        """Yield the problem of a file that is missing, cut or refused.

        Args:
            name: of the file in messages.
            content: names of the values that it should hold.
            tensor: the value that only this file has.
            ranks: its ranks, if there are several.
        """
        if self.size is None:
            yield missing(name, self.rank, tensor, ranks=ranks, contents=f", which holds {content}")
            return
        if self.fault is not None:
            kind, text, contents = KINDS[self.fault.kind], self.fault.reason, f"; it should hold {content}"
        elif not self.holds(self.needed):
            text, contents = f"is cut short: {self.size} bytes of at least {self.needed}", f"; it holds {content}"
            kind = Code.FILE_CUT
        else:
            return
        text, found, expected = f"{name} {text}{contents}", self.size, self.needed
        yield Problem(
            kind, text, self.rank, tensor, files=(name,), ranks=ranks, contents=contents, found=found, expected=expected
        )


def was_read(saved: Saved, rank: int | None = None, part: str = "") -> RankFile:
    """The `RankFile` of a file that was read in full."""
    return RankFile(saved.path, rank, part, "read", saved.nbytes, saved.modified)


def file_now(path: Path, rank: int | None, part: str, status: Literal["read", "seen", "cut", "bad"]) -> RankFile:
    """The `RankFile` of a file, with its present size and time.

    Raises:
        ReadError: it no longer exists.
    """
    with reading(path):
        found = path.stat()
    return RankFile(path, rank, part, status, found.st_size, found.st_mtime)


def looked_at(
    path: Path, rank: int | None, part: str, faults: dict[Path, Fault], files: int, read: bool = False
) -> RankFile:
    """The `RankFile` of a file that may no longer exist; the end of an unread file is checked, and its fault noted.

    With more than `MAX_FILES` remote files, only presence and size are checked: reading each end takes one or two
    requests.
    """
    status = path.stat() if path.exists() else None
    size, modified = (status.st_size, status.st_mtime) if status else (0, None)
    only_listed = isinstance(path, RemotePath) and files > MAX_FILES and size > 0
    if path not in faults and not read and not only_listed:
        try:
            reader.probe(path)
        except ReadError as error:
            faults[path] = Fault.of(error, path)
    if path in faults:
        return RankFile(path, rank, part, faults[path].status if size else "cut", size, modified)
    return RankFile(path, rank, part, "read" if read else "listed" if only_listed else "seen", size, modified)


class SavedFiles:
    """The torch.save files of one checkpoint, not all of which are read: their content, and the faults of others.

    Attributes:
        saved: the content of the files that were read.
        faults: why other files could not be read.
    """

    def __init__(self, read: Callable[[Path], Saved]) -> None:
        self._read = read
        self.saved: dict[Path, Saved] = {}
        self.faults: dict[Path, Fault] = {}

    def read(self, path: Path, must: bool = False) -> Saved | None:
        """Read a file, unless that was tried before; None, and its fault is kept, if it cannot be read.

        Raises:
            ReadError: it cannot be read, and `must` be.
        """
        if path not in self.saved and path not in self.faults:
            try:
                self.saved[path] = self._read(path)
            except ReadError as error:
                if must:
                    raise
                self.faults[path] = Fault.of(error, path)
        return self.saved.get(path)

    def listed(self, path: Path, rank: int | None, part: str, files: int) -> RankFile:
        """The file as an entry of the checkpoint's list, one of `files`; the end of an unread file is checked."""
        if path in self.saved:
            return was_read(self.saved[path], rank, part)
        return looked_at(path, rank, part, self.faults, files)


class FileSet:
    """The files of a checkpoint, or of a part of it: each is listed once, as read, missing, cut or damaged.

    Attributes:
        path: the path that the user named; an error in this file is raised.
        files: the files, in the order in which they were added.
        problems: of missing, cut and damaged files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: list[RankFile] = []
        self.problems: list[Problem] = []

    def add_file(self, path: Path, rank: int | None = None, part: str = "") -> None:
        """List a file that was read, with its present size and time.

        Raises:
            ReadError: it no longer exists.
        """
        self.files.append(file_now(path, rank, part, "read"))

    def add_fault(
        self,
        path: Path,
        error: ReadError,
        rank: int | None = None,
        part: str = "",
        *,
        name: str = "",
        tensor: str | None = None,
    ) -> None:
        """List a file that cannot be read, with its problem; the other files of the checkpoint can.

        Args:
            path: the file.
            error: why it cannot be read.
            rank: its rank.
            part: the part of the checkpoint in it.
            name: of the file in messages; its own by default.
            tensor: the part of the tree that only this file has.

        Raises:
            ReadError: it is the file that the user named, or no longer exists.
        """
        if path == self.path:
            raise error
        fault = Fault.of(error, path)
        self.problems.append(fault.problem(name or path.name, rank, tensor))
        self.files.append(file_now(path, rank, part, fault.status))

    def add_listed(self, file: RankFile, faults: Mapping[Path, Fault], name: str = "") -> None:
        """List a file that was read or checked, with the problem of its fault; messages call it `name`."""
        self.files.append(file)
        if file.path in faults:
            self.problems.append(faults[file.path].problem(name or file.path.name, file.rank))

    def add_missing(
        self,
        path: Path,
        rank: int | None = None,
        part: str = "",
        *,
        name: str = "",
        tensor: str | None = None,
        more: str = "",
    ) -> None:
        """List a missing file, with its problem; `more` continues the message, other arguments as in `add_fault`."""
        self.files.append(RankFile(path, rank, part, "missing", 0, None))
        self.problems.append(missing(name or path.name, rank, tensor, more=more))


# -- the builder -------------------------------------------------------------------------------------------------------


class RankDifferences(NamedTuple):
    """Values that differ between ranks: values that may differ, and values that should not.

    Attributes:
        tree: the ranks' tree, with the lowest rank's tensor if each rank has its own.
        problems: values and tensors that should be equal on all ranks but differ.
        differing: key paths of values and tensors that may differ, and do.
        per_rank: by key path each rank's value: sections that are each rank's own, and differing values elsewhere.
        unequal: the same for values that all ranks should share, that only some ranks have, or that are foreign
            objects with other contents.
    """

    tree: Any
    problems: tuple[Problem, ...]
    differing: tuple[KeyPath, ...]
    per_rank: Mapping[KeyPath, Mapping[int, Any]]
    unequal: Mapping[KeyPath, Mapping[int, Any]]


class CheckpointBuilder(FileSet):
    """Collects the findings of a format while it opens a checkpoint, and builds the `Checkpoint`.

    A format creates it before it reads anything, adds its findings, and passes the rest to `checkpoint`. `names` are
    the dotted names that the files mention; the other attributes are those of `FileSet` and of `RankDifferences`.
    """

    def __init__(self, format: str, path: Path) -> None:
        super().__init__(path)
        self.format = format
        self.names: dict[str, None] = {}
        self.differing: list[KeyPath] = []
        self.per_rank: dict[KeyPath, Mapping[int, Any]] = {}
        self.unequal: dict[KeyPath, Mapping[int, Any]] = {}
        self.files_read = self.bytes_read = 0
        self._started = time.perf_counter()

    def add_read(self, files: int, nbytes: int, names: Iterable[str] = ()) -> None:
        """Count files that were read in full, the bytes that were read, and the names that they mention."""
        self.files_read += files
        self.bytes_read += nbytes
        self.names |= dict.fromkeys(names)

    def add_saved(self, saved: Iterable[Saved], placed: bool = True) -> None:
        """Count torch.save files that were read, and compare the names under which they were saved.

        `placed` means that names determine a file's place; stages of a pipeline state it in their content. A file that
        is already reported as misplaced by its content is not reported again.
        """
        read = list(saved)
        placed_anew = (p for p in self.problems if p.kind is Code.STRAY_FILE and p.found not in (None, ANOTHER["rank"]))
        reported = {name for problem in placed_anew for name in problem.files}
        claims = (row._replace(inside={}) if str(row) in reported else row for row in map(archive_claims, read))
        self.problems += misplaced(claims, by_content=not placed, sure=False)
        for one in read:
            self.add_read(1, one.bytes_read, one.names)

    def read_beside(self, path: Path, options: Options, tensor: str | None = None) -> Saved | None:
        """Read and list a torch.save file that alone has a part of the checkpoint; None if it cannot be read.

        Raises:
            ReadError: it is the file that the user named.
            UnsafePathError: it is a link out of its folder.
        """
        options.check_link(path, path.parent)
        try:
            saved = options.read_file(path)
        except ReadError as error:
            self.add_fault(path, error, name=f"{path.name}:", tensor=tensor)
            return None
        self.files.append(was_read(saved))
        self.add_saved([saved])
        return saved

    def add_rank_values(self, found: RankDifferences | CheckpointBuilder) -> None:
        """Add the values that each rank has for itself, and differing values that should be equal."""
        self.problems += found.problems
        self.differing += found.differing
        self.per_rank |= found.per_rank
        self.unequal |= found.unequal

    def add(self, other: CheckpointBuilder) -> None:
        """Add all findings of another part, behind the present ones."""
        self.add_rank_values(other)
        self.add_read(other.files_read, other.bytes_read, other.names)

    def checkpoint(
        self,
        *,
        name: str,
        saved_as: str,
        tree: Any,
        files: Iterable[RankFile] | None = None,
        world_size: Fact,
        step: Fact,
        module_order: ModuleOrder,
        bytes_expected: int | None,
        all_ranks: bool = True,
        assumed_names: Iterable[str] = (),
        names_given: GivenNames | None = None,
        rounded: Iterable[Rounded] = (),
        stated_digests: Mapping[Path, str] | None = None,
        in_parts: bool = False,
        text_keys: bool = False,
    ) -> Checkpoint:
        """Build the checkpoint from the findings; `Checkpoint` explains the arguments.

        `files` are those of the builder by default.
        """
        return Checkpoint(
            path=self.path,
            name=name,
            format=self.format,
            saved_as=saved_as,
            tree=tree,
            files=Rows(self.files if files is None else files),
            world_size=world_size,
            step=by_majority(step, self.unequal),
            module_order=module_order,
            problems=worst_first(self.problems),
            names=tuple(self.names),
            all_ranks=all_ranks,
            differing=tuple(self.differing),
            per_rank=self.per_rank,
            unequal=self.unequal,
            bytes_expected=bytes_expected,
            cost=ReadCost(self.files_read, time.perf_counter() - self._started, self.bytes_read),
            assumed_names=frozenset(assumed_names),
            names_given=names_given,
            rounded=tuple(rounded),
            stated_digests=stated_digests or {},
            in_parts=in_parts,
            text_keys=text_keys,
        )


def in_form(saved_as: str, form: str) -> str:
    """Append a file's form, if it is not a plain zip archive, to `saved_as`."""
    return f"{saved_as} ({form})" if form else saved_as
