"""The folder that a checkpoint goes to: nothing in it is overwritten by accident or looks finished too early.

All ranks write into a hidden folder inside it. When every file is complete they move into place by
`os.replace`, which is atomic within a file system; `.metadata`, which makes a DCP folder valid, moves last. A layout
may have sub-folders: its files move one by one, so that what else lies in a folder of that name stays.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptools.errors import OutputExistsError, UsageError, WriteError
from ckptools.training.options import FULL_STATE

CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".distcp", ".safetensors")

# The hidden folder's name begins so.
PARTIAL = ".ckptools-"

# How deep the layouts nest their folders.
DEPTH = 2

# Rank and world size in the names of the layouts: `-rank3.pt`, `_world_size_4_rank_3.pt`, `__3_0.distcp`.
_NUMBERS = re.compile(r"(rank_?|world_size_|random_states_|(?:^|/)__)\d+")


def refuse_existing(out: Path, force: bool) -> None:
    """Refuse a folder that already holds a checkpoint.

    Raises:
        OutputExistsError: it does, and `force` is off.
        UsageError: `out` is a file.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(out, "is a file; give a folder for the checkpoint")
    if force or not out.exists():
        return
    found = sorted(path.relative_to(out).as_posix() for path in _files(out, DEPTH) if _is_checkpoint(path))
    if found:
        raise OutputExistsError(out, f"already holds a checkpoint ({found[0]}); give another folder or --force")


def _is_checkpoint(path: Path) -> bool:
    return path.suffix in CHECKPOINT_SUFFIXES or path.name == ".metadata"


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the files in a folder and in those in it, `depth` folders deep; neither links nor files in the making."""
    for path in folder.iterdir():
        if not path.is_dir():
            yield path
        elif depth and not path.is_symlink() and not path.name.startswith(PARTIAL):
            yield from _files(path, depth - 1)


def partial_folder(out: Path, run_id: str) -> Path:
    """Name the hidden folder in which the files of one run grow."""
    return out / f"{PARTIAL}{re.sub(r'[^0-9A-Za-z]', '-', run_id)}"


@contextmanager
def open_partial_folder(out: Path, run_id: str) -> Iterator[Path]:
    """Make the hidden folder, and remove it whatever happens; an `out` that this made and is empty goes too.

    Raises:
        WriteError: the folder cannot be made.
    """
    made = not out.exists()
    partial = partial_folder(out, run_id)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise WriteError(out, f"cannot be made: {(error.strerror or '').lower()}") from error
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made:
            with suppress(OSError):
                out.rmdir()


def finish(partial: Path, out: Path) -> tuple[Path, ...]:
    """Move complete files into place.

    Returns:
        The files where they are now, sorted.
    """
    staged = sorted(_files(partial, DEPTH), key=lambda path: (path.name == ".metadata", path))
    moves = {path: out / path.relative_to(partial) for path in staged}
    for path in staged:
        _flush(path)
    for path, target in moves.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    for folder in {out, *(target.parent for target in moves.values())}:
        _flush(folder)
    return tuple(sorted(moves.values()))


def remove_older(out: Path, files: Iterable[Path]) -> None:
    """Remove what `--force` replaces under other names: ranks of a larger world, the full state of another run.

    Args:
        out: the folder.
        files: the new checkpoint, complete.
    """
    names = {path.relative_to(out).as_posix() for path in files}
    kinds = {_NUMBERS.sub(r"\1N", name) for name in names} | {FULL_STATE}
    for path in list(_files(out, DEPTH)):
        name = path.relative_to(out).as_posix()
        if name not in names and _NUMBERS.sub(r"\1N", name) in kinds:
            path.unlink()


def _flush(path: Path) -> None:
    """Wait until the disk has it, so that a name never outlives a crash that its bytes did not."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
