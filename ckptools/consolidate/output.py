"""Output files, and folders of them, that appear whole or not at all.

Each is written under a temporary name beside its place, synced, and renamed last; on any error or interrupt what is
temporary is removed. A killed process may leave it behind, but never under the final name.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from ckptools.errors import NoSpaceError, OutputExistsError, ReadError, UsageError, WriteError
from ckptools.formats.shared.rank_names import parse
from ckptools.model.checkpoint import Checkpoint
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
        if not folder.is_dir():
            raise UsageError(path, f"there is no folder {folder}")
        if path.resolve() in taken:
            raise OutputExistsError(path, "is a file of the checkpoint itself; choose another name")
        name = parse(path)
        if name is not None and (path.parent.resolve(), name.group) in groups:
            raise OutputExistsError(path, "would pass for one more rank file of the checkpoint; choose another name")
        if path.is_dir():
            raise OutputExistsError(path, "is a folder")
        if path.exists() and not force:
            raise OutputExistsError(path, "exists; --force overwrites it")


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
    if not folder.parent.is_dir():
        raise UsageError(folder, f"there is no folder {folder.parent}")
    target, opened = folder.resolve(), checkpoint.path.resolve()
    if target == opened or any(f.path.resolve().is_relative_to(target) for f in checkpoint.files):
        raise OutputExistsError(folder, "holds the checkpoint itself; choose another name")
    if checkpoint.path.is_dir() and target.is_relative_to(opened):
        raise OutputExistsError(folder, "lies inside the checkpoint's folder; choose a place beside it")
    if not os.path.lexists(folder):
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


_DCP_FILE = re.compile(r"\.metadata|__[0-9]+_[0-9]+\.distcp")


def check_space(folder: Path, nbytes: int) -> None:
    """Refuse an output that the disk has no room for.

    Raises:
        NoSpaceError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if nbytes + HEADROOM > free:
        raise NoSpaceError(folder, f"has {free} bytes free; the output needs {nbytes}")


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Refuse to publish what was made of files that are not any more what they were when they were opened.

    Raises:
        ReadError: one has another size or time, or is gone.
    """
    for file in checkpoint.files:
        if file.status not in ("read", "seen"):
            continue
        try:
            now = file.path.stat()
        except OSError as error:
            raise ReadError(file.path, "is gone since it was opened; nothing was written") from error
        if (now.st_size, now.st_mtime) != (file.nbytes, file.modified):
            what = f"{file.nbytes} bytes then, {now.st_size} now" if now.st_size != file.nbytes else "it was written to"
            raise ReadError(file.path, f"changed since it was opened: {what}; nothing was written")


def write_at(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    """Write all of `data` at `offset`, however few bytes the system takes at once."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


class PartialFiles:
    """Output files and folders under temporary names, until `publish` gives them their own.

    Used in a `with` block, which removes what was not published, also when an interrupt comes at any moment: a name
    is noted before anything is made under it.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Path, Path]] = []
        self._folders: dict[Path, Path] = {}
        self._made: list[Path] = []
        self._replaced: dict[Path, Path] = {}
        self._descriptors: list[int] = []

    def make_folder(self, path: Path) -> None:
        """Make the folder that the output files will be in; it goes again if they do not come.

        Raises:
            WriteError: the disk does not let us.
        """
        self._made.append(path)
        try:
            path.mkdir()
        except OSError as error:
            raise WriteError(path, f"cannot be created: {(error.strerror or '').lower()}") from error

    def create_folder(self, path: Path) -> None:
        """Make a folder that will be called `path`; files created in `path` from now on are in it.

        Raises:
            WriteError: the disk does not let us.
        """
        partial = self._folders[path] = _hidden(path, "partial")
        try:
            partial.mkdir()
        except OSError as error:
            raise WriteError(path, f"cannot be created: {(error.strerror or '').lower()}") from error

    def create(self, path: Path, size: int) -> int:
        """Make a file of `size` bytes that will be called `path`; return its descriptor.

        Raises:
            WriteError: the disk does not let us.
        """
        folder = self._folders.get(path.parent)
        partial = _hidden(path, "partial") if folder is None else folder / path.name
        if folder is None:
            self._pairs.append((partial, path))
        try:
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
            self._descriptors.append(descriptor)
            os.ftruncate(descriptor, size)
        except OSError as error:
            raise WriteError(path, f"cannot be created: {(error.strerror or '').lower()}") from error
        return descriptor

    def place(self, path: Path) -> Path:
        """Where the file is now that will be called `path`."""
        folder = self._folders.get(path.parent)
        return next(p for p, final in self._pairs if final == path) if folder is None else folder / path.name

    def add_text(self, path: Path, text: str) -> None:
        """Add a small file; it gets its name after the ones before it."""
        descriptor, data = self.create(path, 0), text.encode("utf-8")
        while data:
            data = data[os.write(descriptor, data) :]

    def publish(self) -> None:
        """Sync every file, then give each its name, folders first and then in order, then sync what they are in.

        Raises:
            WriteError: a disk failed; nothing has got its name that was not whole.
        """
        try:
            for descriptor in self._descriptors:
                os.fsync(descriptor)
            self._close()
            for path, partial in self._folders.items():
                _sync_folder(partial)
                self._replace_folder(partial, path)
            for partial, path in self._pairs:
                partial.replace(path)
            above = {path.parent for path in (*self._folders, *(p for _, p in self._pairs))}
            self._pairs = []
            for folder in above:
                _sync_folder(folder)
        except OSError as error:
            raise WriteError(None, f"output could not be finished: {(error.strerror or '').lower()}") from error

    def _replace_folder(self, partial: Path, path: Path) -> None:
        """Give a folder its name. One that has it steps aside until then, and `discard` removes it or puts it back."""
        if path.exists():
            aside = self._replaced[path] = _hidden(path, "replaced")
            path.rename(aside)
        partial.rename(path)

    def discard(self) -> None:
        """Remove what has not got its name, and what was replaced."""
        self._close()
        for path, aside in self._replaced.items():
            _put_back(aside, path)
            shutil.rmtree(aside, ignore_errors=True)
        for partial in self._folders.values():
            shutil.rmtree(partial, ignore_errors=True)
        for partial, _ in self._pairs:
            partial.unlink(missing_ok=True)
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only while it is empty
        self._pairs, self._folders, self._replaced, self._made = [], {}, {}, []

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> PartialFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def _put_back(aside: Path, path: Path) -> None:
    """Give a folder that stepped aside its name again, unless another one has it by now."""
    if path.exists() or not aside.exists():
        return
    try:
        aside.rename(path)
    except OSError as error:
        raise WriteError(path, f"could not be put back; what it held is in {aside}") from error


def _hidden(path: Path, why: str) -> Path:
    """A free name beside `path`."""
    return path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.{why}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
