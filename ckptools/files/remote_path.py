"""The path of something in a store, as `pathlib` has paths: `s3://bucket/run7/ep0-ba100-rank0.pt`.

What asks a path whether it is a file, how large it is and what lies in it need not know where it lies. Nothing can be
written through one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import PosixPath
from threading import Lock
from typing import Any, NoReturn

from ckptools.files.remote_store import RemoteError, RemoteStore
from ckptools.files.storage import Status

SCHEMES = ("s3", "gs", "az")
"""What a URL may begin with."""

_stores: dict[tuple[str, str], RemoteStore] = {}
_lock = Lock()


class RemotePath(PosixPath):
    """The path of a file or folder in a store; `/`, `parent`, `name`, `suffix` and all else of a path work on it."""

    _store: RemoteStore | None = None

    def __str__(self) -> str:
        scheme, colon, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}" if colon else scheme  # relative to another, it has no scheme

    @property
    def store(self) -> RemoteStore:
        """Where it lies.

        Raises:
            RemoteError: a package that is needed for this is not installed, or no store has this name.
        """
        if self._store is None:
            with _lock:
                if self._place not in _stores:
                    _stores[self._place] = _store(*self._place)
                self._store = _stores[self._place]
        return self._store

    @property
    def _place(self) -> tuple[str, str]:
        return self.parts[0][:-1], self.parts[1] if len(self.parts) > 1 else ""

    def __truediv__(self, other: Any) -> RemotePath:
        below = super().__truediv__(other)
        below._store = self._store  # of what was listed of the folder then
        return below

    @property
    def key(self) -> str:
        """Its path in the store."""
        return "/".join(self.parts[2:])

    def status(self) -> Status:
        """What is there.

        Raises:
            OSError: nothing, or the store does not tell.
        """
        if len(self.parts) < 2:
            raise FileNotFoundError(errno.ENOENT, "names no bucket or server")
        return self.store.status(self.key)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size, time and kind, as the system tells them of a file on disk."""
        found = self.status()
        mode = (stat.S_IFDIR if found.is_folder else stat.S_IFREG) | 0o444
        time_ns = int(found.modified * 1e9)
        more: Any = {"st_mtime": found.modified, "st_mtime_ns": time_ns, "st_blocks": -(-found.size // 512)}
        seconds = int(found.modified)
        fields = (mode, hash(self), 0, 1, 0, 0, found.size, seconds, seconds, seconds)
        return os.stat_result(fields, more)

    def lstat(self) -> os.stat_result:
        """As `stat`: there are no links."""
        return self.stat()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether anything is there."""
        try:
            self.status()
        except FileNotFoundError:
            return False
        return True

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a file."""
        try:
            return not self.status().is_folder
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether files lie below it."""
        try:
            return self.status().is_folder
        except FileNotFoundError:
            return False

    def is_symlink(self) -> bool:
        """Never."""
        return False

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """What lies in it."""
        yield from [self / name for name in self.store.entries(self.key)]

    def glob(self, pattern: str, **_: Any) -> Generator[RemotePath, None, None]:
        """What lies below it by a pattern of names; `**` is not known."""
        first, slash, rest = str(pattern).partition("/")
        for path in self.iterdir() if self.is_dir() else ():
            if fnmatchcase(path.name, first) and slash:
                yield from path.glob(rest)
            elif fnmatchcase(path.name, first):
                yield path

    def absolute(self) -> RemotePath:
        """Itself."""
        return self

    def resolve(self, strict: bool = False) -> RemotePath:
        """Itself: there are no links."""
        return self

    def expanduser(self) -> RemotePath:
        """Itself."""
        return self

    def is_absolute(self) -> bool:
        """Always."""
        return True

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RemoteError("is in a store, which is only read", errno.EROFS)

    mkdir: Any = _refuse
    touch = unlink = rmdir = rename = replace = chmod = write_bytes = write_text = symlink_to = _refuse
    open: Any = _refuse
    read_bytes = read_text = rglob = _refuse


def _store(scheme: str, name: str) -> RemoteStore:
    if scheme in SCHEMES:
        from ckptools.files.bucket import Bucket

        return Bucket(f"{scheme}://{name}")
    raise RemoteError(f"{scheme}:// is not read; {', '.join(f'{one}://' for one in SCHEMES)} are", errno.ENOTSUP)


def refreshed(path: RemotePath) -> RemotePath:
    """A path in a store that has listed nothing yet, as a user who names a path expects.

    What was opened before goes on with what was listed then, and so with those versions of the files.

    Raises:
        RemoteError: there is no such store.
    """
    with _lock:
        known = _stores.get(path._place)
        if known is not None:
            _stores[path._place] = known.anew()
    _ = path.store
    return path
