"""Which checkpoints of a run may go: those older than the newest proven ones that are kept."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ckptools.errors import RefusedError, WriteError
from ckptools.files.location import is_remote, path_of, real_path
from ckptools.ls.record import CheckpointRow, RunFolder
from ckptools.ls.rows import is_proven


def may_go(run: RunFolder, keep: int) -> list[CheckpointRow]:
    """The checkpoints that are older than the `keep` newest proven ones; none if fewer are proven.

    What a tracker leads to stays, and so does a checkpoint without a step beside others that have one: it has no place
    in their order. What may still be written stays too.
    """
    proven = [n for n, row in enumerate(run.rows) if is_proven(row)]
    if keep < 1 or len(proven) < keep:
        return []
    tracked = {tracker.checkpoint for tracker in run.trackers}
    later = list(run.rows)[proven[keep - 1] + 1 :]
    ordered = run.ordered_by == "file time"
    return [r for r in later if r.name not in tracked and not r.being_written and (ordered or r.step is not None)]


def delete(row: CheckpointRow, run: RunFolder, files: Mapping[str, Sequence[Path]], sure: Callable[[], bool]) -> None:
    """Delete a checkpoint: its folder if that holds nothing of another one, else its files alone.

    A folder is renamed first: a deletion that is cut short leaves what `ls` lists as left over, and no half checkpoint.
    Rank files go one after the other. `sure` is asked right before: whether the newest proven checkpoint is still what
    was proven.

    Raises:
        RefusedError: it shares files with another checkpoint, or leads out of the run's folder, or it is not sure.
        WriteError: the disk does not let us.
    """
    path, own = path_of(row.path), set(files.get(row.name, ()))
    others = {real_path(file) for name, found in files.items() if name != row.name for file in found}
    if is_remote(path):
        raise RefusedError(path, "is in a store; ckptools deletes on a disk alone")
    if not own or any(real_path(file) in others for file in own):
        raise RefusedError(path, "shares files with another checkpoint" if own else "its files are not known")
    root = real_path(run.path)
    if any(file.is_symlink() or root not in real_path(file).parents for file in own):
        raise RefusedError(path, "leads out of the folder of the run")
    if not sure():
        raise RefusedError(path, "stays: the newest proven checkpoint has changed since it was verified")
    folder = path if path.is_dir() else None
    try:
        if folder is not None and _is_of_one(folder, run, others):
            aside = folder.with_name(f".ckptools-deleted-{secrets.token_hex(4)}-{folder.name[:200]}")
            folder.rename(aside)
            shutil.rmtree(aside)
        else:
            for file in sorted(own):
                file.unlink(missing_ok=True)
            for above in {folder for file in own for folder in file.parents if root in real_path(folder).parents}:
                with suppress(OSError):
                    above.rmdir()  # only where it is empty
    except OSError as error:
        raise WriteError(path, f"cannot be deleted: {(error.strerror or str(error)).lower()}") from error


def _is_of_one(folder: Path, run: RunFolder, others: set[Path]) -> bool:
    """Whether a folder below that of the run has nothing of another checkpoint in it, and nothing is a link."""
    inside = set(map(real_path, _entries(folder)))
    return (
        folder.absolute() != run.path.absolute()
        and not folder.is_symlink()
        and not inside & others
        and not any(path_of(row.path) != folder and path_of(row.path).is_relative_to(folder) for row in run.rows)
    )


def _entries(folder: Path) -> Iterator[Path]:
    for above, _, names in os.walk(folder):
        yield from (Path(above) / name for name in names)
