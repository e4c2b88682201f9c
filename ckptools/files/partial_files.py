"""Write output files, and folders of them, that appear complete or not at all.

Each is written under a temporary name beside its final one, synced, and renamed last; on any error or interrupt the
temporary files are removed. A killed process may leave them behind, but never under the final name.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path, PosixPath
from typing import Any, Protocol

from ckptools.errors import NoSpaceError, OutputExistsError, UsageError, WriteError
from ckptools.option import spelled


def check_place_of_file(path: Path, force: bool = False) -> None:
    """Refuse an output file that would overwrite another file, before work is spent on its content.

    Raises:
        OutputExistsError: the file exists without `force`; or it is a folder.
        UsageError: its folder does not exist.
    """
    if re.fullmatch(r"[a-z][a-z0-9]+:", path.parts[0]) and not Path(path.parts[0]).exists():
        url = f"{path.parts[0]}//{'/'.join(path.parts[1:])}"
        raise UsageError(None, f"{url}: is remote; this is written to this machine, copy it from here")
    if not path.parent.is_dir():
        raise UsageError(path, f"there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise OutputExistsError(path, "is a folder")
    if os.path.lexists(path) and not force:
        raise OutputExistsError(path, f"is already there; {spelled('force', True)} overwrites it")


def write_text(path: Path, text: str, force: bool = False) -> None:
    """Write a UTF-8 text file that appears complete or not at all.

    Raises:
        OutputExistsError, UsageError: as `check_place_of_file`.
        WriteError: it cannot be written.
    """
    check_place_of_file(path, force)
    with PartialFiles() as files:
        files.add_text(path, text)
        files.publish()


class Stream(Protocol):
    """An output that is not a local file."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data` at `offset`; may wait for earlier bytes.

        Raises:
            WriteError: it cannot be written.
        """

    def stop(self) -> None:
        """End every waiting call."""


Target = int | Stream
"""A destination of bytes: the descriptor of a file, or a stream."""


def write_at(target: Target, offset: int, data: bytes | memoryview) -> None:
    """Write all of `data` at `offset`, even if the system takes only some bytes per call."""
    if not isinstance(target, int):
        target.write(offset, data)
        return
    done = 0
    while done < len(data):
        done += os.pwrite(target, data[done:], offset + done)


class PartialFiles:
    """Output files and folders under temporary names, until `publish` gives them their final names.

    Used in a `with` block, which removes unpublished files, even after an interrupt at any moment: each name is noted
    before a file is created under it.
    """

    def __init__(self, kept: Path | None = None) -> None:
        """Create files beside their final places, or in a folder `kept`, where they stay until they get their names."""
        self._kept = kept
        self._pairs: list[tuple[Path, Path]] = []
        self._folders: dict[Path, Path] = {}
        self._made: list[Path] = []
        self._replaced: dict[Path, Path] = {}
        self._descriptors: list[int] = []

    def make_folder(self, path: Path) -> None:
        """Create the folder of the output files; it is removed again if they are not published.

        Raises:
            WriteError: the system refuses.
        """
        self._made.append(path)
        try:
            path.mkdir()
        except OSError as error:
            raise WriteError(path, f"cannot be created: {(error.strerror or '').lower()}") from error

    def create_folder(self, path: Path) -> None:
        """Create a folder that will be named `path`; files then created in `path` lie in it.

        Raises:
            WriteError: the system refuses.
        """
        partial = self._folders[path] = self._hidden(path)
        try:
            partial.mkdir(exist_ok=self._kept is not None)
        except OSError as error:
            raise WriteError(path, f"cannot be created: {(error.strerror or '').lower()}") from error

    def create(self, path: Path, size: int) -> int:
        """Create a file of `size` bytes that will be named `path`; return its descriptor.

        Raises:
            WriteError: the system refuses.
        """
        folder = self._folders.get(path.parent)
        partial = self._hidden(path) if folder is None else folder / path.name
        if folder is None:
            self._pairs.append((partial, path))
        try:
            new = os.O_EXCL if self._kept is None else 0
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | new | getattr(os, "O_CLOEXEC", 0), 0o666)
            self._descriptors.append(descriptor)
            os.ftruncate(descriptor, size)
        except OSError as error:
            raise WriteError(path, f"cannot be created: {(error.strerror or '').lower()}") from error
        return descriptor

    def place(self, path: Path) -> Path:
        """The temporary path of the file that will be named `path`."""
        folder = self._folders.get(path.parent)
        return next(p for p, final in self._pairs if final == path) if folder is None else folder / path.name

    def add_text(self, path: Path, text: str | bytes) -> None:
        """Add a small file; it gets its name after the files before it.

        Raises:
            WriteError: the system refuses.
        """
        descriptor, data = self.create(path, 0), text if isinstance(text, bytes) else text.encode("utf-8")
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            raise WriteError(path, f"cannot be written: {(error.strerror or '').lower()}") from error

    def publish(self, first: Iterable[Path] = (), last: Iterable[Path] = ()) -> None:
        """Sync every file, then rename folders first and files in order, then sync their parent folders.

        Args:
            first: existing files to remove before the renames.
            last: existing files to remove after them.

        Raises:
            WriteError: a disk failed; no incomplete file has got its final name.
        """
        try:
            for descriptor in self._descriptors:
                os.fsync(descriptor)
            self._close()
            _remove(first)
            for path, partial in self._folders.items():
                sync_folder(partial)
                self._replace_folder(partial, path)
            for partial, path in self._pairs:
                partial.replace(path)
            above = {path.parent for path in (*self._folders, *(p for _, p in self._pairs))}
            self._pairs = []
            for folder in above:
                sync_folder(folder)
            _remove(last)
            if self._kept is not None:
                shutil.rmtree(self._kept, ignore_errors=True)
                self._kept = None
        except OSError as error:
            raise WriteError(None, f"output could not be finished: {(error.strerror or '').lower()}") from error

    def _replace_folder(self, partial: Path, path: Path) -> None:
        """Give a folder its final name. An existing folder is moved aside; `discard` removes it or puts it back."""
        if path.exists():
            aside = self._replaced[path] = _hidden(path, "replaced")
            path.rename(aside)
        partial.rename(path)

    def discard(self) -> None:
        """Remove unpublished files, unless they are kept, and replaced folders."""
        self._close()
        if self._kept is not None:
            self._folders, self._pairs = {}, []
        for path, aside in self._replaced.items():
            _put_back(aside, path)
            shutil.rmtree(aside, ignore_errors=True)
        for partial in self._folders.values():
            shutil.rmtree(partial, ignore_errors=True)
        for partial, _ in self._pairs:
            partial.unlink(missing_ok=True)
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if it is empty
        self._pairs, self._folders, self._replaced, self._made = [], {}, {}, []

    def _hidden(self, path: Path) -> Path:
        """The temporary path of the file or folder that will be named `path`."""
        return _hidden(path, "partial") if self._kept is None else self._kept / path.name

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> PartialFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def _remove(paths: Iterable[Path]) -> None:
    """Remove files that may be gone already, and sync their folders."""
    removed = list(paths)
    for path in removed:
        path.unlink(missing_ok=True)
    for folder in {path.parent for path in removed}:
        sync_folder(folder)


def _put_back(aside: Path, path: Path) -> None:
    """Give a folder that was moved aside its name again, unless another folder has it by now."""
    if path.exists() or not aside.exists():
        return
    try:
        aside.rename(path)
    except OSError as error:
        raise WriteError(path, f"could not be put back; its content is in {aside}") from error


def _hidden(path: Path, why: str) -> Path:
    """An unused hidden name beside `path`."""
    return path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.{why}")


NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
"""Errors of `fsync` on a folder on file systems, such as some network ones, that do not support it."""


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk, if its file system supports that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)


# -- temporary files with unpacked content -----------------------------------------------------------------------------
# They lie in a folder that only this user may enter, below `TMPDIR`, and are removed when the process ends, unless it
# is killed. Their paths record the file from which they were made.


RESERVE = 256 << 20
"""Bytes that stay free on the disk."""

LOOK_EVERY = 64 << 20
"""Bytes written between two checks of the free space."""

_numbers = count()
_folder: Path | None = None


class TemporaryPath(PosixPath):
    """The path of a temporary file; errors about it name the file from which it was made."""

    original: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return _temporary_path, (str(self), self.original)


def _temporary_path(path: str, original: Path) -> TemporaryPath:
    made = TemporaryPath(path)
    made.original = original
    return made


def temporary_file(original: Path, name: str) -> TemporaryPath:
    """A new path in the temporary folder for the unpacked content of a file; it ends with `name`."""
    return _temporary_path(f"{_temporary_folder()}/{next(_numbers)}-{name[-200:]}", original)


@contextmanager
def room_in(target: Path, original: Path, nbytes: int = 0) -> Iterator[None]:
    """Remove the temporary file `target` after a failure, and report a full disk as such.

    There must be room for `nbytes` at the start.

    Raises:
        NoSpaceError: the disk has less room than is needed.
    """
    try:
        check_room(target.parent, nbytes)
        yield
    except BaseException as error:
        target.unlink(missing_ok=True)
        if isinstance(error, OSError):
            why = (error.strerror or "").lower()
            text = f"no room to unpack {original.name} ({why}); set TMPDIR to a folder with more"
            raise NoSpaceError(target.parent, text) from error
        raise


def check_room(folder: Path, nbytes: int = 0) -> None:
    """Check that the disk of a folder has room for `nbytes` more.

    Raises:
        OSError: it has less.
    """
    if shutil.disk_usage(folder).free < max(nbytes, LOOK_EVERY) + RESERVE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _temporary_folder() -> Path:
    global _folder
    if _folder is None or not _folder.is_dir():
        try:
            _folder = Path(tempfile.mkdtemp(prefix="ckptools-"))
        except OSError as error:
            text = f"no temporary folder can be made ({(error.strerror or '').lower()}); set TMPDIR to one"
            raise NoSpaceError(None, text) from error
        atexit.register(_remove_own_folder, _folder, os.getpid())
    return _folder


def _remove_own_folder(folder: Path, made_by: int) -> None:
    # A forked child inherits this registration, and must leave the folder to its parent.
    if os.getpid() == made_by:
        shutil.rmtree(folder, ignore_errors=True)
