"""The record of `ls`: the checkpoints of a run, and the newest whole one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckptools.display.page import PagedRecord, ScreenPage
from ckptools.display.screen import Mark
from ckptools.display.tables import MAX_LINE, WAYS_OUT, Column
from ckptools.formats.shared.several_checkpoints import By
from ckptools.model.problems import Severity
from ckptools.model.records import Rows, displayed, grouped
from ckptools.model.verdict import Depth
from ckptools.option import in_python
from ckptools.text import clip, clip_middle, duration, few, moment, plural, printable, size

if TYPE_CHECKING:
    from ckptools.pictures.plots import RunPlots

LookedInto = Literal["nothing", "inspect", "verify", "verify --deep", "verify --values", "verify --deep --values"]
"""How much of a checkpoint was read: the command that reads as much."""


@displayed
@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint of a run.

    Attributes:
        name: path relative to the run folder.
        format: name of the format that read it; "" if it cannot be opened.
        step_agrees: whether all sources of the step agree.
        ranks: number of ranks with complete files.
        whole: None if no problem was seen but not every file was read.
        verdict: the headline of `inspect`, or of `verify` if it was verified.
        why: the worst incidents, each with its first code, and the number of others; "" if there are none.
        remedy: for the first cause; "" if none is known.
        codes: codes of all errors and warnings.
        saved: time of its last file, in UTC: `2026-11-20T01:42:07Z`; None without files.
        being_written: whether its files changed between two listings.
        lr: learning rate of each param group, in the order of the file; empty if unknown.
    """

    name: str
    path: str
    format: str = ""
    step: int | None = None
    step_agrees: bool = True
    ranks: int = 0
    world_size: int | None = None
    files: int = 0
    bytes: int = 0
    whole: bool | None = None
    verdict: str = ""
    why: str = ""
    codes: tuple[str, ...] = ()
    looked_into: LookedInto = "nothing"
    saved: str | None = None
    newest_whole: bool = False
    being_written: bool = False
    notes: tuple[str, ...] = ()
    lr: tuple[float, ...] = ()
    recoverable: bool | None = None
    joinable: bool | None = None
    depth: Depth = "nothing"
    remedy: str = ""

    def _summary(self) -> str:
        step = "" if self.step is None else f"step {self.step}, "
        return f"{clip_middle(self.name, 60)}: {step}{self.verdict}, {size(self.bytes)}"


def seconds_of(saved: str) -> float:
    """Convert the time of a row to seconds since 1970."""
    return datetime.fromisoformat(saved.replace("Z", "+00:00")).timestamp()


@displayed
@dataclass(frozen=True)
class TrackerRow:
    """A tracker file or link, such as `latest`, from which a run resumes, and the checkpoint that it names, if any.

    Severity and problem are empty if it names the newest whole checkpoint.
    """

    name: str
    checkpoint: str | None
    step: int | None
    severity: Severity | Literal[""] = ""
    problem: str = ""


@displayed
@dataclass(frozen=True)
class LeftOverRow:
    """A temporary file or folder of an interrupted or running write, and the time of the last write, in UTC."""

    name: str
    bytes: int
    saved: str | None


