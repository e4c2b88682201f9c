"""What can be asked about saving on the way, going on from what was saved, and ranks that die."""

from __future__ import annotations

from dataclasses import dataclass

from ckptools.errors import UsageError
from ckptools.training.option import option


@dataclass(frozen=True)
class ResumeOptions:
    """How often a run is saved, and what happens when a rank dies."""

    save_every: int | None = option(None, "Also save whenever so many steps are done; folders are called step-N.")
    max_restarts: int = option(0, "When a rank dies, start all again from the last whole checkpoint, so many times.")
    kill: str | None = option(None, "RANK:STEP: end this rank by SIGKILL when so many steps are done; once.")

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

    def check(self, steps: int, world_size: int | None) -> None:
        """Refuse what does not fit together.

        Raises:
            UsageError: a number out of range, a rank that does not exist, a step that does not come.
        """
        if self.save_every is not None and self.save_every < 1:
            raise UsageError(None, f"--save-every is {self.save_every}, must be at least 1")
        if self.max_restarts < 0:
            raise UsageError(None, f"--max-restarts is {self.max_restarts}, must be at least 0")
        rank, step = self.killed or (0, 1)
        if world_size is not None and rank >= world_size:
            raise UsageError(None, f"--kill {self.kill}: there is no rank {rank} of {world_size}, counted from 0")
        if not 1 <= step <= steps:
            raise UsageError(None, f"--kill {self.kill}: there is no step {step}; --steps is {steps}")
