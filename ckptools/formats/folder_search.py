"""The search through a folder: its entries, then those of the folders in it, within one limit for every command.

`only_checkpoint` finds the one that `inspect RUN/` opens, `ls` lists all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from ckptools.errors import ReadError
from ckptools.files.location import leads_out, real_path
from ckptools.formats.rank_search.rank_names import COMPRESSED, COUNTS_STEPS, is_temporary
from ckptools.formats.shared.save_order import Save
from ckptools.formats.shared.several import MAX_ENTRIES
from ckptools.text import few, plural

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".tgz", ".nemo", ".safetensors")
"""Suffixes of single files of weights; a damaged one counts by its name."""

MAX_DEPTH = 4
"""Folders this far below the first one are entered, to see whether they are checkpoints."""

MAX_FOLDERS = 20_000
"""Most folders that are entered."""


@dataclass
class FolderSearch:
    """A walk through a folder and those below it; what each of them holds is for `look_into`, of a subclass.

    Attributes:
        root: where it begins.
        known: files and folders that are part of what was found already: they are ignored.
        temporary: left-overs of interrupted writes, by their names.
        not_followed: links out of the folder that may lead to a checkpoint.
        notes: what else was skipped, a line each.
        unknown: files by names of weights that are of no known format, and folders in which nothing was found.
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
        """Look into a folder and, by `enter_each`, into those in it; `depth` is how much further down that goes."""
        raise NotImplementedError

    def enter(self, folder: Path, depth: int = MAX_DEPTH) -> None:
        """Look into a folder, once if links lead to it too.

        Raises:
            OSError: it cannot be listed.
        """
        real = real_path(folder)
        if real not in self._entered:
            self._entered.add(real)
            self.look_into(folder, depth)

    def enter_each(self, entries: Sequence[Path], depth: int) -> None:
        """Look into the folders among some entries; a note names one that cannot be listed."""
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
        """The entries of a folder, without known and hidden ones and links that are not followed."""
        listed = sorted(islice(folder.iterdir(), MAX_ENTRIES + 1))
        if len(listed) > MAX_ENTRIES:
            name = self.name(folder)
            self.notes.append(f"{name} holds more than {MAX_ENTRIES} entries; the others were not looked at")
        new = [path for path in listed if path not in self.known]
        self.temporary += [path for path in new if is_temporary(path.name)]
        shown = (path for path in new if not path.name.startswith("."))
        return [path for path in shown if not path.is_symlink() or self._is_followed(path)]

    def damaged_saves(self, found: Iterable[Path]) -> list[Path]:
        """The unknown files and folders whose names differ from that of a found checkpoint in numbers alone.

        A save that died leaves an empty folder, or a file of zeros. A folder counts also where it is called as the
        folder of a step around a checkpoint: `global_step_6` beside `global_step_3/actor`.
        """
        if not self.unknown:
            return []
        known = {Save(path).pattern for one in found for path in (one, *self._step_folders(one))}
        return [path for path in self.unknown if Save(path).pattern in known]

    def _step_folders(self, checkpoint: Path) -> Iterator[Path]:
        above = (path for path in checkpoint.parents if path != self.root and path.is_relative_to(self.root))
        return (path for path in above if COUNTS_STEPS.fullmatch(path.name))

    def _is_followed(self, link: Path) -> bool:
        """Whether to follow a link: one that leads out of the root, and not to a folder above it."""
        if not leads_out(link, self.root) or real_path(self.root).is_relative_to(real_path(link)):
            return False
        if not self.follow_symlinks and (link.is_dir() or is_named_so(link)):
            self.not_followed.append(link)
        return self.follow_symlinks and link.exists()

    def skipped(self, links: Sequence[Path], folder: str = "it") -> list[str]:
        """Describe what was not looked at: links out of the folder, and what the notes say."""
        names = few(list(map(self.name, links)))
        text = f"{plural(len(links), 'link')} out of {folder}, not followed (--follow-symlinks): {names}"
        many = f"only {MAX_FOLDERS} folders were looked into"
        return [*([text] if links else []), *self.notes, *([many] if self._folders == MAX_FOLDERS else [])]

    def name(self, path: Path) -> str:
        """The name of a path to append to the root."""
        return str(path.relative_to(self.root))


def is_named_so(path: Path) -> bool:
    """Whether a file has a name of files of weights: of torch.save files, compressed or not, or of safetensors."""
    plain = path.with_suffix("") if path.suffix in COMPRESSED else path
    return plain.suffix in SUFFIXES
