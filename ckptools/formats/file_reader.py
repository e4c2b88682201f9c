"""Read the torch.save files of one checkpoint: when a format asks for them, or ahead in reader processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.formats.options import OnFile, Reader
from ckptools.model.provenance import Said
from ckptools.pickles.archive import FetchAhead
from ckptools.pickles.machine_state import RepeatedRecords
from ckptools.pickles.reader import AlikeFiles, Saved, first_of_many
from ckptools.training_state import modules

if TYPE_CHECKING:
    from ckptools.formats.reader_processes import ReaderProcesses

MIN_FILES = 16
"""With at least this many files, reader processes are considered, and files are compared with others."""

FILES_PER_PROCESS = 8

MAX_PROCESSES = 16
"""Default limit of processes: the merge in this process keeps at most this many busy."""

MIN_SECONDS = 0.5
"""Processes are started if reading is expected to take at least this many seconds, by the files so far."""


class FileReader:
    """Reads the files of one checkpoint, until it is closed; in processes only if `read` is the inert reader.

    Attributes:
        said: provenance records in the files that were read.
    """

    def __init__(
        self, read: Reader = modules.read_file, jobs: int | None = None, on_file: OnFile | None = None
    ) -> None:
        self._read, self._jobs, self._on_file = read, jobs, on_file
        self.said: dict[Path, Said] = {}
        self._repeated = RepeatedRecords()
        self._ahead: dict[Path, None] = {}
        self._processes: ReaderProcesses | None = None
        self._files, self._seconds = 0, 0.0
        self._fetch = FetchAhead()
        self._alike = AlikeFiles(None)

    def __call__(self, path: Path) -> Saved:
        """Read one file.

        Raises:
            ReadError: it is cut, damaged, or not a torch.save file.
        """
        self._start_processes(path)
        saved = (self._processes and self._processes.take(path)) or self._read_here(path)
        if saved.provenance is not None:
            self.said[path] = saved.provenance
        if self._on_file is not None:
            self._on_file(path)
        return saved

    def ahead(self, paths: Sequence[Path]) -> None:
        """Announce that these files will be read, in this order."""
        if self._read is modules.read_file and len(paths) >= MIN_FILES:
            self._alike = AlikeFiles(first_of_many(paths), len(paths))
        if self._read is modules.read_file and len(paths) >= MIN_FILES and self._most_processes(len(paths)) > 1:
            self._ahead = dict.fromkeys(paths)
        elif self._read is modules.read_file:
            self._fetch.add(paths)

    def _read_here(self, path: Path) -> Saved:
        self._alike.pattern(0)  # made once, so that its time predicts nothing about the other files
        started = time.perf_counter()
        self._fetch.reach(path)
        if self._read is not modules.read_file:
            saved = self._read(path)
        elif not (self._files or self._alike.firsts):
            saved = modules.read_file(path)  # the first file is often the only one, and quicker without a pattern
        else:
            found = self._alike.read(path)
            saved = found or modules.read_file(path, self._repeated)
            if found is None:
                self._alike.missed(saved)
        self._seconds += time.perf_counter() - started
        self._files += 1
        return saved

    def _start_processes(self, path: Path) -> None:
        """Start processes for this file and the following ones if reading them takes a while."""
        coming = [path, *self._ahead] if self._ahead.pop(path, path) is None else []
        seconds = len(coming) * self._seconds / self._files if self._files else 0.0
        count = self._most_processes(len(coming)) if self._jobs is not None or seconds > MIN_SECONDS else 0
        if count < 2 or self._processes is not None:
            return
        from ckptools.formats.reader_processes import started

        self._ahead = {}
        with suppress(OSError):  # no more processes, or no memory for one
            self._processes = started(coming, count, self._alike)

    def _most_processes(self, files: int) -> int:
        if self._jobs is not None:
            return min(self._jobs, files)
        return min(_cores(), MAX_PROCESSES, files // FILES_PER_PROCESS)

    def close(self) -> None:
        """End the processes, and stop fetching ahead."""
        self._fetch.close()
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
