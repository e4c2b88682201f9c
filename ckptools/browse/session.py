"""The data behind `browse`: the checkpoint is opened once, and the packages of other commands make the records.

Methods with a `job` argument may wait for files; they report progress to the job, and end if it is stopped. Modules not
needed for the first screen are imported on use.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptools.display.next_command import instead_of_writing, quoted
from ckptools.files.opening import File, location
from ckptools.files.remote.path import RemotePath
from ckptools.formats.open import open_checkpoint, with_all_ranks
from ckptools.inspect.record import Report, inspect_report
from ckptools.keys.entries import EVERYTHING, Entry, Selection, entries_of, pattern, tensor_entries
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem, worst_first
from ckptools.model.records import grouped
from ckptools.rules.verdict import verdict_of
from ckptools.text import common_prefix, plural, size

if TYPE_CHECKING:
    from ckptools.browse.key_tree import Fault
    from ckptools.consolidate.record import Consolidated
    from ckptools.contents.record import KeyRow, Keys, Shown
    from ckptools.diff.record import Difference
    from ckptools.doctor.answers import Diagnosis
    from ckptools.ls.record import RunFolder
    from ckptools.stats.passes import MeasuredPart
    from ckptools.stats.record import Statistics, Stats


# -- background jobs, each in its own thread, so that a key press never waits for a file -------------------------------


Result = TypeVar("Result")


class JobStoppedError(Exception):
    """The user stopped a job, or started another in its place."""


class BackgroundJob:
    """A background job and its progress.

    Attributes:
        name: of the job, in words; a later job of the same name replaces it.
        files: the files read so far.
        shown: whether the status line shows it; short jobs would only flicker.
    """

    def __init__(self, name: str, shown: bool = True) -> None:
        self.name, self.shown = name, shown
        self.stopped = threading.Event()
        self.started = time.monotonic()
        self.files: set[Path] = set()
        self._nbytes = 0

    def on_file(self, path: Path) -> None:
        """Keep a file that was read, as the `on_file` callback of opening; raises if the job is stopped."""
        self.files.add(path)
        self.check()

    def on_bytes(self, nbytes: int, _: str) -> None:
        """Count bytes of a tensor, as a `Progress` callback."""
        self._nbytes += nbytes
        self.check()

    def check(self) -> None:
        """End the job if the user has stopped it.

        Raises:
            JobStoppedError: the job is stopped.
        """
        if self.stopped.is_set():
            raise JobStoppedError

    @property
    def words(self) -> str:
        """Describe the job and its progress: `reads every rank: 312 files, 4 s`."""
        counted = [plural(len(self.files), "file")] if self.files else []
        counted += [size(self._nbytes)] if self._nbytes else []
        counted += [f"{time.monotonic() - self.started:.0f} s"]
        return f"{self.name}: {', '.join(counted)}"


class Jobs:
    """The running jobs; `deliver` passes their results to the thread of the user interface.

    Threads are daemons, so a thread that waits for remote storage does not delay leaving. Results of stopped jobs are
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
        """Start a job, replacing one of the same name; `then` gets its result, `failed` its exception."""
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
        """Whether a job with this name is running, or was stopped and has not ended yet."""
        return any(job.name == name for job in list(self._threads))

    def finish(self, name: str) -> None:
        """Stop the job with this name, and wait until it has ended."""
        self.stop(name)
        for job, thread in list(self._threads.items()):
            if job.name == name:
                thread.join()

    def stop(self, name: str) -> None:
        """Stop the job with this name, if it is running."""
        job = self.running.pop(name, None)
        if job is not None:
            job.stopped.set()

    def stop_all(self) -> None:
        """Stop every job."""
        for name in list(self.running):
            self.stop(name)

    def stop_shown(self) -> bool:
        """Stop the jobs in the status line; return whether there were any."""
        names = [name for name, job in self.running.items() if job.shown]
        for name in names:
            self.stop(name)
        return bool(names)


