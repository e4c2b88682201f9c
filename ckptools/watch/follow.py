"""What follows from each look of a watch: save its state, write figures, run commands, delete old checkpoints."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptools.display.record_json import to_json
from ckptools.errors import CkptoolsError, ReadError
from ckptools.files.location import location
from ckptools.ls.record import CheckpointRow, RunFolder
from ckptools.model.records import Rows, to_dict
from ckptools.text import few, moment_utc
from ckptools.watch.memory import Memory, only_watch, state_path
from ckptools.watch.metrics import write_metrics
from ckptools.watch.options import WatchOptions
from ckptools.watch.pruning import delete, may_go
from ckptools.watch.record import Watched, WatchEvent
from ckptools.watch.run import Watcher

COMMAND_SECONDS = 60.0
"""A command of `--on-problem` that takes longer is ended."""

Say = Callable[[str], None]


@contextmanager
def following(folder: str | Path, options: WatchOptions, how: Mapping[str, Any], say: Say) -> Iterator[Following]:
    """Watch a run: each call of `look` is one look. `say` is called with what goes wrong beside the checkpoints.

    Raises:
        RefusedError: another process watches it with the same state file.
        UsageError: options that do not fit.
    """
    path = location(folder)
    state = state_path(path, options.state)
    with only_watch(state):
        memory = Memory.at(state, path)
        if memory.note:
            say(f"warning: {memory.note}")
        yield Following(Watcher(path, options, memory, how), say)


class Following:
    """A watch that is going on; each warning is given once until it changes."""

    def __init__(self, watcher: Watcher, say: Say) -> None:
        self.watcher, self.options, self.say = watcher, watcher.options, say
        self.reachable = True
        self._said: dict[str, str] = {}
        self._may_go: set[str] = set()

    @property
    def remembers(self) -> bool:
        """Whether the state was written after the last look."""
        return not self._said.get("state")

    def look(self) -> Watched:
        """Look once, and do what follows.

        Raises:
            ReadError: the folder cannot be listed.
            UsageError: it is no folder.
        """
        watched = self.watcher.look()
        found = self.watcher.found
        assert found is not None
        self._warn("state", self.watcher.memory.save())  # before anything is deleted
        if self.options.keep is not None:
            rows = Rows((*watched.rows, *self._pruned(found, self.options.keep)))
            failed = any(event.event == "not deleted" for event in rows)
            watched = replace(watched, rows=rows, ok=watched.ok and not failed)
        self._follow(watched)
        if self.options.prometheus is not None:
            self._write_metrics(self.options.prometheus, watched, found)
        self.reachable = True
        return watched

    def look_or_wait(self) -> Watched:
        """Look once; a folder that cannot be listed now is an event, once until it can be again."""
        try:
            return self.look()
        except ReadError as error:
            folder = self.watcher.folder
            row = CheckpointRow(folder.name, str(folder), whole=None, verdict="cannot be listed")
            event = WatchEvent("unreachable", row, moment_utc(time.time()), detail=error.reason)
            rows: Rows[WatchEvent] = Rows([event] if self.reachable else [])
            self.reachable = False
            watched = Watched(folder, False, rows, 0, None, state=self.watcher.memory.path)
            self._follow(watched)
            return watched

    def _follow(self, watched: Watched) -> None:
        for event in watched.rows if self.options.command else ():
            if event.is_problem:
                self._warn(f"command {event.row.name}", self._run(event, watched))

    def _warn(self, about: str, text: str) -> None:
        if text and self._said.get(about) != text:
            self.say(f"warning: {text}")
        self._said[about] = text

    def _run(self, event: WatchEvent, watched: Watched) -> str:
        """Run the user's command for an event; return what went wrong with it."""
        row = event.row
        facts = {
            "EVENT": event.event,
            "PATH": row.path,
            "NAME": row.name,
            "STEP": "" if row.step is None else str(row.step),
            "VERDICT": row.verdict,
            "WHY": "; ".join(filter(None, (row.why, event.detail, few(event.drifted)))),
            "NEWEST_PROVEN": watched.newest_proven or "",
        }
        # The variables are data: nothing of them is parsed, and a name that begins with `-` is no option.
        known = {f"CKPTOOLS_{name}": value.replace("\0", "") for name, value in facts.items()}
        command = self.options.command
        try:
            done = subprocess.run(
                command,
                input=to_json(to_dict(event)).encode() + b"\n",
                env={**os.environ, **known},
                stdout=subprocess.DEVNULL,
                timeout=COMMAND_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"--on-problem {command[0]}: ended after {COMMAND_SECONDS:.0f} s"
        except (OSError, ValueError) as error:
            return f"--on-problem {command[0]}: cannot be run: {getattr(error, 'strerror', None) or error}"
        return f"--on-problem {command[0]}: exit code {done.returncode}" if done.returncode else ""

    def _write_metrics(self, path: Path, watched: Watched, found: RunFolder) -> None:
        norms = [self.watcher.memory.seen[row.name].norm for row in found.rows if row.name in self.watcher.memory.seen]
        try:
            write_metrics(path, watched, found, next((norm for norm in norms if norm is not None), None))
            self._warn("metrics", "")
        except (CkptoolsError, OSError) as error:
            self._warn("metrics", f"--prometheus: {error}")

    def _pruned(self, found: RunFolder, keep: int) -> Iterator[WatchEvent]:
        """Say which checkpoints may go, each once; or delete them, the oldest first."""
        going = may_go(found, keep)
        for row in reversed(going):
            if not self.options.delete:
                if row.name not in self._may_go:
                    yield WatchEvent("may go", row, moment_utc(time.time()))
                continue
            try:
                delete(row, found, self.watcher.listing.files, lambda: self._newest_is_proven(found))
            except CkptoolsError as error:
                if row.name not in self._may_go:
                    yield WatchEvent("not deleted", row, moment_utc(time.time()), detail=str(error))
                continue
            self.watcher.memory.seen.pop(row.name, None)
            yield WatchEvent("deleted", row, moment_utc(time.time()))
        self._may_go = {row.name for row in going}

    def _newest_is_proven(self, found: RunFolder) -> bool:
        """Whether the files of the newest proven checkpoint are still those that were verified with checksums."""
        newest = next((row for row in found.rows if row.newest_whole), None)
        seen = None if newest is None else self.watcher.memory.seen.get(newest.name)
        if newest is None or seen is None or not (seen.proven and seen.deep):
            return False
        return self.watcher.stamps.of(self.watcher.listing.files[newest.name]) == seen.stamp