@displayed
@dataclass(frozen=True)
class RunFolder(PagedRecord):
    """The checkpoints in a folder, the newest first.

    Attributes:
        ok: whether no checkpoint is known to be broken, and no tracker names a wrong one; warnings do not count.
        checkpoints: number of checkpoints; `rows` may list only some.
        newest_whole: path of the newest whole checkpoint; None if none is proven to be whole.
        trackers: files and links that name a checkpoint.
        ordered_by: criterion for which checkpoint is newer; `nothing` if there is none.
        wrong_not_older: names of checkpoints that are not whole, or have other errors, and may be newer than the newest
            whole one; the newest first.
        notes: skipped entries, and contradictions.
    """

    path: Path
    ok: bool
    rows: Rows[CheckpointRow]
    checkpoints: int
    newest_whole: str | None
    ordered_by: By
    trackers: Rows[TrackerRow] = field(default_factory=Rows)
    left_over: Rows[LeftOverRow] = field(default_factory=Rows)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    wrong_not_older: tuple[str, ...] = ()

    @property
    def plot(self) -> RunPlots:
        """Pictures of the run: `run.plot.steps()`."""
        from ckptools.pictures.plots import RunPlots

        return RunPlots(self)

    @in_python
    def report(
        self,
        out: str | Path,
        *,
        deep: bool = False,
        values: bool = False,
        ignore: Iterable[str] = (),
        force: bool = False,
        jobs: int | None = None,
    ) -> Path:
        """Verify every checkpoint of the run, and write a page of HTML: a timeline, sizes, and a part about each.

        `deep`, `values` and `ignore` are arguments of `Checkpoint.verify`; `force` overwrites the file.

        Raises:
            OutputExistsError: the file exists, or is a file of a checkpoint.
            ReadError, WriteError: the folder cannot be listed, or the page cannot be written.
            UsageError: the name does not end in `.html`, its folder does not exist, or a code does not exist.
        """
        from ckptools.report.run import write_run_report

        write_run_report(self.path, out, {"jobs": jobs}, force=force, deep=deep, values=values, ignore=tuple(ignore))
        return Path(out)

    @property
    def newest(self) -> CheckpointRow | None:
        """The row of the newest whole checkpoint; None if none is proven to be whole."""
        return next((row for row in self.rows if row.newest_whole), None)

    @property
    def readable(self) -> bool:
        """Whether at least one checkpoint could be opened."""
        return any(row.format for row in self.rows)

    def _fill(self, page: ScreenPage) -> None:
        page.line(headline(self), "bad" if self.newest_whole is None and self.checkpoints else "heading")
        page.gap()
        _fill_table(self, page)
        page.gap()
        _fill_problems(self, page)
        page.gap()
        for note in self.notes:
            page.line(_shown(note), "dim", label="note: ", label_mark="")

    def _summary(self) -> str:
        newest = f"newest whole {self.newest_whole}" if self.newest_whole else "NONE IS WHOLE"
        found = plural(self.checkpoints, "checkpoint")
        return f"{clip_middle(str(self.path), 40)}: {found}, {newest if self.checkpoints else 'so far'}"


# -- the parts of its page: a row for each checkpoint, and the problems below ------------------------------------------


class RunCells(NamedTuple):
    """The cells of a checkpoint's row, named as the columns."""

    step: str
    ranks: str
    size: str
    whole: str
    saved: str
    checkpoint: str
    note: str


COLUMN_OF = {
    "step": Column("step", "number"),
    "ranks": Column("ranks", "number"),
    "size": Column("size", "number"),
    "whole": Column("whole", "verdict"),
    "saved": Column("saved", "provenance"),
    "checkpoint": Column("checkpoint", "name"),
    "note": Column("note"),
}

COLUMNS = tuple(COLUMN_OF[name] for name in RunCells._fields)

MAX_VERDICT = 80
"""Widest verdict in its column."""

MAX_DETAILS = 10
"""At most this many checkpoints have their problems listed on a terminal."""


def headline(run: RunFolder) -> str:
    """State the number of checkpoints, and the newest whole one."""
    newest = run.newest
    found = f"{plural(run.checkpoints, 'checkpoint')} in {printable(str(run.path))}"
    if run.newest_whole is None:
        none = "NONE IS WHOLE" + (" AND FREE OF ERRORS" if any(row.whole and row.why for row in run.rows) else "")
        return f"{found}; {none}" if run.checkpoints else f"{found} so far"
    name = called(newest) if newest else printable(run.newest_whole)
    if run.ordered_by == "nothing" and run.checkpoints > 1:
        return f"{found}; {name} is whole; nothing says which is the newest"
    return f"{found}; newest whole: {name}"


def called(row: CheckpointRow) -> str:
    """Name a checkpoint by step and name: `step 4, ep0-ba4-rank0.pt`."""
    return printable(row.name if row.step is None else f"step {row.step}, {row.name}")


def _fill_table(run: RunFolder, page: ScreenPage) -> None:
    columns = dict(COLUMN_OF)
    # The table shows only the part of the verdict before the colon; the rest stands below the table.
    cells = [row._replace(whole=row.whole.partition(":")[0]) for row in all_cells(run)]
    days = {row.saved.partition(" ")[0] for row in cells} - {"-"}
    if page.screen.width is not None and len(days) == 1:  # a common day moves to the heading
        columns["saved"] = columns["saved"]._replace(title=f"saved {days.pop()}")
        cells = [row._replace(saved=row.saved.rpartition(" ")[2]) for row in cells]
    page.table(plural(len(cells), "checkpoint"), [*columns.values()], cells, opened=True)
    if left := run.checkpoints - len(run.rows):
        page.line(f"{left} more (--limit 0: all of them)")


