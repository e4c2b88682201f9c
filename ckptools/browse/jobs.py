"""Work that takes time, each in a thread of its own, so that a key press never waits for a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ckptools.text import plural, size

Result = TypeVar("Result")


class JobStoppedError(Exception):
    """The user stopped a job, or asked for something else."""


class BackgroundJob:
    """One piece of work, and how far it is.

    Attributes:
        name: what it is, in words; a later job of the same name takes its place.
        shown: whether the status line names it; work of a moment only flickers there.
    """

    def __init__(self, name: str, shown: bool = True) -> None:
        self.name, self.shown = name, shown
        self.stopped = threading.Event()
        self.started = time.monotonic()
        self._files = 0
        self._nbytes = 0

    def on_file(self, _: Path) -> None:
        """Count a file that was read; it is what opening calls for each, and where that ends early."""
        self._files += 1
        self.check()

    def on_bytes(self, nbytes: int, _: str) -> None:
        """Count bytes of a tensor, as `Progress` does."""
        self._nbytes += nbytes
        self.check()

    def check(self) -> None:
        """End the work if the user has stopped it.

        Raises:
            JobStoppedError: it is stopped.
        """
        if self.stopped.is_set():
            raise JobStoppedError

    @property
    def words(self) -> str:
        """What it does and how far it is: `reads every rank: 312 files, 4 s`."""
        counted = [plural(self._files, "file")] if self._files else []
        counted += [size(self._nbytes)] if self._nbytes else []
        counted += [f"{time.monotonic() - self.started:.0f} s"]
        return f"{self.name}: {', '.join(counted)}"


class Jobs:
    """The jobs that run; results are handed over in the thread of the user interface by `deliver`.

    Threads are daemons: one that waits for a store keeps nobody from leaving. What a stopped job still returns is
    dropped.
    """

    def __init__(self, deliver: Callable[[Callable[[], None]], None]) -> None:
        self._deliver = deliver
        self.running: dict[str, BackgroundJob] = {}
        self._threads: dict[BackgroundJob, threading.Thread] = {}

    def start(
        self,
        name: str,
        work: Callable[[BackgroundJob], Result],
        then: Callable[[Result], None],
        failed: Callable[[Exception], None],
        shown: bool = True,
    ) -> None:
        """Begin a job in place of one of the same name; `then` gets its result, `failed` what it raised."""
        self.stop(name)
        job = self.running[name] = BackgroundJob(name, shown)

        def run() -> None:
            result: Any = None
            error: Exception | None = None
            try:
                result = work(job)
            except Exception as raised:
                error = raised
            del self._threads[job]
            if job.stopped.is_set():
                return
            with suppress(RuntimeError):  # the user has left
                self._deliver(lambda: self._ended(job, (lambda: failed(error)) if error else lambda: then(result)))

        self._threads[job] = threading.Thread(target=run, name=f"ckptools {name}", daemon=True)
        self._threads[job].start()

    def _ended(self, job: BackgroundJob, hand_over: Callable[[], None]) -> None:
        if self.running.get(job.name) is job:
            del self.running[job.name]
        if not job.stopped.is_set():
            hand_over()

    def is_busy(self, name: str) -> bool:
        """Whether a job of a name runs, or was stopped and has not ended yet."""
        return any(job.name == name for job in list(self._threads))

    def finish(self, name: str) -> None:
        """Stop the job of a name, and wait until it has ended."""
        self.stop(name)
        for job, thread in list(self._threads.items()):
            if job.name == name:
                thread.join()

    def stop(self, name: str) -> None:
        """Stop the job of a name, if there is one."""
        job = self.running.pop(name, None)
        if job is not None:
            job.stopped.set()

    def stop_all(self) -> None:
        """Stop every job."""
        for name in list(self.running):
            self.stop(name)

    def stop_shown(self) -> bool:
        """Stop the jobs that the user sees; return whether there are any."""
        names = [name for name, job in self.running.items() if job.shown]
        for name in names:
            self.stop(name)
        return bool(names)
