"""Builder of the `Checkpoint` that a format returns, and the state of each of its files: read, seen, cut or damaged."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ckptools.errors import ReadError, ReadErrorKind
from ckptools.files.opening import reading
from ckptools.files.remote.path import RemotePath
from ckptools.formats.shared.swapped_files import swapped_files
from ckptools.model.checkpoint import Checkpoint, Fact, GivenNames, ModuleOrder, RankFile, ReadCost
from ckptools.model.problems import Code, Problem, worst_first
from ckptools.model.tensor import Rounded
from ckptools.model.tree import KeyPath
from ckptools.pickles import reader
from ckptools.pickles.reader import Saved
from ckptools.training_state.steps import by_majority


class RankDifferences(NamedTuple):
    """Values that differ between ranks: those that may, and those that should not.

    Attributes:
        tree: the ranks' tree, with the lowest rank's tensor where each rank has its own.
        problems: values and tensors that should be the same on all ranks and are not.
        differing: key paths of values and tensors that may differ, and do.
        per_rank: by key path each rank's value: sections that are each rank's own, and differing values elsewhere.
        unequal: the same for other values: where all should have one value, where only some have any, where a foreign
            object holds other values.
    """

    tree: Any
    problems: tuple[Problem, ...]
    differing: tuple[KeyPath, ...]
    per_rank: Mapping[KeyPath, Mapping[int, Any]]
    unequal: Mapping[KeyPath, Mapping[int, Any]]


class CheckpointBuilder:
    """Collects the findings of a format while it opens a checkpoint, and builds the `Checkpoint`.

    A format makes one before it reads anything, adds what it finds, and states what is its own in `checkpoint`.
    `names` are the dotted names that the files mention; the other attributes are those of `RankDifferences`.
    """

    def __init__(self, format: str, path: Path) -> None:
        self.format, self.path = format, path
        self.problems: list[Problem] = []
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
        """Count torch.save files that were read, and note those that were saved as others; see `swapped_files`."""
        read = list(saved)
        self.problems += swapped_files(read, placed)
        for one in read:
            self.add_read(1, one.bytes_read, one.names)

    def add_rank_values(self, found: RankDifferences | CheckpointBuilder) -> None:
        """Note what ranks have for themselves, and what they should not."""
        self.problems += found.problems
        self.differing += found.differing
        self.per_rank |= found.per_rank
        self.unequal |= found.unequal

    def add(self, other: CheckpointBuilder) -> None:
        """Add everything that was found of another part, behind what was found here."""
        self.add_rank_values(other)
        self.add_read(other.files_read, other.bytes_read, other.names)

    def checkpoint(
        self,
        *,
        name: str,
        saved_as: str,
        tree: Any,
        files: Iterable[RankFile],
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
        """The checkpoint, with what was found and what opening it cost; see `Checkpoint` for what is given."""
        return Checkpoint(
            path=self.path,
            name=name,
            format=self.format,
            saved_as=saved_as,
            tree=tree,
            files=tuple(files),
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
    """Add to how something was saved what it is beside a zip archive."""
    return f"{saved_as} ({form})" if form else saved_as


# -- files ------------------------------------------------------------------------------------------------------------


MAX_FILES = 64
"""Up to this many files in a store, the end of each is read."""

KINDS: Mapping[ReadErrorKind, Code] = {
    "absent": Code.FILE_MISSING,
    "no access": Code.FILE_UNREADABLE,
    "cut": Code.FILE_CUT,
    "unfinished": Code.FILE_MISSING,
    "damaged": Code.FILE_CUT,
}
"""Problem codes of files that cannot be read, by the kind of error."""


class Fault(NamedTuple):
    """Why one file of a checkpoint cannot be read, while the others can; the reason does not name the file."""

    reason: str
    kind: ReadErrorKind

    @classmethod
    def of(cls, error: ReadError, path: Path) -> Fault:
        """Return the fault that an error states; an error about another file names that file."""
        return cls(error.reason if error.path == path else str(error), error.kind)

    @property
    def status(self) -> Literal["cut", "bad"]:
        """Status in the list of files."""
        return "cut" if self.kind == "cut" else "bad"

    def problem(self, name: str, rank: int | None = None, tensor: str | None = None) -> Problem:
        """Return the fault as a problem; `name` is the file's name in the message."""
        return Problem(KINDS[self.kind], f"{name} {self.reason}", rank, tensor)


def was_read(saved: Saved, rank: int | None = None, part: str = "") -> RankFile:
    """The `RankFile` of a file that was read in full."""
    return RankFile(saved.path, rank, part, "read", saved.nbytes, saved.modified)


def file_now(path: Path, rank: int | None, part: str, status: Literal["read", "cut", "bad"]) -> RankFile:
    """The `RankFile` of a file, with the size and time that it has now.

    Raises:
        ReadError: it is gone.
    """
    with reading(path):
        found = path.stat()
    return RankFile(path, rank, part, status, found.st_size, found.st_mtime)


def looked_at(
    path: Path, rank: int | None, part: str, faults: dict[Path, Fault], files: int, read: bool = False
) -> RankFile:
    """Return the `RankFile` of a file that may be gone; the fault of one that was not read is looked for and noted.

    Of more than `MAX_FILES` files in a store only the presence and size are known: reading each end takes one or two
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
