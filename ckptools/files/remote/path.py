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
"""What follows the `?` in URLs that the user has named, by scheme and host, then key: a secret as a rule."""

_lock = Lock()


class RemotePath(PosixPath):
    """The path of a file or folder in a store; `/`, `parent`, `name`, `suffix` and all else of a path work on it."""

    _store: Store | None = None

    def __str__(self) -> str:
        scheme, colon, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}" if colon else scheme  # relative to another, it has no scheme

    @property
    def store(self) -> Store:
        """The store that it is in.

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
        """How many parts name the place: a bucket or host, or on the Hub `org/name@revision`, of a model as a rule."""
        if self.parts[:1] != (f"{HUB}:",):
            return 2
        depth = 4 if self.parts[1:2] in (("datasets",), ("spaces",)) else 3
        # Of all names of revisions only `refs/pr/7` and `refs/convert/parquet` are written with their slashes.
        return depth + 2 if self.parts[depth - 1 : depth] and self.parts[depth - 1].endswith("@refs") else depth

    def __truediv__(self, other: Any) -> RemotePath:
        below = super().__truediv__(other)
        below._store = self._store  # of what was listed of the folder then
        return below

    @property
    def parent(self) -> RemotePath:
        """The folder that it is in."""
        above = super().parent
        above._store = self._store if len(above.parts) >= above._depth else None
        return above

    @property
    def key(self) -> str:
        """Its path in the store."""
        return "/".join(self.parts[self._depth :])

    def status(self) -> Status:
        """What is there.

        Raises:
            OSError: nothing is there, or the store does not say.
        """
        if len(self.parts) < self._depth:
            raise FileNotFoundError(errno.ENOENT, "names no bucket, server or repository")
        try:
            return self.store.status(self.key)
        except RemoteError as error:
            error.filename = str(self)
            raise

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size, time and kind, as of a file on disk."""
        found = self.status()
        mode = (stat.S_IFDIR if found.is_folder else stat.S_IFREG) | 0o444
        time_ns = int(found.modified * 1e9)
        more: Any = {"st_mtime": found.modified, "st_mtime_ns": time_ns, "st_blocks": -(-found.size // 512)}
        seconds = int(found.modified)
        fields = (mode, hash(self), 0, 1, 0, 0, found.size, seconds, seconds, seconds)
        return os.stat_result(fields, more)

    lstat = stat

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether anything is there."""
        try:
            self.status()
        except FileNotFoundError:
            return False
        return True

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a file that we may see."""
        return self._is_folder() is False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether files lie below it."""
        return self._is_folder() is True

    def _is_folder(self) -> bool | None:
        """Whether it is a folder; None where nothing is that we may see."""
        try:
            return self.status().is_folder
        except (FileNotFoundError, DeniedError):
            return None

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

    def absolute(self, **_: Any) -> RemotePath:
        """Itself: there are no links."""
        return self

    resolve: Any = absolute
    expanduser = absolute

    def is_absolute(self) -> bool:
        """Always."""
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
    """The path of a URL; what follows a `?` is kept aside, and sent with each request.

    A file that is named a second time with another query, or with none, may be another file, so it is at a place of its
    own, which is shown with a number: `https://host#2/rank0.pt`. A URL that is not `by_user` was spelled by ckptools,
    which leaves queries out.

    Raises:
        RemoteError: it names no file, or a user's password.
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
    # The first place where it has this query or was not named yet.
    places = chain([host], (f"{host}#{number}" for number in count(2)))
    with _lock:
        place = next(p for p in places if _queries.setdefault((scheme, p), {}).setdefault(path.key, query) == query)
    return RemotePath(f"{scheme}://{place}/{path.key}")


def needs_query(path: PurePath) -> bool:
    """Whether only this process can read a file: a query was named with it, which its path does not show."""
    return isinstance(path, RemotePath) and bool(_queries.get(path._place, {}).get(path.key))


def shown_url(url: str | PurePath) -> str:
    """A URL as it may be shown: without its query and what it says of a user."""
    scheme, colon, rest = str(url).partition("://")
    host, slash, path = (rest.partition("?")[0] if scheme in WEB else rest).partition("/")
    return f"{scheme}{colon}{host.rpartition('@')[2] if colon else host}{slash}{path}"


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
    path = RemotePath(path)  # the one that was given may be of the store as it was
    _ = path.store
    return path
