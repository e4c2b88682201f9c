"""Watching a run from its own training code: each save is verified in another process, beside the training."""

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
"""One event of `ckptools watch --jsonl`."""

Trainer = Literal["lightning", "transformers"]


class CheckpointWarning(UserWarning):
    """A checkpoint that was just saved has a problem, or could not be verified."""


class RunWatch:
    """Verify the checkpoints of a run in another process, one at a time; `events` are those of `ckptools watch`.

    The process looks at what is new since the last one; what was verified is remembered.
    """

    def __init__(self, path: Path, arguments: list[str], on_problem: Callable[[Event], None] | None) -> None:
        self.path, self.on_problem = path, on_problem
        self.events: list[Event] = []
        # -P: a file in the training's folder must not be taken for a module of ckptools, on Python 3.11 and later.
        safe = ["-P"] if sys.version_info >= (3, 11) and not _is_in_current_folder() else []
        self._command = [sys.executable, *safe, "-m", "ckptools", "watch", str(path), "--once", "--jsonl", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: tuple[IO[bytes], IO[bytes]] | None = None
        self._again = False

    def check(self) -> None:
        """Start verifying what is new, and return at once; if it is going on already, another follows it."""
        if self._process is not None and self._process.poll() is None:
            self._again = True
            return
        self._collect()
        self._again = False
        self._printed = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  (closed in `_collect`)
        out, err = self._printed
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def wait(self) -> list[Event]:
        """Wait until everything that was saved is verified, and return all events."""
        while self._process is not None:
            self._process.wait()
            again = self._again
            self._collect()
            if again:
                self.check()
        return self.events

    def _collect(self) -> None:
        """Take over what the process that has ended found."""
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
    """Whether ckptools itself is imported from the current folder, and would not be found without it."""
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
    """Verify what a training saves, in another process: a `RunWatch`, or a callback that calls one.

    Args:
        path: the folder in which the run saves its checkpoints; it may not be there yet.
        trainer: `lightning` or `transformers`, for a callback of that trainer: after each save it starts the check, and
            at the end of the training it waits for the last one. Only the first rank of the job does.
        deep: compare the checksums of each checkpoint, once.
        values: look for NaN and infinities, and compare norms with the last proven checkpoint.
        settle: a checkpoint is judged once its last write is so many seconds ago.
        drift: the factor by which the norm of the model may change.
        state: the file in which to remember what was verified.
        on_problem: called with each event that is a problem, in the training's thread, at the next save or at the end;
            without it a problem is a `CheckpointWarning`.

    Raises:
        UsageError: there is no such trainer, or it is not installed.
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
