"""The work of `watch`: look at a run's checkpoints, verify what is new and complete, and compare norms."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptools.errors import CkptoolsError
from ckptools.formats.open import open_checkpoint
from ckptools.keys.entries import EVERYTHING
from ckptools.ls.listing import Listing
from ckptools.ls.record import CheckpointRow, RunFolder, seconds_of
from ckptools.ls.rows import is_proven, verified
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows
from ckptools.text import clip_middle, moment_utc, number
from ckptools.training_state.sections import sections_of_kind
from ckptools.watch.memory import Good, Memory, Seen, Stamps, facts_of
from ckptools.watch.options import WatchOptions
from ckptools.watch.record import EventKind, Watched, WatchEvent

MOST = 3
"""Tensors that a drift names."""


class Watcher:
    """Look at a folder again and again; what was verified and has not changed is not read again."""

    def __init__(self, folder: Path, options: WatchOptions, memory: Memory, how: Mapping[str, Any]) -> None:
        """Watch a folder; `how` are options of opening each checkpoint."""
        self.folder, self.options, self.memory, self.how = folder, options, memory, how
        self.listing = Listing(folder, may_be_empty=True, how=how, judge=self._judge)
        self.stamps = Stamps()
        self.events: list[WatchEvent] = []
        self.waiting: dict[str, float] = {}
        self.found: RunFolder | None = None

    def look(self) -> Watched:
        """Look once.

        Raises:
            ReadError: the folder cannot be listed.
            UsageError: it is no folder.
        """
        self.events, self.waiting = [], {}
        found = self.found = self.listing.look()
        here = {row.name: row for row in found.rows}
        for name in [name for name in self.memory.seen if name not in here]:
            seen = self.memory.seen.pop(name)
            self._tell("gone", seen.on(CheckpointRow(name, str(self.folder / name))))
        self.memory.since = {name: one for name, one in self.memory.since.items() if name in here}
        wrong = [row.name for row in found.rows if row.name not in self.waiting and not is_proven(row)]
        drifted = [name for name, seen in self.memory.seen.items() if seen.drifted]
        return Watched(
            path=self.folder,
            ok=not wrong and not drifted and all(tracker.severity != "error" for tracker in found.trackers),
            rows=Rows(self.events),
            checkpoints=found.checkpoints,
            newest_proven=found.newest_whole,
            waiting=tuple(self.waiting),
            problems=tuple(dict.fromkeys((*wrong, *drifted))),
            state=self.memory.path,
            seconds=found.seconds,
        )

    def _tell(self, event: EventKind, row: CheckpointRow, **more: Any) -> None:
        self.events.append(WatchEvent(event, row, moment_utc(time.time()), **more))

    def _judge(self, row: CheckpointRow) -> CheckpointRow:
        """The row with the judgement on its checkpoint: remembered, made now, or not yet possible."""
        files, seen = self.listing.files[row.name], self.memory.seen.get(row.name)
        stamp = self.stamps.of(files)
        if seen is not None and seen.stamp == stamp and seen.covers(self.options.deep, self.options.values):
            return seen.on(row)
        first = seen is not None or row.name not in self.memory.since
        left = self.options.settle - self._age(row, stamp)
        if stamp is None or left > 0:
            return self._wait(row, max(left, 0.0), first)
        made, checkpoint = self._verified(row)
        norms = self._norms(checkpoint) if checkpoint is not None and is_proven(made) else None
        if self.stamps.of(files) != stamp:  # written, or removed, while it was read
            return self._wait(row, self.options.settle, first)
        self.memory.since.pop(row.name, None)
        self._keep(made, stamp, norms)
        return made

    def _wait(self, row: CheckpointRow, left: float, first: bool) -> CheckpointRow:
        """Judge it later; neither whole nor broken until then."""
        waiting = replace(row, whole=None, being_written=True)
        self.waiting[row.name] = left
        self.memory.seen.pop(row.name, None)
        if first:
            self._tell("being written", waiting)
        return waiting

    def _age(self, row: CheckpointRow, stamp: str | None) -> float:
        """Seconds since the last write: by the file's time, or since when its stamp is known, whichever is longer.

        The clock of the file system may be ahead of this machine's.
        """
        now = time.time()
        before = self.memory.since.get(row.name)
        since = before[1] if before is not None and before[0] == stamp else now
        self.memory.since[row.name] = stamp or "", since
        return now - (since if row.saved is None else min(since, seconds_of(row.saved)))

    def _verified(self, row: CheckpointRow) -> tuple[CheckpointRow, Checkpoint | None]:
        """Verify a checkpoint; one that opening has found to be broken is not read further."""
        opened: list[Checkpoint] = []

        def open_all(path: Path) -> Checkpoint:
            opened.append(open_checkpoint(path, **{**self.how, "all_ranks": True}))
            return opened[-1]

        if row.whole is False:
            return row, None
        made = verified(row, open_all, self.options.deep, self.how.get("jobs"), self.options.values)
        return made, opened[-1] if opened else None

    def _norms(self, checkpoint: Checkpoint) -> dict[str, float] | None:
        """L2 norms of the model's floating-point tensors by name; None if values are not read, or not all are here."""
        if not (self.options.values and sections_of_kind(checkpoint, "model")):
            return None
        from ckptools.dtypes import is_floating
        from ckptools.stats.figures import statistics
        from ckptools.stats.reading import parts_of

        try:
            found = statistics(
                checkpoint.path, parts_of(checkpoint, EVERYTHING), False, self.how.get("jobs"), look=False
            )
        except CkptoolsError:
            return None
        norms = {row.name: row.l2 for row in found.rows if is_floating(row.dtype) and row.l2 is not None}
        return norms if found.l2 is not None else None

    def _keep(self, row: CheckpointRow, stamp: str, norms: dict[str, float] | None) -> None:
        """Remember a judgement, and say what it is."""
        proven, norm = is_proven(row), None if norms is None else _norm(norms)
        before = self.memory.good if norms is not None and self._is_later(row) else None
        factor = norm / _norm(before.norms) if before and norm is not None and _norm(before.norms) else None
        drifts = factor is not None and not 1 / self.options.drift <= factor <= self.options.drift
        seen = Seen(stamp, self.options.deep, self.options.values, proven, facts_of(row), norm, drifts)
        self.memory.seen[row.name] = seen
        self._tell("proven" if proven else "problem", row, norm=norm, drift=factor)
        if drifts and before is not None and norms is not None:
            text = f"norm of the model {number(_norm(before.norms))} in {before.name}, {number(norm or 0.0)} here"
            changed = _most_changed(before.norms, norms)
            self._tell("drift", row, norm=norm, drift=factor, drifted=changed, detail=text)
        elif norms is not None and (before is not None or self.memory.good is None):
            self.memory.good = Good(row.name, row.step, norms)

    def _is_later(self, row: CheckpointRow) -> bool:
        good = self.memory.good
        return good is not None and (good.step is None or row.step is None or good.step < row.step)


def _norm(norms: Mapping[str, float]) -> float:
    return float(sum(norm * norm for norm in norms.values()) ** 0.5)


def _most_changed(before: Mapping[str, float], now: Mapping[str, float]) -> tuple[str, ...]:
    """The tensors whose norms moved furthest, with what became of them."""
    moved = sorted((name for name in now if name in before), key=lambda name: -abs(now[name] - before[name]))
    return tuple(f"{clip_middle(name, 80)}: {number(before[name])} -> {number(now[name])}" for name in moved[:MOST])
