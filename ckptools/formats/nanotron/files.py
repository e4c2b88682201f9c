"""The files of a Nanotron checkpoint: what is where, of which rank, and which of them cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError, UnknownFormatError
from ckptools.files.json_file import read_json
from ckptools.files.location import check_stays_inside
from ckptools.files.opening import reading
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault, file_now
from ckptools.model.checkpoint import RankFile

METADATA = "checkpoint_metadata.json"
CONFIG = "optimizer_config.json"
MAX_RANKS = 1 << 12
MAX_DEPTH = 32
"""Folders of the names of modules, one in the other."""


def _files_in(folder: Path, suffix: str, depth: int) -> Iterator[Path]:
    """The files with a suffix in and below a folder; none where it does not exist."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_file() and path.name.endswith(suffix):
            yield path
        elif depth and not path.is_symlink():
            yield from _files_in(path, suffix, depth - 1)


class NanotronFiles:
    """A checkpoint's files while it is opened, with what is found on the way.

    Attributes:
        tp, pp, dp: numbers of tensor-parallel ranks, pipeline stages and data-parallel ranks.
    """

    def __init__(self, builder: CheckpointBuilder, folder: Path, options: Options) -> None:
        self.builder, self.problems = builder, builder.problems
        self.folder, self.options = folder, options
        found = read_json(folder / METADATA)
        if not isinstance(found, dict):
            raise ReadError(folder / METADATA, f"holds a {type(found).__name__}, expected sizes and steps")
        self.metadata: dict[Any, Any] = found
        own = (p for p in (folder / METADATA, folder / "optimizer" / CONFIG) if p.is_file())
        self.files: list[RankFile] = [file_now(p, None, p.name, "read") for p in own]
        self.faults: dict[Path, Fault] = {}
        self.tp, self.pp, self.dp = self._size("tp"), 1, self._size("dp")

    def _size(self, key: str) -> int:
        size = self.metadata.get(key)
        if type(size) is not int or not 0 < size <= MAX_RANKS:
            text = f"a Nanotron checkpoint whose {METADATA} states no number of ranks under {key}"
            raise UnknownFormatError(self.builder.path, text)
        return size

    def has_stages(self, stages: int) -> None:
        """Note the number of pipeline stages in a file's name: nothing else states it."""
        self.pp = max(self.pp, min(stages, MAX_RANKS))

    def below(self, part: str, suffix: str) -> list[Path]:
        """The files of a part, in the order of their names.

        Raises:
            UnsafePathError: one is a link out of the folder.
        """
        with reading(self.folder):
            found = sorted(_files_in(self.folder / part, suffix, MAX_DEPTH))
        for path in () if self.options.follow_symlinks else found:
            check_stays_inside(path, self.folder)
        return found

    def part(self, path: Path) -> str:
        """The path of a file below the folder."""
        return path.relative_to(self.folder).as_posix()

    def rank(self, place: tuple[int, int] | None, dp: int = 0) -> int | None:
        """The global rank: pipeline stages, then data-parallel, then tensor-parallel ranks, which vary fastest."""
        return None if place is None else (place[0] * self.dp + dp) * self.tp + place[1]

    def add_fault(self, path: Path, error: ReadError, rank: int | None) -> None:
        """Note a file that cannot be read.

        Raises:
            ReadError: it is the one that was named.
        """
        if path == self.builder.path:
            raise error
        self.faults[path] = fault = Fault.of(error, path)
        self.files.append(file_now(path, rank, self.part(path), fault.status))
