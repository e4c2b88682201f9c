"""Where an output may go: what it must not overwrite, the room that it needs, and that its source is still the same."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ckptools.consolidate.writers.layout import LEFT_OUT, Layout, beside
from ckptools.errors import NoSpaceError, OutputExistsError, ReadError, UsageError
from ckptools.files.location import is_remote
from ckptools.formats.shared.rank_names import parse
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.provenance import FILE_NAME
from ckptools.model.values import describe_for_error

HEADROOM = 1 << 20
"""Bytes that the disk keeps free beside the output."""


def check_place(checkpoint: Checkpoint, paths: Iterable[Path], force: bool, new: Path | None = None) -> None:
    """Refuse an output that would overwrite something, a source above all, or pass for a rank file.

    `new` is a folder that is made for it.

    Raises:
        OutputExistsError: it is in the way of something.
        UsageError: its folder is not there.
    """
    sources = [f.path for f in checkpoint.files]
    taken = {p.resolve() for p in sources}
    groups = {(p.parent.resolve(), n.group) for p in sources if (n := parse(p)) is not None}
    for path in paths:
        folder = path.parent if path.parent != new else path.parent.parent
        if not (is_remote(folder) or folder.is_dir()):
            raise UsageError(path, f"there is no folder {folder}")
        if path.resolve() in taken:
            raise OutputExistsError(path, "is a file of the checkpoint itself; choose another name")
        name = parse(path)
        if name is not None and (path.parent.resolve(), name.group) in groups:
            raise OutputExistsError(path, "would pass for one more rank file of the checkpoint; choose another name")
        if path.is_dir():
            raise OutputExistsError(path, "is a folder")
        if (path.exists() or path.is_symlink()) and not force:
            raise OutputExistsError(path, "exists; --force overwrites it")


def check_left_over(out: Path, texts: Iterable[Path], force: bool) -> None:
    """Refuse to write beside a side file of an earlier output, which would speak of the new one.

    Raises:
        OutputExistsError: it is there, and is not replaced.
    """
    side = beside(out, LEFT_OUT)
    if not force and side not in texts and side.exists():
        raise OutputExistsError(side, "tells what an earlier output lacks; --force removes it")


def check_not_among(checkpoint: Checkpoint, output: Path) -> None:
    """Refuse an output whose name is ours in a folder that holds the source: found there later, it passes for it.

    Raises:
        OutputExistsError: it would lie there.
    """
    folder = output.parent.resolve()
    if any(f.path.resolve().is_relative_to(folder) for f in checkpoint.files):
        text = f"holds the checkpoint itself; to write beside its files, give the file's name: -o {output}"
        raise OutputExistsError(output.parent, text)


def check_folder(checkpoint: Checkpoint, folder: Path, force: bool) -> None:
    """Refuse a folder that would replace something other than an earlier output, a source above all.

    Raises:
        OutputExistsError: it is in the way of something.
        UsageError: the folder that it would be in is not there.
    """
    if not (is_remote(folder) or folder.parent.is_dir()):
        raise UsageError(folder, f"there is no folder {folder.parent}")
    target, opened = folder.resolve(), checkpoint.path.resolve()
    if target == opened or any(f.path.resolve().is_relative_to(target) for f in checkpoint.files):
        raise OutputExistsError(folder, "holds the checkpoint itself; choose another name")
    if checkpoint.path.is_dir() and target.is_relative_to(opened):
        raise OutputExistsError(folder, "lies inside the checkpoint's folder; choose a place beside it")
    if not (folder.exists() or folder.is_symlink()):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise OutputExistsError(folder, "exists and is no folder")
    if not force:
        raise OutputExistsError(folder, "exists; --force replaces it")
    strange = next((p.name for p in sorted(folder.iterdir()) if p.is_dir() or not _DCP_FILE.fullmatch(p.name)), None)
    if strange is not None:
        raise OutputExistsError(
            folder, f"holds {describe_for_error(strange)}, which is no part of a DCP; choose another name"
        )


_DCP_FILE = re.compile(rf"\.metadata|__[0-9]+_[0-9]+\.distcp|{re.escape(FILE_NAME)}")


@dataclass(frozen=True)
class Replaced:
    """Files of an earlier output that go where a new one takes its place.

    Attributes:
        first: what lets its files pass for one output together, gone before a new file has its name.
        last: what the new output has no file of that name for, gone when that is complete.
    """

    first: tuple[Path, ...] = ()
    last: tuple[Path, ...] = ()


def replaced(checkpoint: Checkpoint, out: Path, layout: Layout, force: bool, texts: Collection[Path] = ()) -> Replaced:
    """What goes of an earlier output `out`: of one in several files the index and the last file go first.

    An output in one file takes its place at once. Of one in several, those that have their names before an interrupt
    would lie among old ones: without the index these are found by their numbers, and then the last is missing.
    What an earlier one lacked is not what is told of one that has no such side file among its `texts`.
    """
    side = beside(out, LEFT_OUT)
    told = (side,) if force and side not in texts and side.exists() else ()
    if not force or layout.folder is not None or len(layout.files) == 1:
        return Replaced(last=told)
    number = re.compile(rf"{re.escape(out.stem)}-\d{{5}}-of-\d{{5}}{re.escape(out.suffix)}")
    new, sources = {path.name for path, _ in layout.files}, {f.path.resolve() for f in checkpoint.files}
    found = sorted(out.parent.iterdir()) if out.parent.is_dir() else []
    here = [path for path in found if number.fullmatch(path.name) or path.name == out.name]
    last = [path for path in here if path.name not in new and path.resolve() not in sources and path.is_file()]
    return Replaced((beside(out, "index."), layout.files[-1][0]), (*last, *told))


def lacking_space(folder: Path, nbytes: int) -> NoSpaceError | None:
    """The error that refuses an output that the disk has no room for; None where it has."""
    free = shutil.disk_usage(folder).free
    if nbytes + HEADROOM <= free:
        return None
    return NoSpaceError(folder, f"has {free} bytes free; the output needs {nbytes}")


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Refuse to publish what was made of files that are not any more what they were when they were opened.

    Raises:
        ReadError: one has another size or time, or is gone.
    """
    for file in checkpoint.files:
        if not file.is_here:
            continue
        try:
            now = file.path.stat()
        except OSError as error:
            raise ReadError(file.path, "is gone since it was opened; nothing was written") from error
        if (now.st_size, now.st_mtime) != (file.nbytes, file.modified):
            what = f"{file.nbytes} bytes then, {now.st_size} now" if now.st_size != file.nbytes else "it was written to"
            raise ReadError(file.path, f"changed since it was opened: {what}; nothing was written")
