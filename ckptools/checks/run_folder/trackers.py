"""Where the trackers of a run lead: to its newest whole checkpoint, to another, or nowhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptools.files.location import path_of
from ckptools.formats.shared.rank_names import parse
from ckptools.formats.shared.trackers import Tracker
from ckptools.model.problems import Code
from ckptools.model.run_folder import CheckpointRow, TrackerRow
from ckptools.text import and_more

ASTRAY = Code.TRACKER_ASTRAY.code


def tracker_rows(
    root: Path, trackers: Sequence[Tracker], rows: Sequence[CheckpointRow], files: Mapping[str, Sequence[Path]]
) -> list[TrackerRow]:
    """A row for each tracker; the links of all ranks to one checkpoint share one.

    Args:
        root: the folder of the run.
        trackers: those that were found.
        rows: the checkpoints, the newest first; the newest whole one is marked.
        files: the files of each, by its name.
    """
    groups: dict[tuple[object, str | None], list[TrackerRow]] = {}
    for tracker in trackers:
        row = _row(root, tracker, rows, files)
        linked = parse(tracker.path)
        kind = (tracker.path.parent, linked.group) if linked else tracker.path
        groups.setdefault((kind, row.checkpoint), []).append(row)
    return [_joined(group) for group in groups.values()]


def _joined(group: Sequence[TrackerRow]) -> TrackerRow:
    first = group[0]
    return replace(first, name=f"{first.name}{and_more(len(group) - 1)}")


def _row(
    root: Path, tracker: Tracker, rows: Sequence[CheckpointRow], files: Mapping[str, Sequence[Path]]
) -> TrackerRow:
    name = str(tracker.path.relative_to(root))
    if tracker.target is None:
        return TrackerRow(name, None, None, "error", f"{ASTRAY} {tracker.why}")
    target = tracker.target
    led = [row for row in rows if _leads_to(target, row, files.get(row.name, ()))]
    if not led:
        return TrackerRow(name, None, None, "error", f"{ASTRAY} names {target.name}, which holds no checkpoint")
    named = next((row for row in led if row.newest_whole), led[0])
    if named.whole is False:
        return TrackerRow(name, named.name, named.step, "error", f"{ASTRAY} names {named.name}, which is not whole")
    newest = next((row for row in rows if row.newest_whole), None)
    if newest is None or named.newest_whole or (named.step is not None and named.step == newest.step):
        return TrackerRow(name, named.name, named.step)
    text = f"{ASTRAY} names {_called(named)}; the newest whole one is {_called(newest)}"
    return TrackerRow(name, named.name, named.step, "warning", text)


def _called(row: CheckpointRow) -> str:
    return row.name if row.step is None else f"step {row.step}"


def _leads_to(target: Path, row: CheckpointRow, files: Sequence[Path]) -> bool:
    path = path_of(row.path)
    return path == target or path.is_relative_to(target) or target in files
