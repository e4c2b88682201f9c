"""A store that is reached through a network, by three questions: list a folder, look at a key, fetch a range.

What was listed is remembered, so that a hundred questions about the files of a folder are one request, and so that
every range is read of the version that was listed: a file that is replaced meanwhile is an error, not a mixture.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from threading import RLock

from ckptools.files.remote_file import Known, RemoteFile
from ckptools.files.storage import FOLDER, Status

MAX_KEPT = 64 << 20
"""Bytes that are kept of all files of a store together; what was opened longest ago goes first."""


class RemoteError(OSError):
    """A store that does not give what it was asked for; `strerror` is one line without the file's name.

    Args:
        reason: that line.
        code: the system's error that it is most like.
    """

    def __init__(self, reason: str, code: int = errno.EIO) -> None:
        super().__init__(code, reason)


class NoListError(RemoteError):
    """A store that does not tell, or not to us, what lies in a folder."""


def _only_read() -> RemoteError:
    return RemoteError("is in a store that is only read; give an output in a bucket, or on this machine", errno.EROFS)


class DeniedError(RemoteError):
    """A store that does not let us see a file; some say so too of those that are not there."""


def replaced() -> RemoteError:
    """The error for a file that has changed since it was opened."""
    return RemoteError("was replaced by another version while it was read; open it again", errno.ESTALE)


class RemoteStore(ABC):
    """The files of one bucket, server or repository.

    Attributes:
        lists: whether it tells what lies in a folder.
    """

    lists = True

    def __init__(self) -> None:
        self._folders: dict[str, Mapping[str, Status]] = {}
        self._files: dict[str, Status | None] = {}
        self._known: dict[str, Known] = {}
        self._latest: OrderedDict[str, None] = OrderedDict()  # files of which something is kept
        self._kept = 0
        self._lock = RLock()

    @abstractmethod
    def _list(self, folder: str) -> Mapping[str, Status]:
        """What lies in a folder; nothing where there is no such folder.

        Raises:
            NoListError: that is not told.
        """

    @abstractmethod
    def _look(self, key: str) -> Status | None:
        """What is known of one file; None where there is none."""

    @abstractmethod
    def _fetch(self, key: str, version: str, start: int, end: int) -> bytes:
        """The bytes of a file from `start` to before `end`, all of them.

        Raises:
            RemoteError: it cannot be read, or is no longer of that version.
        """

    def anew(self) -> RemoteStore:
        """The same store, of which nothing was listed yet."""
        other = copy(self)
        RemoteStore.__init__(other)
        return other

    def status(self, key: str) -> Status:
        """What is at a key: a file, or a folder with files below it."""
        above, _, name = key.rpartition("/")
        found = self._listed_file(key, above, name) if name else FOLDER
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder")
        return found

    def _listed_file(self, key: str, above: str, name: str) -> Status | None:
        """A file by the list of its folder, or by looking at it alone where there is no list."""
        with self._lock:
            try:
                return self._entries(above).get(name)
            except NoListError:
                if key not in self._files:
                    self._files[key] = self._look(key)
                return self._files[key]

    def entries(self, key: str) -> Mapping[str, Status]:
        """What lies in a folder, by name."""
        with self._lock:
            found = self._entries(key)
        if not found and key:
            raise FileNotFoundError(errno.ENOENT, "no such folder")
        return found

    def _entries(self, folder: str) -> Mapping[str, Status]:
        if folder not in self._folders:
            self._folders[folder] = self._list(folder)
        return self._folders[folder]

    def open(self, key: str) -> RemoteFile:
        """Open a file for reading."""
        status = self.status(key)
        if status.is_folder:
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        return RemoteFile(partial(self._fetch, key, status.version), status, self._known_of(key))

    def put(self, key: str, data: bytes, replace: bool) -> None:
        """Write a small file whole. One that is there is replaced only if that is asked for.

        Raises:
            FileExistsError: there is one.
            RemoteError: it cannot be written.
        """
        raise _only_read()

    def upload(self, key: str, size: int, pieces: Iterator[bytes]) -> None:
        """Write a large file in parts, as they come; it is there once all are, and an error of `pieces` ends it.

        Raises:
            RemoteError: it cannot be written; its parts are removed, or the error tells that they are not.
        """
        raise _only_read()

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files.

        Raises:
            RemoteError: they cannot be removed.
        """
        raise _only_read()

    def _known_of(self, key: str) -> Known:
        """What is here of a file: a format looks at its first bytes before it is read, and its tensors come later."""
        with self._lock:
            if key not in self._known:
                self._known[key] = Known(partial(self._keep, key))
            elif key in self._latest:
                self._latest.move_to_end(key)
            return self._known[key]

    def _keep(self, key: str, nbytes: int) -> None:
        """Count what is kept of a file, and let go of what is kept of others where it is too much."""
        with self._lock:
            self._kept += nbytes
            self._latest[key] = None
            self._latest.move_to_end(key)
            while self._kept > MAX_KEPT and len(self._latest) > 1:
                gone, _ = self._latest.popitem(last=False)
                self._kept -= self._known[gone].clear()
