"""Processes that read files ahead of their use, and return the structures in the order of the given files.

They are started as commands, not forked and not by `multiprocessing`: a fork of a process with threads (a notebook,
torch) may hang, and `multiprocessing` runs the user's script again unless it has a guard. If a process cannot
answer, the caller reads the file itself, and gets the same error as without processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptools.files.remote.path import RemotePath, needs_query
from ckptools.formats.reader_worker import COMPARE_WITH, GREETING, LENGTH, Receiver, read_exactly
from ckptools.pickles.alike import Alike
from ckptools.pickles.reader import AlikeFiles, Saved

AHEAD = 3
"""Files that are requested from each process in advance; bounds the answers in memory."""

AHEAD_IN_STORES = 16
"""Remote files that are requested from each process in advance; a process fetches them together."""

PIPE = 1 << 20
"""Bytes of answers in a process's pipe before it waits."""

RUN = "import sys; sys.path += sys.argv[1:]; from ckptools.formats import reader_worker; reader_worker.main()"
"""Python's own modules come first, so that no file beside a checkpoint or a script shadows one of them."""


def started(paths: Sequence[Path], count: int, alike: AlikeFiles) -> ReaderProcesses | None:
    """Start reader processes for these files.

    None if this Python is embedded in a program and cannot be started again.

    Raises:
        OSError: the system cannot start them.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        return None
    return ReaderProcesses([path for path in paths if not needs_query(path)], count, alike)


class ReaderProcesses:
    """Processes that read the files of one checkpoint."""

    def __init__(self, paths: Sequence[Path], count: int, alike: AlikeFiles) -> None:
        self._waiting = deque(paths)
        self._asked: deque[tuple[Path, _ReaderProcess]] = deque()
        self._answers: dict[Path, Saved | None] = {}
        self._processes: list[_ReaderProcess] = []
        self._left = set(paths)
        same: dict[Any, Any] = {}
        self._alike = alike
        try:
            for _ in range(count):
                self._processes.append(_ReaderProcess(Receiver(same, alike)))
                for first in alike.firsts:
                    self._processes[-1].compare_with(first)
            far = any(isinstance(path, RemotePath) for path in paths)
            for process in self._processes * (AHEAD_IN_STORES if far else AHEAD):
                self._ask(process)
        except BaseException:
            self.close()
            raise

    def take(self, path: Path) -> Saved | None:
        """The structure of one of the files, once; None for other files, and if no process could read it."""
        if path not in self._left:
            return None
        self._left.remove(path)
        while path not in self._answers:
            asked, process = self._asked.popleft()
            self._answers[asked] = process.answer(asked)
            self._learn(asked)
            self._ask(process)
        return self._answers.pop(path)

    def _learn(self, path: Path) -> None:
        """Let all processes compare later files with another interpreted one, after two similar files matched none."""
        saved = self._answers[path]
        if saved is None or isinstance(saved.content, Alike):
            return
        if (other := self._alike.missed(saved)) is not None:
            for process in self._processes:
                process.compare_with(other)

    def close(self) -> None:
        """Stop the processes."""
        for process in self._processes:
            process.end()

    def _ask(self, process: _ReaderProcess) -> None:
        if self._waiting:
            path = self._waiting.popleft()
            process.ask(path)
            self._asked.append((path, process))


class _ReaderProcess:
    """One reader process; after its first fault it does not answer any more."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._greeted = self._gone = False
        # A session of its own: an interrupt from the terminal is for the process that the user sees.
        flags = ["-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}", *(["-B"] if sys.dont_write_bytecode else [])]
        here = str(Path(__file__).resolve().parents[2])  # the folder that contains the package
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", RUN, here, *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pipesize=PIPE,
        )

    def compare_with(self, path: Path) -> None:
        self.ask(f"{COMPARE_WITH}{path}")

    def ask(self, path: Path | str) -> None:
        if self._gone:
            return
        name = os.fsencode(str(path))
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(LENGTH.pack(len(name)) + name)
            self._process.stdin.flush()
        except OSError:
            self.end()

    def answer(self, path: Path) -> Saved | None:
        if self._gone:
            return None
        with suppress(Exception):
            data = self._receive()
            if not data:
                return None
            saved = self._receiver.decode(data)
            if saved.path == path:
                return saved
        self.end()
        return None

    def _receive(self) -> bytes:
        out = self._process.stdout
        assert out is not None
        if not self._greeted and read_exactly(out, len(GREETING)) != GREETING:
            raise EOFError
        self._greeted = True
        return read_exactly(out, *LENGTH.unpack(read_exactly(out, LENGTH.size)))

    def end(self) -> None:
        self._gone = True
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # it had not taken a request
                pipe.close()
