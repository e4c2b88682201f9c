"""Files in a store, fetched before they are read: many requests are under way together, where reading waits for each.

What reading a file's structure takes is two requests or more, one after the other, each as long as the way to the
store. So threads make them for the files that come next, and leave the bytes with the store for who reads them. How
much waits there is bounded: a store lets go of what is too much, and it would be fetched twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread

from ckptools.errors import CkptoolsError
from ckptools.files.file_type import HEAD
from ckptools.files.opening import File
from ckptools.files.remote_path import RemotePath
from ckptools.files.zip_archive import STRUCTURE, Container

THREADS = 16
"""Files that are fetched at once."""

LARGEST = 8 << 20
"""Bytes of a record, at most, that is fetched ahead; for a larger one the way to the store is the least."""

WAITING = 16 << 20
"""Bytes that are fetched and not asked for yet, at most, of all files together."""


@dataclass
class _Coming:
    """A file that is fetched or will be.

    Attributes:
        nbytes: what it takes of `WAITING`.
        begun: whether a thread is at it.
        wanted: whether somebody waits for it.
        done: whether it is fetched.
    """

    nbytes: int = 0
    begun: bool = False
    wanted: bool = False
    done: bool = False


class FetchAhead:
    """Threads that fetch the structure of files in stores; files on disk are left alone."""

    def __init__(self) -> None:
        self._paths: deque[Path] = deque()
        self._coming: dict[Path, _Coming] = {}
        self._changed = Condition()
        self._threads = self._nbytes = 0

    def add(self, paths: Iterable[Path]) -> None:
        """Fetch these files next."""
        with self._changed:
            for path in paths:
                if isinstance(path, RemotePath) and path not in self._coming:
                    self._coming[path] = _Coming()
                    self._paths.append(path)
                    self._start()

    def wait(self, path: Path) -> None:
        """Wait until a file is fetched that was to be; two would only ask for the same."""
        with self._changed:
            coming = self._coming.pop(path, None)
            if coming is None:
                return
            coming.wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: coming.done or not coming.begun)
            self._nbytes -= coming.nbytes
            self._changed.notify_all()
        if not coming.begun:
            fetch(path)

    def close(self) -> None:
        """Begin no other file."""
        with self._changed:
            self._paths.clear()
            for coming in self._coming.values():
                coming.wanted = True
            self._changed.notify_all()

    def _start(self) -> None:
        if self._threads < THREADS:
            self._threads += 1
            Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (found := self._next()) is not None:
            path, coming = found
            try:
                fetch(path, lambda nbytes, own=coming: self._wait_for_room(own, nbytes))  # type: ignore[misc]
            finally:
                with self._changed:
                    coming.done = True
                    self._changed.notify_all()

    def _next(self) -> tuple[Path, _Coming] | None:
        """The file that is fetched next; None where the thread is no longer needed."""
        with self._changed:
            while self._paths:
                path = self._paths.popleft()
                coming = self._coming.get(path)
                if coming is not None:  # else somebody reads it already
                    coming.begun = True
                    return path, coming
            self._threads -= 1
            return None

    def _wait_for_room(self, coming: _Coming, nbytes: int) -> None:
        """Wait until so many bytes may be fetched; for a file that somebody waits for, they may."""
        with self._changed:
            self._changed.wait_for(lambda: coming.wanted or self._nbytes + nbytes <= WAITING)
            if not coming.wanted:
                coming.nbytes = nbytes
                self._nbytes += nbytes


def fetch(path: Path, wait_for_room: Callable[[int], None] = lambda _: None) -> None:
    """Fetch what reading the structure of a torch.save file takes; an error is left to who reads it.

    Args:
        path: the file; of one that is no zip archive no more than its ends are fetched.
        wait_for_room: called with the bytes that its records take, before they are fetched.
    """
    with suppress(CkptoolsError, OSError, MemoryError), File(path) as file:
        records = Container(file).records
        said = [records[name] for name in STRUCTURE if name in records]
        wanted = [(0, HEAD), *((record.header, record.limit) for record in said)]
        wait_for_room(sum(end - start for start, end in wanted if end - start <= LARGEST))
        file.prefetch(wanted, LARGEST)
