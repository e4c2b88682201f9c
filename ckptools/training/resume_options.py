"""What can be asked about saving on the way, going on from what was saved, and ranks that die."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckptools.errors import UsageError
from ckptools.option import option

LOADS = ("each", "broadcast")


@dataclass(frozen=True)
class ResumeOptions:
    """How often a run is saved, and what happens when a rank dies."""

    resume: str | None = option(None, "Go on from this checkpoint, or from the newest whole one in this folder.")
    load: str = option("each", f"How it is read: {' or '.join(LOADS)}, where rank 0 reads for all.")
    save_every: int | None = option(None, "Also save whenever so many steps are done; folders are called step-N.")
    max_restarts: int = option(0, "When a rank dies, start all again from the last whole checkpoint, so many times.")
    kill: str | None = option(None, "RANK:STEP: end this rank by SIGKILL when so many steps are done; once.")

    @property
    def keeps_losses(self) -> bool:
        """Whether the losses so far are saved too, as the run may end here and go on elsewhere."""
        return self.save_every is not None or self.resume is not None

    @property
    def killed(self) -> tuple[int, int] | None:
        """The rank to kill, and the steps that are done by then.

        Raises:
            UsageError: it is spelled otherwise.
        """
        if self.kill is None:
            return None
        rank, colon, step = self.kill.partition(":")
        if not (colon and rank.isdecimal() and step.isdecimal()):
            raise UsageError(None, f"--kill {self.kill} is not RANK:STEP, such as 1:3")
        return int(rank), int(step)

    def goes_on_in(self, out: Path) -> bool:
        """Tell whether the checkpoint to go on from lies where the next ones go."""
        return self.resume is not None and Path(self.resume).resolve().is_relative_to(out.resolve())

    def check(self, steps: int, world_size: int | None) -> None:
        """Refuse what does not fit together.

        Raises:
            UsageError: a number out of range, a rank that does not exist, a step that does not come.
        """
        if self.load not in LOADS:
            raise UsageError(None, f"--load {self.load} is not known; choose from {', '.join(LOADS)}")
        if self.resume is not None and not Path(self.resume).exists():
            raise UsageError(Path(self.resume), "no such file or folder to go on from")
        if self.save_every is not None and self.save_every < 1:
            raise UsageError(None, f"--save-every is {self.save_every}, must be at least 1")
        if self.max_restarts < 0:
            raise UsageError(None, f"--max-restarts is {self.max_restarts}, must be at least 0")
        if self.killed is None:
            return
        rank, step = self.killed
        if world_size is not None and rank >= world_size:
            raise UsageError(None, f"--kill {self.kill}: there is no rank {rank} of {world_size}, counted from 0")
        if not 1 <= step <= steps:
            raise UsageError(None, f"--kill {self.kill}: there is no step {step}; --steps is {steps}")


def restarts() -> int:
    """How often torch's elastic launcher, ours or an outer torchrun, has started all ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