# -- the session -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint and its report, as the first screen needs them."""

    checkpoint: Checkpoint
    report: Report


@dataclass
class Session:
    """A checkpoint, optionally a second one to compare, and records made so far.

    Attributes:
        path: path given by the user.
        other: path of the second checkpoint; "" for none.
        elsewhere: bytes of rank files that other processes have read.
        seconds: time spent reading.
        before: value of `File.total_read` when the session began.
        not_finite: by the name of a tensor whose values were read, a problem for each rank with NaN or infinity in it.
    """

    path: str
    other: str = ""
    how: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: int = 0
    seconds: float = 0.0
    before: int = field(default_factory=lambda: File.total_read)
    looked: CheckpointReport | None = None
    keys: Keys | None = None
    entries: Mapping[str, Entry] = field(default_factory=dict)
    difference: Difference | None = None
    second: Checkpoint | None = None
    run: RunFolder | None = None
    not_finite: dict[str, tuple[Problem, ...]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _one_reads: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _whole: CheckpointReport | None = None

    @property
    def nbytes(self) -> int:
        """Bytes read so far."""
        return File.total_read - self.before + self.elsewhere

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to `seconds`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - begun

    def _counted(self, opens: Callable[[], Checkpoint]) -> Checkpoint:
        """Open a checkpoint, and count bytes that other processes read."""
        before = File.total_read
        with self.timed():
            found = opens()
        with self._lock:
            self.elsewhere += max(found.cost.nbytes - (File.total_read - before), 0)
        return found

    # -- opening ------------------------------------------------------------------------------------------------------

    def open(self, job: BackgroundJob) -> CheckpointReport:
        """Open the checkpoint as `inspect` does, or with all ranks if it is compared."""
        checkpoint = self._opened(self.path, job, all_ranks=bool(self.other))
        return CheckpointReport(checkpoint, inspect_report(checkpoint))

    def _opened(self, path: str, job: BackgroundJob, all_ranks: bool) -> Checkpoint:
        how = {**self.how, "all_ranks": all_ranks, "on_file": job.on_file}
        return self._counted(lambda: open_checkpoint(path, **how))

    def every_rank(self, job: BackgroundJob) -> CheckpointReport:
        """Return the checkpoint with all ranks; only the first job reads them, and other jobs wait for it."""
        assert self.looked is not None
        known = self.looked.checkpoint
        if known.all_ranks:
            return self.looked
        while not self._one_reads.acquire(timeout=0.05):
            job.check()
        try:
            if self._whole is None:
                if known.options:
                    known = replace(known, options=replace(known.options, on_file=job.on_file))
                whole = self._counted(lambda: with_all_ranks(known))
                self._whole = CheckpointReport(whole, inspect_report(whole))
            return self._whole
        finally:
            self._one_reads.release()

    @property
    def is_far(self) -> bool:
        """Whether the files are remote, so that more is read only on request."""
        return isinstance(location(self.path), RemotePath)

    def list_keys(self, looked: CheckpointReport) -> tuple[Keys, dict[str, Entry]]:
        """List the keys, and map each name to its entry."""
        from ckptools.contents.tree import keys_of

        return keys_of(looked.checkpoint), {entry.name: entry for entry in entries_of(looked.checkpoint)}

    @property
    def found(self) -> list[Problem]:
        """The problems of values that were read."""
        return [problem for problems in self.not_finite.values() for problem in problems]

    def judged(self) -> CheckpointReport:
        """The checkpoint as far as it is read, judged with the values that were read."""
        known = self._whole or self.looked
        assert known is not None
        if not self.found:
            return known
        ck, report = known.checkpoint, known.report
        problems = [*ck.problems, *self.found]
        following = instead_of_writing(report.arguments, report.next, problems)
        every = worst_first(dict.fromkeys([*report.problems, *self.found]))
        return CheckpointReport(ck, report._replace(verdict=verdict_of(ck, problems), problems=every, next=following))

    def values_of(self, rows: Sequence[KeyRow]) -> list[tuple[KeyRow, Any]]:
        """Return the given rows with the values of their keys."""
        return [(row, self.entries[row.name].value) for row in rows if row.name in self.entries]

    # -- on request ---------------------------------------------------------------------------------------------------

    def show(self, job: BackgroundJob, keys: Sequence[str], values: str | None = None) -> Shown:
        """Make the record of `show`: shards by file, small statistics, elements of a slice, values by rank."""
        from ckptools.contents.show import show

        looked = self.every_rank(job)
        with self.timed():
            found = show(looked.checkpoint, keys, values, private=True)
        counted = [(row.name, row.statistics) for row in found.rows if row.statistics is not None]
        odd = [name for name, figures in counted if figures["nan"] or figures["inf"]]
        self._locate(job, [*odd, *(row.name for row in found.rows if _has_nan(row.values))])
        return found

    def figures(self, job: BackgroundJob, names: Sequence[str]) -> Statistics[Stats]:
        """Compute statistics and histograms of tensors, reading their values."""
        from ckptools.stats.figures import statistics

        checkpoint = self.every_rank(job).checkpoint
        parts = measured_parts(checkpoint, names)
        with self.timed():
            found = statistics(checkpoint.path, parts, True, self.how.get("jobs"), job.on_bytes, look=False)
        self._locate(job, [row.name for row in found.rows if row.nonfinite])
        return found

    def _locate(self, job: BackgroundJob, names: Sequence[str]) -> None:
        """Find out which ranks have NaN or infinity in some tensors, and where."""
        from ckptools.stats.figures import statistics
        from ckptools.stats.passes import of_each_rank

        new = [name for name in names if name not in self.not_finite]
        if not new:
            return
        checkpoint = self.every_rank(job).checkpoint
        parts = [part for whole in measured_parts(checkpoint, new) for part in of_each_rank(whole)]
        with self.timed():
            found = statistics(checkpoint.path, parts, False, self.how.get("jobs"), job.on_bytes)
        odd = [one for one in found.suspects if one.what == "not finite"]
        for name, same in grouped(odd, lambda one: one.name).items():
            self.not_finite[name] = tuple(Problem(Code.NOT_FINITE, one.words, one.rank, name) for one in same)

    def compare(self, job: BackgroundJob, values: bool, names: Sequence[str] = ()) -> Difference:
        """Compare with the other checkpoint: structure and plain values; with `values`, also tensor values."""
        from ckptools.diff.compare import Wanted, compare
        from ckptools.diff.record import NOT_FINITE

        if self.second is None:
            self.second = self._opened(self.other, job, all_ranks=True)
        selection = Selection(include=tuple(names)) if names else EVERYTHING
        wanted = Wanted(values, selection=selection, jobs=self.how.get("jobs"))
        with self.timed():
            found = compare(self.every_rank(job).checkpoint, self.second, wanted, job.on_bytes)
        self._locate(job, [row.name for row in found.tensors if NOT_FINITE in row.detail])
        return found

    def list_run(self, job: BackgroundJob) -> RunFolder:
        """List the checkpoints in the given folder, or in the folder of the given file."""
        from ckptools.ls.rows import checkpoints_in

        path = location(self.path)
        with self.timed():
            return checkpoints_in(path if path.is_dir() else path.parent, on_found=job.on_file)

    def diagnose(self, job: BackgroundJob) -> Diagnosis:
        """Make the record of `doctor` for a path that cannot be opened."""
        from ckptools.doctor.examination import examined

        with self.timed():
            return examined(self.path, on_found=job.on_file)

    # -- writing files ------------------------------------------------------------------------------------------------

    def consolidate(self, job: BackgroundJob, out: str, only: str | None, dry_run: bool) -> Consolidated:
        """Plan to write a part of the checkpoint, or write it."""
        from ckptools.consolidate.options import ConsolidateOptions
        from ckptools.consolidate.run import consolidate

        options = ConsolidateOptions(only=only, dry_run=dry_run, jobs=self.how.get("jobs"))
        with self.timed():
            return consolidate(self.every_rank(job).checkpoint, out, options, job.on_bytes)

    def write_report(self, job: BackgroundJob, out: str) -> Path:
        """Write the page of `report`; return its path."""
        from ckptools.report.html import write_report

        with self.timed():
            write_report(self.every_rank(job).checkpoint, out, progress=job.on_bytes)
        return Path(out)

    @property
    def arguments(self) -> str:
        """Command-line arguments that open the checkpoint again."""
        return (self.looked.report.arguments if self.looked is not None else "") or quoted([self.path])


def measured_parts(ck: Checkpoint, names: Iterable[str]) -> list[MeasuredPart]:
    """Some tensors of a checkpoint as parts to compute statistics of."""
    from ckptools.stats.passes import MeasuredPart

    wanted = set(names)
    return [MeasuredPart.of(entry) for entry in tensor_entries(ck) if entry.name in wanted]


def _has_nan(values: Any) -> bool:
    """Whether the elements of a slice, as nested lists, have NaN or infinity among them."""
    if isinstance(values, (list, tuple)):
        return any(map(_has_nan, values))
    return isinstance(values, float) and not math.isfinite(values)


def faulty_keys(problems: Iterable[Problem], entries: Iterable[Entry]) -> dict[str, Fault]:
    """The worst fault of each key that errors and warnings name, or that lies in a part that they name."""
    from ckptools.browse.key_tree import NAN, Fault

    faults: dict[str, Fault] = {}
    for problem in worst_first(problems):
        if problem.severity != "note" and problem.tensor is not None:
            words = NAN if problem.kind is Code.NOT_FINITE else problem.code
            faults.setdefault(problem.tensor, Fault(words, "bad" if problem.severity == "error" else "warn"))
    found: dict[str, Fault] = {}
    for entry in entries if faults else ():
        parts = (part for name in entry.names for part in _and_above(name))
        fault = next((faults[part] for part in parts if part in faults), None)
        if fault is not None:
            found[entry.name] = fault
    return found


def _and_above(name: str) -> Iterator[str]:
    """Yield a dotted name, and the names of the parts in which it lies."""
    while name:
        yield name
        name = name.rpartition(".")[0]


# -- the command line that shows or does the same ----------------------------------------------------------------------


def command_line(command: str, arguments: str, *words: str) -> str:
    """Make a command line from a command, arguments that open the checkpoint, and further words."""
    return " ".join(["ckptools", command, arguments, *([quoted(words)] if words else [])])


def escaped(name: str) -> str:
    """Make a glob that matches exactly this name: `[*]` stands for `*`."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def glob_of(rows: Sequence[KeyRow], others: Iterable[KeyRow]) -> str | None:
    """Find one simple glob that matches exactly the names of some keys among `others`; None if there is none."""
    names = [row.name for row in rows]
    wanted = set(names)
    every = [row.name for row in others]
    for candidate in _candidates(names):
        matches = pattern((candidate,)).fullmatch
        if {name for name in every if matches(name)} == wanted:
            return candidate
    return None


def _candidates(names: Sequence[str]) -> list[str]:
    """List globs to try: the name; the common prefix of names up to a dot, in full, with the common suffix; `*`."""
    if not names:
        return []
    if len(names) == 1:
        return [escaped(names[0])]
    first, last = min(names), max(names)
    begin = common_prefix(first, last)
    turned = [name[::-1] for name in names]
    low, high = min(turned), max(turned)
    end = common_prefix(low, high)
    head = first[:begin]
    tail = low[: min(end, min(map(len, names)) - begin)][::-1]
    whole = head[: head.rfind(".") + 1]
    return [f"{escaped(whole)}*", f"{escaped(head)}*", f"{escaped(head)}*{escaped(tail)}", "*"]
