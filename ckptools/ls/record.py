"""The record of `ls`: the checkpoints of a run, and the newest whole one."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ckptools.formats.shared.save_order import By
from ckptools.model.problems import Severity
from ckptools.model.records import Rows, displayed
from ckptools.model.verdict import Depth
from ckptools.text import clip_middle, plural, size

LookedInto = Literal["nothing", "inspect", "verify", "verify --deep", "verify --values", "verify --deep --values"]
"""How far a checkpoint was read: the command that reads as much."""


@displayed
@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint of a run.

    Attributes:
        name: its name to append to the folder to open it.
        format: name of the format that read it; "" if it cannot be opened.
        step_agrees: whether all sources of the step agree.
        ranks: ranks whose files are here and not cut.
        whole: None if no problem was seen but not every file was read.
        verdict: the headline of `inspect`, or of `verify` if it was verified.
        why: the first causes with their codes, and the number of others; "" if there are none.
        remedy: the way out of the first cause; "" where there is none or none is known.
        codes: codes of all errors and warnings.
        looked_into: how far it was read.
        saved: time of its last file, in UTC: `2026-11-20T01:42:07Z`; None without files.
        being_written: whether its files changed between two listings.
        notes: other remarks.
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
    """The time of a row in seconds since 1970."""
    return datetime.fromisoformat(saved.replace("Z", "+00:00")).timestamp()


@displayed
@dataclass(frozen=True)
class TrackerRow:
    """A file or link such as `latest`, from which a run resumes, and the checkpoint that it leads to, if any.

    There is neither severity nor problem if it leads to the newest whole checkpoint.
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
class RunFolder:
    """The checkpoints in a folder, the newest first.

    Attributes:
        ok: whether no checkpoint is known to be broken, and no tracker leads to a wrong one; warnings do not count.
        checkpoints: number of checkpoints; `rows` may be some of them.
        newest_whole: path of the newest whole checkpoint; None if none is proven to be whole.
        trackers: files and links that name a checkpoint.
        ordered_by: the facts that say which is newer; `nothing` where none does.
        wrong_not_older: names of the checkpoints that are not whole, or have other errors, and are not proven to be
            older than the newest whole one; the newest first.
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
    def readable(self) -> bool:
        """Whether at least one checkpoint could be opened."""
        return any(row.format for row in self.rows)

    def _summary(self) -> str:
        newest = f"newest whole {self.newest_whole}" if self.newest_whole else "NONE IS WHOLE"
        found = plural(self.checkpoints, "checkpoint")
        return f"{clip_middle(str(self.path), 40)}: {found}, {newest if self.checkpoints else 'so far'}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per checkpoint, for `pandas.DataFrame` and the like."""
        return self.rows.to_dicts()
