"""Output files that appear whole or not at all.

Each is written under a temporary name in its own folder, synced, and renamed last; on any error or interrupt the
temporary files are removed. A killed process may leave one behind, but never under the final name.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from ckptools.checkpoint import Checkpoint
from ckptools.errors import NoSpaceError, OutputExistsError, UsageError, WriteError
from ckptools.formats.rank_names import parse

HEADROOM = 1 << 20
"""Bytes that the disk keeps free beside the output."""


def check_place(checkpoint: Checkpoint, paths: Iterable[Path], force: bool) -> None:
    """Refuse an output that would overwrite something, a source above all, or pass for a rank file.

    Raises:
        OutputExistsError: it is in the way of something.
        UsageError: its folder is not there.
    """
    sources = [f.path for f in checkpoint.files]
    taken = {p.resolve() for p in sources}
    groups = {(p.parent.resolve(), n.group) for p in sources if (n := parse(p)) is not None}
    for path in paths:
        if not path.parent.is_dir():
            raise UsageError(path, f"there is no folder {path.parent}")
        if path.resolve() in taken:
            raise OutputExistsError(path, "is a file of the checkpoint itself; choose another name")
        name = parse(path)
        if name is not None and (path.parent.resolve(), name.group) in groups:
            raise OutputExistsError(path, "would pass for one more rank file of the checkpoint; choose another name")
        if path.is_dir():
            raise OutputExistsError(path, "is a folder")
        if path.exists() and not force:
            raise OutputExistsError(path, "exists; --force overwrites it")


def check_space(folder: Path, nbytes: int) -> None:
    """Refuse an output that the disk has no room for.

    Raises:
        NoSpaceError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if nbytes + HEADROOM > free:
        raise NoSpaceError(folder, f"has {free} bytes free; the output needs {nbytes}")


def write_at(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    """Write all of `data` at `offset`, however few bytes the system takes at once."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


class PartialFiles:
    """Output files under temporary names, until `publish` gives them their own.

    Used in a `with` block, which removes what was not published, also when an interrupt comes at any moment: a name
    is noted before its file is made.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Path, Path]] = []
        self._descriptors: list[int] = []

    def create(self, path: Path, size: int) -> int:
        """Make a file of `size` bytes that will be called `path`; return its descriptor.

        Raises:
            WriteError: the disk does not let us.
        """
        partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.partial")
        self._pairs.append((partial, path))
        try:
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
            self._descriptors.append(descriptor)
            os.ftruncate(descriptor, size)
        except OSError as error:
            raise WriteError(path, f"cannot be created: {(error.strerror or '').lower()}") from error
        return descriptor

    def add_text(self, path: Path, text: str) -> None:
        """Add a small file; it gets its name after the ones before it."""
        descriptor, data = self.create(path, 0), text.encode("utf-8")
        while data:
            data = data[os.write(descriptor, data) :]

    def publish(self) -> None:
        """Sync every file, then give each its name, in order, then sync the folders.

        Raises:
            WriteError: a disk failed; no file has got its name that was not whole.
        """
        try:
            for descriptor in self._descriptors:
                os.fsync(descriptor)
            self._close()
            for partial, path in self._pairs:
                partial.replace(path)
            folders = {path.parent for _, path in self._pairs}
            self._pairs = []
            for folder in folders:
                _sync_folder(folder)
        except OSError as error:
            raise WriteError(None, f"output could not be finished: {(error.strerror or '').lower()}") from error

    def discard(self) -> None:
        """Remove what has not got its name."""
        self._close()
        for partial, _ in self._pairs:
            partial.unlink(missing_ok=True)
        self._pairs = []

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> PartialFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
