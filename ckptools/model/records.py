"""What is known of a checkpoint beside its tree: facts with their sources, and its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Fact:
    """A value and where it comes from.

    Attributes:
        value: the value, or None when nothing tells.
        sources: what says so, such as `("file name", "state.timestamp.batch")`.
        agree: False when the sources contradict each other.
    """

    value: Any
    sources: tuple[str, ...] = ()
    agree: bool = True


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file of the checkpoint.

    Attributes:
        path: the file, as found.
        rank: its rank, from the content where that tells, else from the name; None for a monolithic file.
        part: what of the checkpoint it holds when a rank has several files (`model`, `optim`), else "".
        status: `read` in full, `seen` (directory checked only), `cut`, `missing`, or `bad`.
        nbytes: size in bytes, 0 when missing.
        modified: file time, seconds since 1970; None when missing.
    """

    path: Path
    rank: int | None
    part: str
    status: Literal["read", "seen", "cut", "missing", "bad"]
    nbytes: int
    modified: float | None
