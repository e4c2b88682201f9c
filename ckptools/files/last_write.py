"""How long ago the files of a checkpoint were written, where that is so short that a save may still be going on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

JUST_NOW = 120.0
"""A checkpoint that is not whole may still be written if its last write was less than this many seconds ago."""

UNFINISHED = "the save has not ended, or it died, or the file was not copied"
"""What it means that the file is missing that a writer writes last."""

MAX_FILES = 1 << 16


def just_written(last: float | None) -> str:
    """Say that a checkpoint may not be finished, by the time of its last write; empty if that is long ago."""
    ago = None if last is None else time.time() - last
    return "" if ago is None or ago >= JUST_NOW else f"last written {max(0, round(ago))} s ago: it may not be finished"


def last_write(path: Path) -> float | None:
    """When a file, or the last of the files in a folder and those in it, was written; None without files."""
    times = list[float]()
    for file in islice(_files_in(path), MAX_FILES):
        with suppress(OSError):
            times.append(file.lstat().st_mtime)
    return max(times, default=None)


def _files_in(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        yield path
        return
    for entry in path.iterdir():
        yield from entry.iterdir() if entry.is_dir() and not entry.is_symlink() else (entry,)