def all_cells(run: RunFolder) -> list[RunCells]:
    """Make the cells of all rows."""
    trackers = grouped(run.trackers, lambda tracker: tracker.checkpoint)
    mark = "whole" if run.ordered_by == "nothing" and run.checkpoints > 1 else "newest whole"
    return [cells_of(row, [tracker.name for tracker in trackers.get(row.name, ())], mark) for row in run.rows]


def cells_of(row: CheckpointRow, trackers: Sequence[str] = (), newest: str = "newest whole") -> RunCells:
    """Make the cells of one checkpoint's row."""
    whole = "whole" if row.whole and not row.codes else clip(row.verdict, MAX_VERDICT)
    marks = [f"<- {newest}"] if row.newest_whole else []
    marks += ["being written"] if row.being_written else []
    marks += [f"{few(trackers, 2)} point{'s' if len(trackers) == 1 else ''} here"] if trackers else []
    marks += [] if row.step_agrees else ["name says another step"]
    step = "-" if row.step is None else str(row.step)
    return RunCells(step, _ranks(row), size(row.bytes), whole, _local(row.saved), row.name, ", ".join(marks))


def change_line(event: str, row: CheckpointRow) -> str:
    """Render a change of a checkpoint in a line: `new  step 4  2/2 ranks  2.3 MiB  whole: yes  ep0-ba4-rank0.pt`."""
    cells = cells_of(row)
    ranks = cells.ranks if not row.ranks else f"{cells.ranks} ranks"
    newest = ["<- newest whole"] if row.newest_whole and event != "gone" else []
    facts = [f"step {cells.step}", ranks, cells.size, cells.whole, cells.checkpoint, *newest]
    return printable("  ".join([event.ljust(13), *facts]))


def _ranks(row: CheckpointRow) -> str:
    if row.format and row.files == 1 and row.whole and row.world_size in (None, 1):
        return "one file"
    if not row.format or not row.ranks:
        return plural(row.files, "file")
    return str(row.ranks) if row.world_size is None else f"{row.ranks}/{row.world_size}"


def _local(saved: str | None) -> str:
    return "-" if saved is None else moment(seconds_of(saved))


def _shown(text: str) -> str:
    return clip_middle(printable(text), MAX_LINE)


def _fill_problems(run: RunFolder, page: ScreenPage) -> None:
    """Add the causes of each broken checkpoint, the remedy for the first cause, wrong trackers, and left-over files."""
    wrong = [row for row in run.rows if row.why or row.notes or _reason(row)]
    kept = wrong if page.screen.rows is None else wrong[:MAX_DETAILS]
    for row in kept:
        name = f"  {clip_middle(called(row), 60)}: "
        if row.why or _reason(row):
            page.line(_shown(row.why or _reason(row)), label=name)
        if row.remedy:
            page.line(_shown(row.remedy), "dim", label=WAYS_OUT)
        for note in row.notes:
            page.line(_shown(note), label=name)
    if len(kept) < len(wrong):
        page.line(f"  of {len(wrong) - len(kept)} more when piped")
    for tracker in run.trackers:
        if tracker.problem:
            word = "tracker" if tracker.severity == "error" else "tracker (warning)"
            name = f"  {word} {clip_middle(printable(tracker.name), 60)}: "
            mark: Mark = "bad" if tracker.severity == "error" else "warn"
            page.line(_shown(tracker.problem), label=name, label_mark=mark)
    if run.left_over:
        left = [
            f"{clip_middle(printable(one.name), 60)} ({size(one.bytes)}, {_local(one.saved)})" for one in run.left_over
        ]
        page.line(few(left), label="  CK008 left over from a write, or still being written: ")


def _reason(row: CheckpointRow) -> str:
    """The part of a verdict after the colon, if the checkpoint is broken or has problems."""
    return row.verdict.partition(": ")[2] if row.codes or not row.whole else ""


def cost_line(run: RunFolder) -> str:
    """State how much of the checkpoints was read, and the time."""
    verified = [row for row in run.rows if row.looked_into.startswith("verify")]
    others = sum(row.looked_into == "inspect" for row in run.rows)
    what = "read and compared with its checksums" if any("deep" in row.looked_into for row in verified) else "read"
    parts = [f"every rank of {few([_step(row) for row in verified], 4)} was {what}"] if verified else []
    parts += [f"{plural(others, 'other' if verified else 'checkpoint')} looked into as inspect does"] if others else []
    return f"{'; '.join(parts) or 'nothing could be read'}; {duration(run.seconds)}"


def _step(row: CheckpointRow) -> str:
    return printable(clip_middle(row.name, 60)) if row.step is None else f"step {row.step}"
