"""Paths of files and folders in a store, used like paths of `pathlib`: `s3://bucket/run7/ep0-ba100-rank0.pt`.

Code that asks a path for its kind, its size or its files need not know whether it is local or remote. Nothing can be
written through a remote path.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import PosixPath, PurePath
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

from ckptools.files.remote import HUB, WEB
from ckptools.files.storage import DeniedError, RemoteError, Status

if TYPE_CHECKING:
    from ckptools.files.remote.store import Store

_stores: dict[tuple[str, str], Store] = {}
_queries: dict[tuple[str, str], dict[str, str]] = {}
"""The queries, after `?`, of URLs that the user has named, by scheme and host, then key; most are secrets."""

_lock = Lock()


class RemotePath(PosixPath):
    """The path of a file or folder in a store; `/`, `parent`, `name`, `suffix` and the like work as in `pathlib`."""

    _store: Store | None = None

    def __str__(self) -> str:
        scheme, colon, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}" if colon else scheme  # A path relative to another has no scheme.

    @property
    def store(self) -> Store:
        """The store that holds the file or folder.

        Raises:
            RemoteError: a package that is needed for this is not installed, or no store has this name.
        """
        if self._store is None:
            with _lock:
                if self._place not in _stores:
                    from ckptools.files.remote.store import store_of

                    _stores[self._place] = store_of(*self._place, _queries.setdefault(self._place, {}))
                self._store = _stores[self._place]
        return self._store

    @property
    def _place(self) -> tuple[str, str]:
        return self.parts[0][:-1], "/".join(self.parts[1 : self._depth])

    @property
    def _depth(self) -> int:
        """The number of leading parts that name the store: scheme and bucket, host or the Hub's `org/name@revision`."""
        if self.parts[:1] != (f"{HUB}:",):
            return 2
        depth = 4 if self.parts[1:2] in (("datasets",), ("spaces",)) else 3
        # Only revisions such as `refs/pr/7` and `refs/convert/parquet` are written with their slashes.
        return depth + 2 if self.parts[depth - 1 : depth] and self.parts[depth - 1].endswith("@refs") else depth

    def __truediv__(self, other: Any) -> RemotePath:
        below = super().__truediv__(other)
        below._store = self._store  # with the listing of the folder that this path has seen
        return below

    @property
    def parent(self) -> RemotePath:
        """The folder around it."""
        above = super().parent
        above._store = self._store if len(above.parts) >= above._depth else None
        return above

    @property
    def key(self) -> str:
        """The path within the store."""
        return "/".join(self.parts[self._depth :])

    def status(self) -> Status:
        """Kind, size, time and version of the file or folder at this path.

        Raises:
            OSError: there is no such file or folder, or the store does not say.
        """
        if len(self.parts) < self._depth:
            raise FileNotFoundError(errno.ENOENT, "names no bucket, server or repository")
        try:
            return self.store.status(self.key)
        except RemoteError as error:
            error.filename = str(self)
            raise

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size, time and kind, in the form that a file on disk has."""
        found = self.status()
        mode = (stat.S_IFDIR if found.is_folder else stat.S_IFREG) | 0o444
        time_ns = int(found.modified * 1e9)
        more: Any = {"st_mtime": found.modified, "st_mtime_ns": time_ns, "st_blocks": -(-found.size // 512)}
        seconds = int(found.modified)
        fields = (mode, hash(self), 0, 1, 0, 0, found.size, seconds, seconds, seconds)
        return os.stat_result(fields, more)

    lstat = stat

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is a file or folder at this path."""
        try:
            self.status()
        except FileNotFoundError:
            return False
        return True

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is a file at this path that the store lets us see."""
        return self._is_folder() is False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether files lie below this path."""
        return self._is_folder() is True

    def _is_folder(self) -> bool | None:
        """Whether there is a folder at this path; None if there is nothing that the store lets us see."""
        try:
            return self.status().is_folder
        except (FileNotFoundError, DeniedError):
            return None

    def is_symlink(self) -> bool:
        """Always False: a store has no links."""
        return False

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """Yield the files and folders in this folder."""
        yield from [self / name for name in self.store.entries(self.key)]

    def glob(self, pattern: str, **_: Any) -> Generator[RemotePath, None, None]:
        """Yield the paths below this folder that match a pattern of names; `**` is not known."""
        first, slash, rest = str(pattern).partition("/")
        for path in self.iterdir() if self.is_dir() else ():
            if fnmatchcase(path.name, first) and slash:
                yield from path.glob(rest)
            elif fnmatchcase(path.name, first):
                yield path

    def absolute(self, **_: Any) -> RemotePath:
        """The path itself: every path has a scheme, and there are no links."""
        return self

    resolve: Any = absolute
    expanduser = absolute

    def is_absolute(self) -> bool:
        """Always True: every path has a scheme."""
        return True

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RemoteError("is in a store, which is only read", errno.EROFS)

    mkdir: Any = _refuse
    touch = unlink = rmdir = rename = replace = chmod = write_bytes = write_text = symlink_to = _refuse
    open: Any = _refuse
    read_bytes = read_text = rglob = _refuse


def stores_are_used() -> bool:
    """Whether this process has opened anything in a store."""
    return bool(_stores)


def named_url(url: str, by_user: bool = True) -> RemotePath:
    """The path of a URL; its query, after `?`, is kept apart and sent with each request.

    A file that is named a second time with another query, or without a query, may be another file. So it gets a place
    of its own, which is shown with a number: `https://host#2/rank0.pt`. A URL that is not `by_user` was spelled by
    ckptools, which leaves queries out.

    Raises:
        RemoteError: the URL names no file, or contains a user's name or password.
    """
    scheme, _, rest = url.partition("://")
    plain, mark, query = rest.partition("?") if scheme in WEB else (rest, "", "")
    host = plain.partition("/")[0]
    user = host.rpartition("@")[0]
    if not host or (scheme in WEB and "//" in plain):
        raise RemoteError("is no URL of a file: a name before or between two slashes is empty", errno.EINVAL)
    if ":" in user or (user and scheme in WEB):
        raise RemoteError("a URL with a user's name or password is not read", errno.EINVAL)
    path = RemotePath(f"{scheme}://{plain}")
    if scheme not in WEB or not (by_user or mark):
        return path
    # The first place at which the file has this query, or was not named yet.
    places = chain([host], (f"{host}#{number}" for number in count(2)))
    with _lock:
        place = next(p for p in places if _queries.setdefault((scheme, p), {}).setdefault(path.key, query) == query)
    return RemotePath(f"{scheme}://{place}/{path.key}")


def needs_query(path: PurePath) -> bool:
    """Whether only this process can read a file: it knows the query of the URL, which the path does not show."""
    return isinstance(path, RemotePath) and bool(_queries.get(path._place, {}).get(path.key))


def shown_url(url: str | PurePath) -> str:
    """Remove the query, user name and password from a URL, so that it may be shown."""
    scheme, colon, rest = str(url).partition("://")
    host, slash, path = (rest.partition("?")[0] if scheme in WEB else rest).partition("/")
    return f"{scheme}{colon}{host.rpartition('@')[2] if colon else host}{slash}{path}"


def refreshed(path: RemotePath) -> RemotePath:
    """The same path in a store without cached listings, as a user who names a path expects.

    Files that were opened before keep the old listings, and so their versions.

    Raises:
        RemoteError: there is no such store.
    """
    with _lock:
        known = _stores.get(path._place)
        if known is not None:
            _stores[path._place] = known.anew()
    path = RemotePath(path)  # The given path may refer to the store with old listings.
    _ = path.store
    return path
