"""The options of `watch`, as the command line has them, and what of them does not fit together."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from ckptools.errors import UsageError
from ckptools.option import option


@dataclass(frozen=True)
class WatchOptions:
    """How a run is watched: what is verified of each checkpoint, when, and what follows from it.

    Raises:
        UsageError: options that do not fit together.
    """

    deep: bool = option(False, "Compare the CRC-32s of each new checkpoint: every byte is read, once.")
    values: bool = option(False, "Look for NaN and infinities, and compare norms with the last proven checkpoint.")
    drift: float = option(
        2.0,
        "With --values: report a norm of the model that is more than this factor away from the last one.",
        metavar="FACTOR",
    )
    settle: float = option(20.0, "Judge a checkpoint once its last write is so long ago.", metavar="SECONDS")
    every: float = option(30.0, "Between two looks.", metavar="SECONDS")
    once: bool = option(False, "Look once and end, for cron: waits for what is being written, at most --settle.")
    on_problem: str | None = option(
        None,
        "Run this for each problem: a program and its arguments, no shell. It finds the event in the environment "
        "(CKPTOOLS_EVENT, CKPTOOLS_PATH, CKPTOOLS_STEP, CKPTOOLS_WHY ...) and as JSON on its standard input.",
        metavar="CMD",
    )
    prometheus: Path | None = option(None, "Write figures for Prometheus's textfile collector here.", metavar="FILE")
    keep: int | None = option(
        None, "Say which checkpoints are older than the newest N proven ones, and may go.", metavar="N"
    )
    dry_run: bool = option(False, "With --keep: delete nothing, which is the default.")
    delete: bool = option(False, "With --keep and --deep: delete what may go.")
    state: Path | None = option(
        None,
        "Where to remember what was verified. [default: in $XDG_STATE_HOME/ckptools or ~/.local/state/ckptools]",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        if self.every < 0.05 or self.settle < 0:
            raise UsageError(None, "--every is at least 0.05 seconds, and --settle at least 0")
        if self.drift <= 1:
            raise UsageError(None, f"--drift {self.drift:g}: a factor above 1, such as 2")
        if self.keep is not None and self.keep < 1:
            raise UsageError(None, f"--keep {self.keep}: the newest proven checkpoint is never deleted; give 1 or more")
        if (self.delete or self.dry_run) and self.keep is None:
            raise UsageError(None, "--delete and --dry-run need --keep N")
        if self.delete and self.dry_run:
            raise UsageError(None, "--delete and --dry-run: give one of them")
        if self.delete and not self.deep:
            raise UsageError(None, "--delete needs --deep: older checkpoints go only where every byte was compared")
        _ = self.command

    @property
    def command(self) -> list[str]:
        """The program to run for a problem, and its arguments; empty for none."""
        try:
            words = shlex.split(self.on_problem or "")
        except ValueError as error:
            raise UsageError(None, f"--on-problem {self.on_problem}: {str(error).lower()}") from error
        if self.on_problem is not None and not words:
            raise UsageError(None, "--on-problem is empty; give a program and its arguments")
        return words
