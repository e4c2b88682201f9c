"""The folder that a checkpoint goes to: nothing in it is overwritten by accident or looks finished too early.

All ranks write into a hidden folder inside it. When every file is complete they move into place by `os.replace`, which
is atomic within a file system. A sub-folder moves as a whole, unless there is a folder of its name: then its files move
one by one, so that other files there stay. Several files cannot move at once. So old files of the same names are
removed first, and the files without which the others are no checkpoint move last: a half-moved checkpoint lacks files,
and says so.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.errors import OutputExistsError, UsageError
from ckptools.files.partial_files import sync_folder
from ckptools.training.options import FULL_STATE

if TYPE_CHECKING:
    from ckptools.training.damage import Broken

CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".distcp", ".safetensors")

METADATA = ".metadata"

# The losses of a run so far, for a run that resumes from its checkpoint.
LOSSES = "losses.csv"

# The beginning of the hidden folder's name.
PARTIAL = ".ckptools-"

# Layouts and templates nest folders at most this deep.
DEPTH = 5

# Rank and world size in the names of the layouts: `-rank3.pt`, `_world_size_4_rank_3.pt`, and `__3_0.distcp`.
_NUMBERS = re.compile(r"(rank_?|world_size_|random_states_)\d+|(?<![^/])__\d+_\d+")

# Parts of paths that differ between the forms of one model: `sharded/shard-00001-model-00001-of-00002.safetensors`.
_FORMS = re.compile(
    r"(?<![^/])sharded/|(?<![^/])shard-\d+-|-\d+-of-\d+(?=\.safetensors$)|(?<=\.safetensors)\.index\.json$"
)


@dataclass(frozen=True)
class Created:
    """The result of `create`.

    Attributes:
        files: every file of the checkpoint, sorted; with `full.pt` if the user asked for it.
        losses: mean loss over all ranks, before each step.
        nbytes: size of all files together.
        rank: the rank of this process; 0 if `create` started the ranks itself.
        damage: the damage that was done to the files on purpose, if the user asked for it.
    """

    out: Path
    files: tuple[Path, ...]
    losses: tuple[float, ...]
    world_size: int
    nbytes: int
    rank: int
    damage: tuple[Broken, ...] = ()

    @property
    def first(self) -> Path:
        """The path to open: the file of rank 0, or the folder if the layout has files of several kinds."""
        return opened_by(self.files)

    @property
    def left(self) -> Path:
        """The path to open after damage on purpose, when some files may be gone."""
        there = [path for path in self.files if path.exists() and path.name not in (FULL_STATE, LOSSES)]
        return opened_by(there or self.files)


def opened_by(found: Iterable[Path]) -> Path:
    """The path that opens a checkpoint with these files: rank 0's file, or the folder if there are several kinds."""
    files = [path for path in found if path.name not in (FULL_STATE, LOSSES)]
    several = len({re.sub(r"\d+", "N", path.name) for path in files}) > 1
    return Path(os.path.commonpath([path.parent for path in files])) if several else files[0]


# -- folder ------------------------------------------------------------------------------------------------------------


def refuse_existing(out: Path, force: bool) -> None:
    """Refuse a folder that already holds a checkpoint.

    Raises:
        OutputExistsError: the folder holds a checkpoint, and `force` is off.
        UsageError: `out` is a file.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(out, "is a file; give a folder for the checkpoint")
    if force or not out.exists():
        return
    of_one = (path for path in _files(out, DEPTH) if path.suffix in CHECKPOINT_SUFFIXES or path.name == METADATA)
    found = sorted(path.relative_to(out).as_posix() for path in of_one)
    if found:
        raise OutputExistsError(out, f"already holds a checkpoint ({found[0]}); give another folder or --force")


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the files in a folder, `depth` levels deep, except in linked folders and in folders of unfinished files."""
    for path in folder.iterdir():
        if not path.is_dir():
            yield path
        elif depth and not path.is_symlink() and not path.name.startswith(PARTIAL):
            yield from _files(path, depth - 1)


@contextmanager
def partial_folder(out: Path, run_id: str) -> Iterator[Path]:
    """Name the hidden folder for the unfinished files of a run, and remove it at the end in any case.

    The launcher of every node calls this; rank 0 makes the folder. If `out` is empty at the end and did not exist
    before, it is removed too.
    """
    known = out.exists()
    partial = out / f"{PARTIAL}{re.sub(r'[^0-9A-Za-z]', '-', run_id)}"
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not known:
            with suppress(OSError):
                out.rmdir()


def common_folder(folder: Path) -> Path:
    """The innermost folder that holds all files of a checkpoint, not counting the gathered state beside it."""
    files = [path for path in _files(folder, DEPTH) if path.name != FULL_STATE]
    return Path(os.path.commonpath([path.parent for path in files]))


def finish(partial: Path, out: Path) -> tuple[Path, ...]:
    """Move complete files into place; returns where they are now, sorted."""
    files = sorted(out / path.relative_to(partial) for path in _files(partial, DEPTH))
    for path in sorted(partial.rglob("*")):
        _flush(path)
    if len(files) > 1:
        for path in (path for path in files if path.name != LOSSES):
            path.unlink(missing_ok=True)
    _move_into(partial, out)
    for folder in {out, *(path.parent for path in files)}:
        _flush(folder)
    return tuple(files)


def _move_into(folder: Path, target: Path) -> None:
    for path in sorted(folder.iterdir(), key=_turn):
        there = target / path.name
        if path.is_dir() and there.is_dir():
            _move_into(path, there)
        else:
            path.replace(there)


def _turn(path: Path) -> tuple[bool, bool, Path]:
    """The order in which files move: the model late, and the files that make a folder valid last.

    A crash between two moves then leaves no model, or a model that lacks ranks: nothing that looks like a checkpoint.
    """
    return path.name.endswith((METADATA, ".index.json")), "model" in path.name, path


def remove_older(out: Path, files: Iterable[Path], of_any_rank: str | None = None) -> None:
    """Remove what `--force` replaces under other names: ranks of a larger world, the full state of another run.

    If the user has given the names, `of_any_rank` is a regular expression for the files of other ranks.
    """
    names = {path.relative_to(out).as_posix() for path in files}
    kinds = {_kind(name) for name in names} | {FULL_STATE, LOSSES}
    for path in list(_files(out, DEPTH)):
        name = path.relative_to(out).as_posix()
        other_rank = of_any_rank is not None and re.fullmatch(of_any_rank, name)
        if name not in names and (other_rank or _kind(name) in kinds):
            path.unlink()
            with suppress(OSError):  # a folder that holds something else stays
                path.parent.rmdir()


def _kind(name: str) -> str:
    """A path without the parts that differ between the files of ranks, and between the forms of one model."""
    return _FORMS.sub("", _NUMBERS.sub(r"\1N", name))


def _flush(path: Path) -> None:
    """Wait until a file or folder is on the disk, so that after a crash there is no name without its bytes."""
    if path.is_dir():
        if os.name != "nt":
            sync_folder(path)
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_losses(folder: Path, losses: list[float], steps: int) -> None:
    """Write a line for each loss, up to step `steps`, with all digits that are needed to read the same number."""
    with (folder / LOSSES).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "loss"])
        rows.writerows((step, repr(loss)) for step, loss in enumerate(losses, steps - len(losses) + 1))


def read_losses(checkpoint: Path, steps: int) -> list[float]:
    """Read the losses before each of the first `steps` steps beside a checkpoint; empty if not all are known."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    path = folder / LOSSES
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        found = {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}
    wanted = range(1, steps + 1)
    return [found[step] for step in wanted] if found.keys() >= set(wanted) else []
