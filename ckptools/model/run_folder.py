"""The checkpoints of a run: what `ls` tells of each, and which of them is the newest whole one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckptools.model.problems import Severity
from ckptools.model.records import displayed
from ckptools.model.rows import Rows
from ckptools.model.verdict import Depth
from ckptools.text import clip_middle, plural, size

LookedInto = Literal["nothing", "inspect", "verify", "verify --deep"]
"""How far a checkpoint was looked into: the command that would have looked as far."""


@displayed
@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint of a run.

    Attributes:
        name: what is typed behind the folder to open it.
        path: what opens it.
        format: name of the format that read it; "" where it cannot be opened.
        step: training step; None where nothing tells.
        step_agrees: whether everything that tells the step tells the same.
        ranks: ranks whose files are here and not cut.
        world_size: ranks that saved it; None where nothing tells.
        files: files that are here.
        bytes: bytes of these files.
        whole: None where nothing wrong was seen, but not every file read.
        verdict: the headline that `inspect` has, or `verify` where that was asked for.
        why: what is wrong, with its codes: the first of it, and how much more there is; "" where nothing is.
        codes: codes of everything that is wrong or doubtful.
        looked_into: how far.
        saved: when its last file was written, in UTC: `2026-11-20T01:42:07Z`; None where no file is.
        newest_whole: whether it is the newest that is whole.
        being_written: whether its files changed between two looks.
        notes: what else should be known.
        lr: learning rate of each param group, in the order of the file; none where nothing tells.
        recoverable: see `Verdict`; None where it was not found out.
        joinable: likewise.
        depth: how far the files were looked into.
    """

    name: str
    path: str
    format: str
    step: int | None
    step_agrees: bool
    ranks: int
    world_size: int | None
    files: int
    bytes: int
    whole: bool | None
    verdict: str
    why: str
    codes: tuple[str, ...]
    looked_into: LookedInto
    saved: str | None
    newest_whole: bool = False
    being_written: bool = False
    notes: tuple[str, ...] = ()
    lr: tuple[float, ...] = ()
    recoverable: bool | None = None
    joinable: bool | None = None
    depth: Depth = "nothing"

    def _told(self) -> str:
        step = "" if self.step is None else f"step {self.step}, "
        return f"{clip_middle(self.name, 60)}: {step}{self.verdict}, {size(self.bytes)}"


@displayed
@dataclass(frozen=True)
class TrackerRow:
    """A file or link such as `latest`, which tells a run where to go on.

    Attributes:
        name: its name, below the folder.
        checkpoint: name of the checkpoint that it leads to; None where it leads to none.
        step: that checkpoint's.
        severity: how bad it is; "" where it leads to the newest whole checkpoint.
        problem: what is wrong with it; "" likewise.
    """

    name: str
    checkpoint: str | None
    step: int | None
    severity: Severity | Literal[""] = ""
    problem: str = ""


@displayed
@dataclass(frozen=True)
class LeftOverRow:
    """What a write that was interrupted, or is still going on, has left.

    Attributes:
        name: the file or folder, below the folder of the run.
        bytes: of the file, or of all files in the folder.
        saved: when it was last written, in UTC.
    """

    name: str
    bytes: int
    saved: str | None


@displayed
@dataclass(frozen=True)
class RunFolder:
    """The checkpoints in a folder, the newest first.

    Attributes:
        path: the folder.
        ok: whether no checkpoint was found not to be whole, and no tracker leads astray; warnings do not count.
        rows: a row per checkpoint.
        checkpoints: how many there are; `rows` may be some of them.
        newest_whole: what opens the newest whole checkpoint; None where none is proven to be whole.
        ordered_by: what says which is newer.
        trackers: files and links that name a checkpoint.
        left_over: temporary files and folders.
        notes: what was not looked at, or contradicts.
        seconds: wall time.
    """

    path: Path
    ok: bool
    rows: Rows[CheckpointRow]
    checkpoints: int
    newest_whole: str | None
    ordered_by: Literal["step", "file time"]
    trackers: Rows[TrackerRow] = field(default_factory=Rows)
    left_over: Rows[LeftOverRow] = field(default_factory=Rows)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def readable(self) -> bool:
        """Whether at least one checkpoint could be opened."""
        return any(row.format for row in self.rows)

    def _told(self) -> str:
        newest = f"newest whole {self.newest_whole}" if self.newest_whole else "NONE IS WHOLE"
        found = plural(self.checkpoints, "checkpoint")
        return f"{clip_middle(str(self.path), 40)}: {found}, {newest if self.checkpoints else 'so far'}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per checkpoint, such as pandas takes."""
        return self.rows.to_dicts()
