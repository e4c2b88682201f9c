"""Temporary files that hold what was unpacked of others.

They lie in a folder that only this user may enter, below `TMPDIR`, and are removed when the process ends, however it
ends short of being killed. Their paths remember what they were made from.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path, PosixPath
from typing import Any

from ckptools.errors import NoSpaceError

RESERVE = 256 << 20
"""Bytes that the disk keeps free."""

LOOK_EVERY = 64 << 20
"""Bytes between two looks at the free space."""

_numbers = count()
_folder: Path | None = None


class TemporaryPath(PosixPath):
    """The path of a temporary file; errors about it name the file that it was made from."""

    original: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return _temporary_path, (str(self), self.original)


def _temporary_path(path: str, original: Path) -> TemporaryPath:
    made = TemporaryPath(path)
    made.original = original
    return made


def temporary_file(original: Path, name: str) -> TemporaryPath:
    """A new name in the temporary folder for what is unpacked of a file; it ends with `name`."""
    return _temporary_path(f"{_temporary_folder()}/{next(_numbers)}-{name[-200:]}", original)


@contextmanager
def room_in(target: Path, original: Path, nbytes: int = 0) -> Iterator[None]:
    """Remove the temporary file `target` if it could not be finished, and say so where the disk is full.

    There must be room for `nbytes` from the first.

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
    """Look whether the disk of a folder has room for `nbytes` more.

    Raises:
        OSError: it has not.
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
        atexit.register(_remove, _folder, os.getpid())
    return _folder


def _remove(folder: Path, made_by: int) -> None:
    # A forked child has this registered too, and must leave the folder to its parent.
    if os.getpid() == made_by:
        shutil.rmtree(folder, ignore_errors=True)
