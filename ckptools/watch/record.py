"""The record of `watch`: events of a run's checkpoints, and the newest proven one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckptools.display.page import PagedRecord, ScreenPage
from ckptools.ls.record import CheckpointRow, change_line, seconds_of
from ckptools.model.records import Rows, displayed, to_dict
from ckptools.text import clip, clip_middle, duration, few, moment, number, plural, printable

EventKind = Literal[
    "being written", "proven", "problem", "drift", "gone", "may go", "deleted", "not deleted", "unreachable"
]

PROBLEMS: tuple[EventKind, ...] = ("problem", "drift", "unreachable", "not deleted")
"""Events that need attention: `--on-problem` is run for them, and the exit code is 1."""


@displayed
@dataclass(frozen=True)
class WatchEvent:
    """An event of one checkpoint: it was proven, has a problem, drifts, was deleted, and so on.

    Attributes:
        row: the checkpoint, as `ls` lists it; `looked_into` says how far it was verified.
        time: of the event, in UTC: `2026-11-20T01:42:07Z`.
        norm: l2 norm of the model's floating-point tensors; None unless values were read.
        drift: norm divided by the norm of the last proven checkpoint before it; None without one.
        drifted: tensors of the model whose norms changed most, with both norms; only for `drift`.
        detail: further words.
    """

    event: EventKind
    row: CheckpointRow
    time: str
    norm: float | None = None
    drift: float | None = None
    drifted: tuple[str, ...] = ()
    detail: str = ""

    @property
    def is_problem(self) -> bool:
        """Whether the event needs attention."""
        return self.event in PROBLEMS

    def _record(self) -> dict[str, Any]:
        names = ("time", "norm", "drift", "drifted", "detail")
        return {"event": self.event, **to_dict(self.row), **{name: getattr(self, name) for name in names}}

    def _summary(self) -> str:
        return f"{self.event}: {self.row._summary()}"


@displayed
@dataclass(frozen=True)
class Watched(PagedRecord):
    """One look at a run folder.

    Attributes:
        ok: True if no checkpoint has a problem or drifts, and no tracker names a wrong one.
        rows: events since the last look, or since an earlier process if the state file has its results.
        newest_proven: path of the newest checkpoint that was verified without a problem; None if there is none.
        waiting: names of checkpoints written too recently to be verified.
        problems: names of checkpoints with a problem.
        state: path of the state file.
        seconds: wall time.
    """

    path: Path
    ok: bool
    rows: Rows[WatchEvent]
    checkpoints: int
    newest_proven: str | None
    waiting: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    state: Path | None = None
    seconds: float = 0.0

    def _fill(self, page: ScreenPage) -> None:
        newest = f"newest proven: {self.newest_proven}" if self.newest_proven else "NONE IS PROVEN"
        parts = [f"{plural(self.checkpoints, 'checkpoint')} in {self.path}; {newest}"]
        parts += [f"{plural(len(self.problems), 'problem')}: {few(self.problems)}"] if self.problems else []
        parts += [f"still being written: {few(self.waiting)}"] if self.waiting else []
        page.lines([*map(event_line, self.rows), "; ".join([*parts, duration(self.seconds)])])

    def _summary(self) -> str:
        newest = f"newest proven {self.newest_proven}" if self.newest_proven else "NONE IS PROVEN"
        return f"{clip_middle(str(self.path), 40)}: {plural(self.checkpoints, 'checkpoint')}, {newest}"


# -- an event as text --------------------------------------------------------------------------------------------------


MAX_WHY = 300
"""Longest description of a problem in a line, in characters."""


def event_line(event: WatchEvent) -> str:
    """Render an event: `2026-11-20 01:42:07  proven         step 4  2/2 ranks  2.3 MiB  whole  ep0-ba4  norm 12.3`."""
    row = event.row
    parts = [change_line(event.event, row)]
    parts += [f"norm {number(event.norm)}"] if event.norm is not None else []
    parts += [f"x {event.drift:.3g}"] if event.drift is not None else []
    judged = event.event in ("proven", "problem")
    said = [row.why if event.event == "problem" else "", event.detail, few(event.drifted)]
    why = "; ".join(filter(None, [*said, *(row.notes if judged else ())]))
    parts += [clip(printable(why), MAX_WHY)] if why else []
    return f"{moment(seconds_of(event.time))}  {'  '.join(parts)}"
