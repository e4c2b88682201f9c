"""The files of a snapshot: presence, expected length, and the values lost with one.

A batch has the tensors of one rank back to back from its first byte on, another file one tensor or one object. So the
length of each file of raw elements is known, but nothing else: there are no checksums. Source:
torchsnapshot/batcher.py, io_preparer.py (`get_storage_path`), storage_plugins/fs.py.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.location import check_stays_inside
from ckptools.formats.torchsnapshot.manifest import StoredBox
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Code, Problem
from ckptools.text import few


@dataclass
class StoredFile:
    """A file that the manifest names.

    Attributes:
        path: where it is, or should be.
        size: bytes; None when it is missing.
        modified: its time.
        needed: bytes that its tensors take; None for a file that torch.save wrote.
        ranks: those whose entries name it.
        holds: the names of its values.
        bad: the fault of its content, once it was read.
    """

    path: Path
    size: int | None
    modified: float | None
    needed: int | None = None
    ranks: set[int] = field(default_factory=set)
    holds: list[str] = field(default_factory=list)
    bad: Problem | None = None

    @property
    def is_sound(self) -> bool:
        """Whether it is here and long enough; a file that is not is never read."""
        return self.size is not None and self.bad is None and self.size >= (self.needed or 0)

    @property
    def rank(self) -> int | None:
        """The rank whose values it holds; None where several share it."""
        return next(iter(self.ranks)) if len(self.ranks) == 1 else None


class StoredFiles:
    """Looks up the files of a snapshot, each once."""

    def __init__(self, folder: Path, follow_symlinks: bool) -> None:
        self.folder, self.follow_symlinks = folder, follow_symlinks
        self.files: dict[str, StoredFile] = {}
        self.needed: dict[str, int] = {}

    def find(self, location: str, rank: int, name: str) -> StoredFile:
        """Look up the file of a rank's entry by its location and name.

        Raises:
            ReadError: it cannot be looked at.
            UnsafePathError: it is a link out of the folder, or no regular file.
        """
        if location not in self.files:
            self.files[location] = replace(self._looked_at(location), needed=self.needed.get(location))
        file = self.files[location]
        file.ranks.add(rank)
        file.holds.append(name)
        return file

    def expect(self, stored: StoredBox) -> None:
        """Record that a piece of raw elements lies in a file, which must reach to its end."""
        end = stored.span[1] if stored.span else stored.nbytes
        self.needed[stored.location] = max(self.needed.get(stored.location, 0), end)

    def _looked_at(self, location: str) -> StoredFile:
        path = self.folder / location
        if not self.follow_symlinks:
            for step in (path, *path.parents):
                if step == self.folder:
                    break
                check_stays_inside(step, self.folder)
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return StoredFile(path, None, None)
        except OSError as error:
            raise ReadError(path, (error.strerror or "cannot be looked at").lower()) from error
        if not stat.S_ISREG(found.st_mode):
            raise UnsafePathError(path, "not a regular file")
        return StoredFile(path, found.st_size, found.st_mtime)

    def listed(self) -> Iterator[RankFile]:
        """Every file, for the checkpoint's list."""
        for location, file in self.files.items():
            part = location.split("/")[0]
            if file.size is None:
                yield RankFile(file.path, file.rank, part, "missing", 0, None)
                continue
            status: Literal["read", "cut"] = "read" if file.is_sound else "cut"
            yield RankFile(file.path, file.rank, part, status, file.size, file.modified)

    def problems(self) -> Iterator[Problem]:
        """Files that are missing, cut, or longer than their content."""
        for location, file in self.files.items():
            content, ranks = few(list(dict.fromkeys(file.holds)), 2), tuple(sorted(file.ranks))
            if file.size is None:
                # A lost tensor leaves a gap, a lost object does not.
                name = file.holds[0] if file.needed is None else None
                text = f"no file {location}, which holds {content}"
                yield Problem(Code.FILE_MISSING, text, file.rank, name, ranks=ranks)
            elif file.needed is not None and file.size < file.needed:
                text = f"{location} is cut short: {file.size} bytes of {file.needed}; it holds {content}"
                yield Problem(Code.FILE_CUT, text, file.rank, ranks=ranks)
            elif file.needed is not None and file.size > file.needed:
                text = f"{location} has {file.size} bytes, and what lies in it takes {file.needed}: it is another file"
                yield Problem(Code.METADATA_CONTRADICTS, text, file.rank, ranks=ranks)
            if file.bad is not None:
                yield file.bad
