"""Files in a store, fetched before they are read: many requests are under way together, where reading waits for each.

What reading a file's structure takes is four requests, one after the other, each as long as the way to the store. So
threads make them for the files that come next, and leave the bytes with the store for who reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from ckptools.errors import CkptoolsError
from ckptools.files.file_type import content_of, head_of
from ckptools.files.opening import File
from ckptools.files.remote_path import RemotePath
from ckptools.files.zip_archive import STRUCTURE, Container

THREADS = 16
"""Files that are fetched at once."""


class FetchAhead:
    """Threads that fetch the structure of files in stores; files on disk are left alone."""

    def __init__(self) -> None:
        self._paths: SimpleQueue[tuple[Path, Event]] = SimpleQueue()
        self._done: dict[Path, Event] = {}
        self._threads = 0

    def add(self, paths: Iterable[Path]) -> None:
        """Fetch these files next."""
        for path in paths:
            if isinstance(path, RemotePath) and path not in self._done:
                self._done[path] = Event()
                self._paths.put((path, self._done[path]))
                self._start()

    def wait(self, path: Path) -> None:
        """Wait until a file is fetched that was to be; two would only ask for the same."""
        if done := self._done.pop(path, None):
            done.wait()

    def _start(self) -> None:
        if self._threads < THREADS:
            self._threads += 1
            Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            path, done = self._paths.get()
            try:
                fetch(path)
            finally:
                done.set()


def fetch(path: Path) -> None:
    """Fetch what reading the structure of a torch.save file takes; an error is left to who reads it."""
    with suppress(CkptoolsError, OSError, MemoryError), File(path) as file:
        if content_of(head_of(file)) == "zip":
            records = Container(file).records
            said = [records[name] for name in STRUCTURE if name in records]
            file.bring(min(record.header for record in said), max(record.limit for record in said))
