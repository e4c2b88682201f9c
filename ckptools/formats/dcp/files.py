"""The files of a DCP folder: its metadata, and the data files that the metadata names.

`__{rank}_{n}.distcp`, where n counts the files of a rank: one per writer thread, or one per item. The rank that wrote
them is the only rank that DCP names. `.metadata` is renamed from `.metadata.tmp` when everything else is written; a
save without collectives leaves `__{rank}.metadata` of every rank instead. Source: torch/distributed/checkpoint/
filesystem.py.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.last_write import UNFINISHED
from ckptools.files.location import check_stays_inside, is_remote
from ckptools.files.opening import File, reading
from ckptools.formats.shared.several import several
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Code, Problem
from ckptools.text import few
from ckptools.training_state.steps import NAMES

METADATA = ".metadata"
OF_RANK = re.compile(r"__(\d{1,7})\.metadata")
DATA = re.compile(r"__(\d{1,7})_\d+\.distcp")

MAX_NAMED = 3
"""A message lists this many names, and counts the others."""


def rank_of(file: str) -> int | None:
    """The rank that wrote a file, by its name; None for other names."""
    found = DATA.fullmatch(file.rpartition("/")[2])
    return int(found[1]) if found else None


def by_rank(file: str) -> tuple[int, list[int], str]:
    """Sort key of data files: rank, number, name."""
    return -1 if (rank := rank_of(file)) is None else rank, [int(n) for n in re.findall(r"\d{1,18}", file)], file


def metadata_files(folder: Path, follow_symlinks: bool) -> list[tuple[Path, int | None]]:
    """The metadata of a DCP folder: the one of all ranks, or else each rank's with its rank.

    Raises:
        ReadError: there is none.
        UnsafePathError: one is a link out of the folder.
    """
    names = names_in(folder)
    ranks = sorted((int(found[1]), name) for name in names if (found := OF_RANK.fullmatch(name)))
    files: list[tuple[Path, int | None]] = [(folder / name, rank) for rank, name in ranks]
    if METADATA in names:
        files = [(folder / METADATA, None)]
    if not files:
        raise ReadError(folder, _without_metadata(names), "unfinished")
    for path, _ in files if not follow_symlinks else ():
        check_stays_inside(path, folder)
    return files


def names_in(folder: Path) -> set[str]:
    """The names of what lies in a folder."""
    with reading(folder):
        return {path.name for path in folder.iterdir()}


def _without_metadata(names: set[str]) -> str:
    if any(name.endswith(".metadata.tmp") for name in names):
        return ".metadata.tmp is here, .metadata is not: the save has not ended, or it died"
    files = sum(name.endswith(".distcp") for name in names)
    what = "1 .distcp file" if files == 1 else f"{files} .distcp files"
    return f"{what} without .metadata, the only list of what they hold, which DCP writes last: {UNFINISHED}"


def lacks_metadata(folder: Path) -> str:
    """The message on a part of a checkpoint that is a DCP folder without its metadata."""
    text = f"no file {folder.name}/{METADATA}, the only list of what the .distcp files there hold"
    return f"{text}, which DCP writes last: {UNFINISHED}"


def looks_like_dcp(folder: Path) -> bool:
    """Whether a folder holds metadata or data of DCP."""
    return any(_is_dcp_name(path.name) for path in folder.iterdir())


def _is_dcp_name(name: str) -> bool:
    return name in (METADATA, ".metadata.tmp") or bool(OF_RANK.fullmatch(name) or DATA.fullmatch(name))


def dcp_folder_of(path: Path) -> Path | None:
    """The DCP folder of a path: itself, the folder of a file, or the only step of a run.

    Raises:
        UsageError: a run folder holds several.
    """
    if not path.is_dir():
        return path.parent if path.is_file() and _is_dcp_name(path.name) else None
    if looks_like_dcp(path):
        return path
    steps = [child for child in _steps(path) if looks_like_dcp(child)]
    if len(steps) > 1:
        raise several(path, steps)
    return steps[0] if steps else None


def _steps(folder: Path) -> list[Path]:
    """Subfolders named by a step, in the order of steps, without links to them."""
    named = [(NAMES.findall(p.name), p) for p in folder.iterdir() if p.is_dir() and not p.is_symlink()]
    return [path for found, path in sorted(named, key=lambda n: (int((n[0] or [0])[-1]), n[1].name)) if found]


class FileFault(NamedTuple):
    """Why the whole content of a data file is refused, even where items look right.

    Attributes:
        kind: the problem code.
        reason: the end of a sentence that begins with the file's name.
    """

    kind: Code
    reason: str

    @classmethod
    def contradicts(cls, why: str) -> FileFault:
        """Return the fault of a file that contradicts the metadata."""
        return cls(Code.FILE_CONTRADICTS, f"is not the file that the metadata describes: {why}")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A `.distcp` file that the metadata names, found or missing.

    Attributes:
        path: in the folder.
        rank: who wrote it.
        size: bytes; None when it is missing.
        modified: file time; None when it is missing.
        needed: bytes that it must have.
        fault: why all of its content is refused.
    """

    path: Path
    rank: int | None
    size: int | None
    modified: float | None
    needed: int
    fault: FileFault | None = None

    def holds(self, end: int) -> bool:
        """Whether the file is here, reaches to byte `end`, and is not refused."""
        return self.size is not None and end <= self.size and self.fault is None

    @property
    def state(self) -> str:
        """Its fault in a few words, or `whole`."""
        if self.size is None:
            return "missing"
        if self.fault is None:
            return "cut short" if self.size < self.needed else "whole"
        return "unreadable" if self.fault.kind is Code.FILE_UNREADABLE else "not the one that was saved"

    def rank_file(self, all_seen: bool) -> RankFile:
        """Return the file for the checkpoint's list; it counts as read where every item was looked at."""
        if self.size is None:
            return RankFile(self.path, self.rank, "", "missing", 0, None)
        status: Literal["read", "seen", "cut", "bad"] = "read" if all_seen else "seen"
        status = "cut" if self.size < self.needed else status
        status = "bad" if self.fault else status
        return RankFile(self.path, self.rank, "", status, self.size, self.modified)


