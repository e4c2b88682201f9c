"""What is known of a checkpoint's file that is here: it was read, looked at from its end, or found to be damaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from ckptools.errors import ReadError, ReadErrorKind
from ckptools.files.opening import reading
from ckptools.files.remote_path import RemotePath
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Code, Problem
from ckptools.pickles import reader
from ckptools.pickles.reader import Saved

MAX_FILES = 64
"""Files of a checkpoint in a store up to which the end of each is looked at."""

KINDS: Mapping[ReadErrorKind, Code] = {
    "absent": Code.FILE_MISSING,
    "no access": Code.FILE_UNREADABLE,
    "cut": Code.FILE_CUT,
    "damaged": Code.FILE_CUT,
}
"""The kind of problem that a file which cannot be read is."""


class Fault(NamedTuple):
    """Why one file of a checkpoint cannot be read, while the others can.

    Attributes:
        reason: one line, without the file's name.
        kind: what kind of error it is.
    """

    reason: str
    kind: ReadErrorKind

    @classmethod
    def of(cls, error: ReadError, path: Path) -> Fault:
        """What an error says of the file at `path`; one about another file names that."""
        return cls(error.reason if error.path == path else str(error), error.kind)

    @property
    def status(self) -> Literal["cut", "bad"]:
        """How its file is listed: it ends too early, or is wrong in another way."""
        return "cut" if self.kind == "cut" else "bad"

    def problem(self, name: str, rank: int | None = None, tensor: str | None = None) -> Problem:
        """The problem that it is; `name` is what the file is called in it."""
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
    """The `RankFile` of a file whose content was not read: by its end, or its fault.

    Of many files in a store it is only known that they are there, and how large they are: a look at each would be a
    request or two.

    Args:
        path: the file; it may be gone by now.
        rank: whose it is.
        part: what of a rank it holds.
        faults: what is known to be wrong with files; what is found out here is noted in it.
        files: how many the checkpoint has.
        read: whether it was read, so that there is nothing to look for.
    """
    status = path.stat() if path.exists() else None
    size, modified = (status.st_size, status.st_mtime) if status else (0, None)
    only_listed = isinstance(path, RemotePath) and files > MAX_FILES and size > 0
    fault = faults.get(path) or (None if read or only_listed else _look(path))
    if fault is not None:
        faults[path] = fault
        return RankFile(path, rank, part, fault.status if size else "cut", size, modified)
    return RankFile(path, rank, part, "read" if read else "listed" if only_listed else "seen", size, modified)


def _look(path: Path) -> Fault | None:
    """What is wrong with a file, as far as its directory or header tells."""
    try:
        reader.probe(path)
    except ReadError as error:
        return Fault.of(error, path)
    return None
