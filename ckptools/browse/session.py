"""What is known of the checkpoint that is looked at: it is opened once, and the rooms of the commands make the records.

Methods that take the job in which they run may wait for files; they report to it, and end where it is stopped. What
the first screen does not need is imported when it is asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.display.next_command import quoted
from ckptools.files.location import location
from ckptools.files.opening import File
from ckptools.files.remote.path import RemotePath
from ckptools.formats.open import open_checkpoint, with_all_ranks
from ckptools.inspect.record import Report, inspect_report
from ckptools.keys.entries import EVERYTHING, Entry, Selection, entries_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.training_state import modules

if TYPE_CHECKING:
    from ckptools.browse.jobs import BackgroundJob
    from ckptools.consolidate.record import Consolidated
    from ckptools.contents.record import KeyRow, Keys, Shown
    from ckptools.diff.record import Difference
    from ckptools.doctor.record import Diagnosis
    from ckptools.ls.record import RunFolder
    from ckptools.stats.record import Statistics, Stats


@dataclass(frozen=True)
class Looked:
    """A checkpoint and its report; all that the first screen needs."""

    checkpoint: Checkpoint
    report: Report


@dataclass
class Session:
    """A checkpoint, the one that it is compared with, and what was read of them.

    Attributes:
        path: what the user named.
        other: what it is compared with; "" for nothing.
        how: options of `open_checkpoint`.
        elsewhere: bytes that other processes read of rank files, as opening counts them.
        seconds: time that reading took.
        before: what files had given before it began.
    """

    path: str
    other: str = ""
    how: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: int = 0
    seconds: float = 0.0
    before: int = field(default_factory=lambda: File.total_read)
    looked: Looked | None = None
    keys: Keys | None = None
    entries: Mapping[str, Entry] = field(default_factory=dict)
    difference: Difference | None = None
    second: Checkpoint | None = None
    run: RunFolder | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _one_reads: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _whole: Looked | None = None

    @property
    def nbytes(self) -> int:
        """Bytes read so far."""
        return File.total_read - self.before + self.elsewhere

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time that something reads."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - begun

    def _counted(self, opens: Callable[[], Checkpoint]) -> Checkpoint:
        """Open a checkpoint, and count what is not read in this process."""
        before = File.total_read
        with self.timed():
            found = opens()
        with self._lock:
            self.elsewhere += max(found.cost.nbytes - (File.total_read - before), 0)
        return found

    # -- opening ------------------------------------------------------------------------------------------------------

    def open(self, job: BackgroundJob) -> Looked:
        """Open the checkpoint as `inspect` does; to be compared, with every rank."""
        checkpoint = self._opened(self.path, job, all_ranks=bool(self.other))
        return Looked(checkpoint, inspect_report(checkpoint))

    def _opened(self, path: str, job: BackgroundJob, all_ranks: bool) -> Checkpoint:
        how = {"read_file": modules.read_file, **self.how, "all_ranks": all_ranks, "on_file": job.on_file}
        return self._counted(lambda: open_checkpoint(path, **how))

    def every_rank(self, job: BackgroundJob) -> Looked:
        """The checkpoint with every rank's structure; it is read once, and a job waits while another one reads it."""
        assert self.looked is not None
        known = self.looked.checkpoint
        if known.all_ranks:
            return self.looked
        while not self._one_reads.acquire(timeout=0.05):
            job.check()
        try:
            if self._whole is None:
                again = known.options and {"on_file": job.on_file}
                whole = self._counted(lambda: with_all_ranks(_with_options(known, again or {})))
                self._whole = Looked(whole, inspect_report(whole))
            return self._whole
        finally:
            self._one_reads.release()

    @property
    def is_far(self) -> bool:
        """Whether its files lie in a store, where more is read only if somebody asks."""
        return isinstance(location(self.path), RemotePath)

    def list_keys(self, looked: Looked) -> tuple[Keys, dict[str, Entry]]:
        """Every key, and its entry by name."""
        from ckptools.contents.tree import keys_of

        return keys_of(looked.checkpoint), {entry.name: entry for entry in entries_of(looked.checkpoint)}

    def values_of(self, rows: Sequence[KeyRow]) -> list[tuple[KeyRow, Any]]:
        """Rows of keys, each with its value."""
        return [(row, self.entries[row.name].value) for row in rows if row.name in self.entries]

    # -- on request ---------------------------------------------------------------------------------------------------

    def show(self, job: BackgroundJob, keys: Sequence[str], values: str | None = None) -> Shown:
        """What `show` has of some keys: shards by file, small figures, the elements of a slice, values by rank."""
        from ckptools.contents.show import show

        looked = self.every_rank(job)
        with self.timed():
            return show(looked.checkpoint, keys, values, private=True)

    def figures(self, job: BackgroundJob, names: Sequence[str]) -> Statistics[Stats]:
        """Figures and histograms of tensors, whose values are read for it."""
        from ckptools.stats.figures import statistics
        from ckptools.stats.reading import MeasuredPart

        checkpoint = self.every_rank(job).checkpoint
        wanted = set(names)
        found = [e for e in entries_of(checkpoint) if e.name in wanted and isinstance(e.value, Tensor)]
        parts = [MeasuredPart(entry.name, entry.section, entry.value, kind=entry.kind) for entry in found]
        with self.timed():
            return statistics(checkpoint.path, parts, True, self.how.get("jobs"), job.on_bytes, look=False)

    def compare(self, job: BackgroundJob, values: bool, names: Sequence[str] = ()) -> Difference:
        """Compare with the other checkpoint: structure and plain values, with `values` those of tensors too."""
        from ckptools.diff.compare import Wanted, compare

        if self.second is None:
            self.second = self._opened(self.other, job, all_ranks=True)
        selection = Selection(include=tuple(names)) if names else EVERYTHING
        wanted = Wanted(values, selection=selection, jobs=self.how.get("jobs"))
        with self.timed():
            return compare(self.every_rank(job).checkpoint, self.second, wanted, job.on_bytes)

    def list_run(self, job: BackgroundJob) -> RunFolder:
        """The checkpoints of the run: those in the folder that was named, or in the one that its file is in."""
        from ckptools.ls.listing import checkpoints_in

        path = location(self.path)
        with self.timed():
            return checkpoints_in(path if path.is_dir() else path.parent, on_found=job.on_file)

    def diagnose(self, job: BackgroundJob) -> Diagnosis:
        """What `doctor` says of a path that cannot be opened."""
        from ckptools.api.examination import doctor

        with self.timed():
            return doctor(self.path, on_found=job.on_file)

    # -- what is written ----------------------------------------------------------------------------------------------

    def consolidate(self, job: BackgroundJob, out: str, only: str | None, dry_run: bool) -> Consolidated:
        """Plan to write a part of the checkpoint, or write it."""
        from ckptools.consolidate.options import ConsolidateOptions
        from ckptools.consolidate.run import consolidate

        options = ConsolidateOptions(only=only, dry_run=dry_run, jobs=self.how.get("jobs"))
        with self.timed():
            return consolidate(self.every_rank(job).checkpoint, out, options, job.on_bytes)

    def write_report(self, job: BackgroundJob, out: str) -> Path:
        """Write the page that `report` writes; return its path."""
        from ckptools.report.html import write_report

        with self.timed():
            write_report(self.every_rank(job).checkpoint, out, progress=job.on_bytes)
        return Path(out)

    @property
    def arguments(self) -> str:
        """The arguments that open it again, for a command line."""
        return (self.looked.report.arguments if self.looked is not None else "") or quoted([self.path])


def _with_options(checkpoint: Checkpoint, changed: Mapping[str, Any]) -> Checkpoint:
    from dataclasses import replace

    return replace(checkpoint, options=replace(checkpoint.options, **changed)) if changed else checkpoint