def find_data_files(folder: Path, needed: Mapping[str, int], follow_symlinks: bool) -> dict[str, DataFile]:
    """Find the data files that the metadata names; `needed` has the bytes that each must have.

    Raises:
        UnsafePathError: one is a link out of the folder, or no regular file.
    """
    return {name: _data_file(folder, name, n, follow_symlinks) for name, n in needed.items()}


def _data_file(folder: Path, name: str, needed: int, follow_symlinks: bool) -> DataFile:
    path = folder / name
    try:
        status = path.lstat()
        if not follow_symlinks and (stat.S_ISLNK(status.st_mode) or "/" in name):
            _check_inside(path, folder)
        if stat.S_ISLNK(status.st_mode):
            status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return DataFile(path, rank_of(name), None, None, needed)
    except OSError as error:
        raise ReadError(path, (error.strerror or "cannot be looked at").lower()) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnsafePathError(path, "not a regular file")
    return DataFile(path, rank_of(name), status.st_size, status.st_mtime, needed, _refused(path))


def _refused(path: Path) -> FileFault | None:
    """The fault of a local file without read permission; files in a store are not tried one by one."""
    if is_remote(path):
        return None
    try:
        File(path).close()
    except ReadError as error:
        return FileFault(Code.FILE_UNREADABLE, error.reason)
    return None


def _check_inside(path: Path, folder: Path) -> None:
    """Refuse a link between `folder` and `path` that leads out of the folder."""
    for step in (path, *path.parents):
        if step == folder:
            return
        check_stays_inside(step, folder)


def with_faults(files: Mapping[str, DataFile], faults: Mapping[Path, FileFault]) -> dict[str, DataFile]:
    """The files, with the faults that were found in them."""
    return {name: replace(f, fault=f.fault or faults.get(f.path)) for name, f in files.items()}


def check_data_files(files: Mapping[str, DataFile], names_in_file: Callable[[str], list[str]]) -> Iterable[Problem]:
    """Problems of data files that are missing, cut, or from another save, with the names that they should hold."""
    for name, file in files.items():
        if file.state == "whole":
            continue
        lost = few(names_in_file(name), MAX_NAMED)
        if file.size is None:
            yield Problem(Code.FILE_MISSING, f"no file {name}, which holds {lost}", file.rank)
        elif file.fault is not None:
            yield Problem(file.fault.kind, f"{name} {file.fault.reason}; it should hold {lost}", file.rank)
        else:
            text = f"{name} is cut short: {file.size} bytes of at least {file.needed}; it holds {lost}"
            yield Problem(Code.FILE_CUT, text, file.rank)


def other_data_files(folder: Path, named: Iterable[str]) -> tuple[dict[str, DataFile], list[str]]:
    """Data files that the metadata does not name: empty ones, of ranks that had nothing to write, and strays.

    Raises:
        ReadError: one cannot be looked at.
    """
    names = sorted(name for name in names_in(folder) - set(named) if DATA.fullmatch(name))
    found = {name: _data_file(folder, name, 0, follow_symlinks=True) for name in names}
    empty = {name: file for name, file in found.items() if file.size == 0}
    return empty, [name for name in names if name not in empty]


def check_strays(stray: Sequence[str]) -> Iterable[Problem]:
    """Problems of data files from another save, or another rank, in the same folder."""
    if stray:
        listed = few(stray, MAX_NAMED)
        text = f"{listed}: not named by the metadata, perhaps left over from another save into this folder"
        yield Problem(Code.STRAY_FILE, text, rank_of(stray[0]), severity="warning")
