"""Whole processes, timed from outside: wall seconds and peak memory, in turn with what they are compared with."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Thread

NAMES, FIGURES = 46, 9
"""Widths of a table's columns: what was measured, and each figure of it."""


@dataclass(frozen=True)
class Run:
    """One finished process.

    Attributes:
        seconds: wall time.
        cpu: seconds of the processor, which tell more where others use the machine too.
        peak: largest resident memory in bytes, as the kernel counted it; where this process has had more itself, as it
            was seen every 5 ms, for the kernel lets a process begin with the peak of whoever starts it.
        files: most files that it was seen to have open; 0 unless it was watched.
        peak_of_all: most resident memory in bytes that it and the processes that it started were seen to have
            together; what they share counts for each. 0 unless it was watched.
    """

    seconds: float
    cpu: float
    peak: int
    files: int = 0
    peak_of_all: int = 0


def run(command: Sequence[str], watch: bool = False) -> Run:
    """Run a command to its end and take its figures.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, env=_as_installed(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    seen = _Seen()
    Thread(target=_watch, args=(process.pid, seen, watch), daemon=True).start()
    assert process.stderr is not None
    with _running(process):
        told = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    # Of hollow files ckptools says that something is wrong with them, which is 1; a plan of 400 GB has no room: 4.
    if process.returncode not in ((0, 1, 4) if "ckptools" in command else (0,)):
        raise RuntimeError(f"{' '.join(command)}\n{told.decode(errors='replace')}")
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = usage.ru_maxrss * 1024 if usage.ru_maxrss > own else seen.peak
    return Run(seconds, usage.ru_utime + usage.ru_stime, peak, seen.files, seen.peak_of_all)


@dataclass
class _Seen:
    """What was seen of a process so far: as in `Run`."""

    files: int = 0
    peak: int = 0
    peak_of_all: int = 0


_RUNNING: set[subprocess.Popen[bytes]] = set()


@contextmanager
def _running(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Know of a process, so that whoever ends this one ends it too."""
    _RUNNING.add(process)
    try:
        yield
    except BaseException:
        process.kill()
        raise
    finally:
        _RUNNING.discard(process)


def _end(number: int, _: object) -> None:
    for process in _RUNNING:
        process.kill()
    sys.exit(128 + number)


def _as_installed() -> dict[str, str]:
    """The environment, with leave to keep bytecode: installed packages have it, and a work tree after its first run."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _watch(pid: int, seen: _Seen, closely: bool) -> None:
    """Look at the peak of a process until it is gone; closely: at its descriptors and its family's memory too."""
    with suppress(OSError, StopIteration):
        while True:
            seen.peak = max(seen.peak, high_water(pid))
            if closely:
                seen.files = max(seen.files, len(os.listdir(f"/proc/{pid}/fd")))  # noqa: PTH208 – a Path each costs more
                seen.peak_of_all = max(seen.peak_of_all, _resident(pid))
            time.sleep(0.005)


def high_water(pid: int | str = "self") -> int:
    """Largest resident memory in bytes of a process since it began its program. Source: proc(5), `VmHWM`."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in status if line.startswith("VmHWM:")))


def _resident(pid: int) -> int:
    """Resident memory in bytes of a process and of those that it started. Source: proc(5), `statm` and `children`."""
    found = 0
    with suppress(OSError):  # one that is gone
        found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += sum(_resident(int(child)) for child in (task / "children").read_text().split())
    return found


@dataclass(frozen=True)
class Pair:
    """Two commands, run in turn.

    Attributes:
        ours: the runs of the first.
        theirs: the runs of the second.
    """

    ours: tuple[Run, ...]
    theirs: tuple[Run, ...]

    @property
    def ratio(self) -> float:
        """Median over the pairs of ours / theirs, in wall time."""
        return statistics.median(a.seconds / b.seconds for a, b in zip(self.ours, self.theirs, strict=True))

    def over(self, start: float) -> float:
        """Median over the pairs of (ours - `start` seconds) / theirs, for figures that allow some time to start."""
        return statistics.median((a.seconds - start) / b.seconds for a, b in zip(self.ours, self.theirs, strict=True))

    def beyond(self, start: Sequence[Run]) -> tuple[float, float]:
        """Median over the pairs of (ours - what it takes to start) / theirs, in wall time and in the processor's.

        Args:
            start: runs of the same command that end where its work would begin.
        """
        wall, cpu = seconds(start), statistics.median(run.cpu for run in start)
        pairs = list(zip(self.ours, self.theirs, strict=True))
        walls = ((a.seconds - wall) / b.seconds for a, b in pairs)
        return statistics.median(walls), statistics.median((a.cpu - cpu) / b.cpu for a, b in pairs)


def in_turn(
    ours: Sequence[str], theirs: Sequence[str], rounds: int, between: Callable[[], None] = lambda: None
) -> Pair:
    """Run two commands A B A B …, `between` after each; one pair before is not counted."""
    pairs = []
    for _ in range(rounds + 1):
        mine = run(ours)
        between()
        other = run(theirs)
        between()
        pairs.append((mine, other))
    return Pair(tuple(a for a, _ in pairs[1:]), tuple(b for _, b in pairs[1:]))


def seconds(runs: Sequence[Run]) -> float:
    """Median wall seconds."""
    return statistics.median(r.seconds for r in runs)


def peak(runs: Sequence[Run]) -> float:
    """Largest peak memory, in MiB."""
    return max(r.peak for r in runs) / 2**20


@contextmanager
def workplace(keep: Path | None) -> Iterator[Path]:
    """A folder for inputs, in memory where that can be; removed at the end unless the caller has one to keep."""
    memory_disk = Path("/dev/shm")
    work = keep or Path(tempfile.mkdtemp(prefix="ckptools-bench-", dir=memory_disk if memory_disk.is_dir() else None))
    work.mkdir(exist_ok=True)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield work
    finally:
        signal.signal(signal.SIGTERM, before)
        if not keep:
            shutil.rmtree(work)


def table_as_measured(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table, each as soon as its row is there; so the widths cannot be those of the widest cells."""
    widths = [NAMES, *(max(len(title), FIGURES) for title in titles[1:])]
    for row in chain((titles, ["-" * width for width in widths]), rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
