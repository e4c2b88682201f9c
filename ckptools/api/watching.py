"""Watch a run from its own training code: each save is verified in another process while training goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from ckptools.errors import UsageError
from ckptools.files.opening import check_path, path_of

Event = Mapping[str, Any]
"""One event, as `ckptools watch --jsonl` prints it."""

Trainer = Literal["lightning", "transformers"]


class CheckpointWarning(UserWarning):
    """A saved checkpoint has a problem, or could not be verified."""


class RunWatch:
    """Verifies the checkpoints of a run in another process, one at a time; `events` are as in `ckptools watch`.

    Each process verifies the checkpoints that are new since the last one; a state file keeps the results.
    """

    def __init__(self, path: Path, arguments: list[str], on_problem: Callable[[Event], None] | None) -> None:
        self.path, self.on_problem = path, on_problem
        self.events: list[Event] = []
        # -P (Python 3.11): import no file of the training's folder in place of a module of ckptools.
        safe = ["-P"] if sys.version_info >= (3, 11) and not _is_in_current_folder() else []
        self._command = [sys.executable, *safe, "-m", "ckptools", "watch", str(path), "--once", "--jsonl", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: tuple[IO[bytes], IO[bytes]] | None = None
        self._again = False

    def check(self) -> None:
        """Start verifying new checkpoints, and return at once; if a process is running, another will follow it."""
        if self._process is not None and self._process.poll() is None:
            self._again = True
            return
        self._collect()
        self._again = False
        self._printed = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  (closed in `_collect`)
        out, err = self._printed
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def wait(self) -> list[Event]:
        """Wait until all saved checkpoints are verified, and return all events."""
        while self._process is not None:
            self._process.wait()
            again = self._again
            self._collect()
            if again:
                self.check()
        return self.events

    def _collect(self) -> None:
        """Collect the events of a process that has ended."""
        if self._process is None or self._printed is None:
            return
        code, self._process = self._process.wait(), None
        printed, said = self._printed
        with printed, said:
            printed.seek(0)
            said.seek(0)
            found = [json.loads(line) for line in printed.read().splitlines()]
            if code not in (0, 1):
                lines = said.read().decode("utf-8", "replace").strip().splitlines()
                warnings.warn(f"not verified: {lines[-1] if lines else f'exit code {code}'}", CheckpointWarning, 3)
        self.events += found
        for event in found:
            if event["event"] in ("problem", "drift"):
                self._report(event)

    def _report(self, event: Event) -> None:
        if self.on_problem is not None:
            self.on_problem(event)
            return
        why = event["why"] or event["detail"]
        warnings.warn(f"{event['path']}: {event['verdict']}: {why}", CheckpointWarning, 4)


def _is_in_current_folder() -> bool:
    """Whether ckptools itself is imported from the current folder, so that `-P` would hide it."""
    return Path(__file__).resolve().parents[2] == Path.cwd().resolve()


def watch(
    path: str | Path,
    trainer: Trainer | None = None,
    *,
    deep: bool = True,
    values: bool = True,
    settle: float = 2.0,
    drift: float = 2.0,
    state: str | Path | None = None,
    on_problem: Callable[[Event], None] | None = None,
) -> Any:
    """Verify the checkpoints of a training in another process; return a `RunWatch`, or a callback that calls one.

    Args:
        path: the folder in which the run saves its checkpoints; it need not exist yet.
        trainer: `lightning` or `transformers`, for a callback of that trainer: on the first rank of the job it starts a
            check after each save, and waits for the last one at the end of the training.
        deep: compare the checksums of each checkpoint, once.
        values: look for NaN and infinities, and compare norms with the last proven checkpoint.
        settle: seconds to wait after the last write before a checkpoint is verified.
        drift: factor by which the norm of the model may change.
        state: path of the state file, which keeps the results.
        on_problem: called with each event that is a problem, in the training's thread, at the next save or at the end;
            without it, a problem becomes a `CheckpointWarning`.

    Raises:
        UsageError: no such trainer exists, or it is not installed.
    """
    check_path(path)
    arguments = ["--settle", str(settle), "--drift", str(drift)]
    arguments += ["--deep"] if deep else []
    arguments += ["--values"] if values else []
    arguments += ["--state", str(state)] if state is not None else []
    made = RunWatch(path_of(path), arguments, on_problem)
    if trainer is None:
        return made
    try:
        if trainer == "lightning":
            from ckptools.api.callbacks.lightning import LightningWatch

            return LightningWatch(made)
        if trainer == "transformers":
            from ckptools.api.callbacks.transformers import TransformersWatch

            return TransformersWatch(made)
    except ImportError as error:
        raise UsageError(None, f"trainer {trainer}: is not installed: {error}") from error
    raise UsageError(None, f"trainer {trainer}: choose lightning or transformers")
