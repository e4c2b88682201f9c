"""`watch`: look at a run's checkpoints again and again, verify new complete ones, and compare norms."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptools.display.record_json import to_json
from ckptools.errors import CkptoolsError, ReadError, RefusedError, UsageError, WriteError
from ckptools.files.opening import is_remote, location, path_of, real_path
from ckptools.formats.open import open_checkpoint
from ckptools.keys.entries import EVERYTHING
from ckptools.ls.record import CheckpointRow, RunFolder, seconds_of
from ckptools.ls.rows import Listing, is_proven, verified
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows, to_dict
from ckptools.option import option, spelled
from ckptools.text import clip_middle, few, moment_utc, number
from ckptools.training_state.sections import sections_of_kind
from ckptools.watch.memory import Good, Memory, Seen, Stamps, facts_of, only_watch, state_path, write_metrics
from ckptools.watch.record import EventKind, Watched, WatchEvent

# -- the options of `watch`, as on the command line --------------------------------------------------------------------


@dataclass(frozen=True)
class WatchOptions:
    """The options of `watch`: how to verify each checkpoint, when, and what to do afterwards.

    Raises:
        UsageError: the options contradict each other.
    """

    deep: bool = option(False, "Compare the CRC-32s of each new checkpoint: every byte is read, once.", common=True)
    values: bool = option(
        False, "Look for NaN and infinities, and compare norms with the last proven checkpoint.", common=True
    )
    drift: float = option(
        2.0,
        "With --values: report a norm of the model that is more than this factor away from the last one.",
        common=True,
        metavar="FACTOR",
    )
    settle: float = option(
        20.0, "Judge a checkpoint once its last write is so long ago.", common=True, metavar="SECONDS"
    )
    every: float = option(30.0, "Between two looks.", common=True, metavar="SECONDS")
    once: bool = option(
        False, "Look once and end, for cron: waits for what is being written, at most --settle.", common=True
    )
    on_problem: str | None = option(
        None,
        "Run this for each problem: a program and its arguments, no shell. It finds the event in the environment "
        "(CKPTOOLS_EVENT, CKPTOOLS_PATH, CKPTOOLS_STEP, CKPTOOLS_WHY ...) and as JSON on its standard input.",
        common=True,
        metavar="CMD",
    )
    prometheus: Path | None = option(None, "Write figures for Prometheus's textfile collector here.", common=True)
    keep: int | None = option(
        None, "Say which checkpoints are older than the newest N proven ones, and may go.", common=True
    )
    dry_run: bool = option(False, "With --keep: delete nothing, which is the default.")
    delete: bool = option(False, "With --keep and --deep: delete what may go.", common=True)
    state: Path | None = option(
        None,
        "Where to remember what was verified. [default: in $XDG_STATE_HOME/ckptools or ~/.local/state/ckptools]",
    )

    def __post_init__(self) -> None:
        if self.every < 0.05:
            raise UsageError(None, f"{spelled('every', self.every)}: must be at least 0.05 seconds")
        if self.settle < 0:
            raise UsageError(None, f"{spelled('settle', self.settle)}: must be at least 0 seconds")
        if self.drift <= 1:
            raise UsageError(None, f"{spelled('drift', self.drift)}: a factor above 1, such as 2")
        if self.keep is not None and self.keep < 1:
            text = "the newest proven checkpoint is never deleted; give 1 or more"
            raise UsageError(None, f"{spelled('keep', self.keep)}: {text}")
        delete, dry_run = spelled("delete", True), spelled("dry-run", True)
        if self.delete and self.dry_run:
            raise UsageError(None, f"{delete} and {dry_run}: give one of them")
        if (self.delete or self.dry_run) and self.keep is None:
            way = f"how many checkpoints stay is not said; add {spelled('keep', 3)} or the like"
            raise UsageError(None, f"{delete if self.delete else dry_run}: {way}")
        if self.delete and not self.deep:
            way = f"older checkpoints go only where every byte was compared; add {spelled('deep', True)}"
            raise UsageError(None, f"{delete}: {way}")
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


# -- the watch ---------------------------------------------------------------------------------------------------------


MOST = 3
"""At most this many tensors are listed in a drift event."""


class Watcher:
    """Looks at a folder repeatedly; verified checkpoints that have not changed are not read again."""

    def __init__(self, folder: Path, options: WatchOptions, memory: Memory, how: Mapping[str, Any]) -> None:
        """Watch a folder; `how` are options of `ckptools.open`."""
        self.folder, self.options, self.memory, self.how = folder, options, memory, how
        self.model: str = how.get("model") or ""
        if memory.good is not None and memory.good.model != self.model:
            memory.good = None  # norms of another model
        self.listing = Listing(folder, may_be_empty=True, how=how, judge=self._judge)
        self.stamps = Stamps()
        self.events: list[WatchEvent] = []
        self.waiting: dict[str, float] = {}
        self.found: RunFolder | None = None

    def look(self) -> Watched:
        """Look once.

        Raises:
            ReadError: the folder cannot be listed.
            UsageError: the path is not a folder.
        """
        self.events, self.waiting = [], {}
        found = self.found = self.listing.look()
        here = {row.name: row for row in found.rows}
        for name in [name for name in self.memory.seen if name not in here]:
            seen = self.memory.seen.pop(name)
            self._tell("gone", seen.on(CheckpointRow(name, str(self.folder / name))))
        self.memory.since = {name: one for name, one in self.memory.since.items() if name in here}
        wrong = [row.name for row in found.rows if row.name not in self.waiting and not is_proven(row)]
        drifted = [name for name, seen in self.memory.seen.items() if seen.drifted]
        return Watched(
            path=self.folder,
            ok=not wrong and not drifted and all(tracker.severity != "error" for tracker in found.trackers),
            rows=Rows(self.events),
            checkpoints=found.checkpoints,
            newest_proven=found.newest_whole,
            waiting=tuple(self.waiting),
            problems=tuple(dict.fromkeys((*wrong, *drifted))),
            state=self.memory.path,
            seconds=found.seconds,
        )

    def _tell(self, event: EventKind, row: CheckpointRow, **more: Any) -> None:
        self.events.append(WatchEvent(event, row, moment_utc(time.time()), **more))

    def _judge(self, row: CheckpointRow) -> CheckpointRow:
        """Return the row with the result for its checkpoint: a stored one, a new one, or "being written"."""
        files, seen = self.listing.files[row.name], self.memory.seen.get(row.name)
        stamp = self.stamps.of(files)
        if seen is not None and seen.stamp == stamp and seen.covers(self.options.deep, self.options.values, self.model):
            return seen.on(row)
        first = seen is not None or row.name not in self.memory.since
        # Wait since the last file time, or since the stamp last changed, whichever is earlier: the clock of the file
        # system may be ahead of this machine's.
        now = time.time()
        before = self.memory.since.get(row.name)
        since = before[1] if before is not None and before[0] == stamp else now
        self.memory.since[row.name] = stamp or "", since
        left = self.options.settle - (now - (since if row.saved is None else min(since, seconds_of(row.saved))))
        if stamp is None or left > 0:
            return self._wait(row, max(left, 0.0), first)
        made, checkpoint = self._verified(row)
        norms, why = self._norms(checkpoint) if checkpoint is not None and is_proven(made) else (None, "")
        if self.stamps.of(files) != stamp:  # files changed while they were read
            return self._wait(row, self.options.settle, first)
        self.memory.since.pop(row.name, None)
        self._keep(made, stamp, norms, why)
        return made

    def _wait(self, row: CheckpointRow, left: float, first: bool) -> CheckpointRow:
        """Postpone the verification; until then the checkpoint is neither whole nor broken."""
        waiting = replace(row, whole=None, being_written=True)
        self.waiting[row.name] = left
        self.memory.seen.pop(row.name, None)
        if first:
            self._tell("being written", waiting)
        return waiting

    def _verified(self, row: CheckpointRow) -> tuple[CheckpointRow, Checkpoint | None]:
        """Verify a checkpoint; it is not read further if opening it already found it broken."""
        opened: list[Checkpoint] = []

        def open_all(path: Path) -> Checkpoint:
            opened.append(open_checkpoint(path, **{**self.how, "all_ranks": True}))
            return opened[-1]

        if row.whole is False:
            return row, None
        made = verified(row, open_all, self.options.deep, self.how.get("jobs"), self.options.values)
        return made, opened[-1] if opened else None

    def _norms(self, checkpoint: Checkpoint) -> tuple[dict[str, float] | None, str]:
        """L2 norms of the model's floating-point tensors by name; None if values are not read, or some are missing.

        Beside them the reason, if nothing says which model is meant.
        """
        if not (self.options.values and sections_of_kind(checkpoint, "model")):
            return None, ""
        from ckptools.dtypes import is_floating
        from ckptools.stats.figures import statistics
        from ckptools.stats.passes import parts_of

        try:
            found = statistics(
                checkpoint.path, parts_of(checkpoint, EVERYTHING), False, self.how.get("jobs"), look=False
            )
        except UsageError as error:
            return None, f"no norm: {error.reason}"
        except CkptoolsError:
            return None, ""
        norms = {row.name: row.l2 for row in found.rows if is_floating(row.dtype) and row.l2 is not None}
        return norms if found.l2 is not None else None, ""

    def _keep(self, row: CheckpointRow, stamp: str, norms: dict[str, float] | None, why: str) -> None:
        """Store the result of a verification, and report it as an event, with a drift event if the norm jumps."""
        proven, norm = is_proven(row), None if norms is None else _norm(norms)
        before = self.memory.good if norms is not None and self._is_later(row) else None
        common = norms.keys() & before.norms.keys() if norms is not None and before is not None else set()
        earlier, now = (
            _norm({name: of[name] for name in common}) for of in (before.norms if before else {}, norms or {})
        )
        factor = now / earlier if earlier else None
        drifts = factor is not None and not 1 / self.options.drift <= factor <= self.options.drift
        seen = Seen(stamp, self.options.deep, self.options.values, proven, facts_of(row), norm, drifts, self.model)
        self.memory.seen[row.name] = seen
        self._tell("proven" if proven else "problem", row, norm=norm, drift=factor, detail=why)
        if drifts and before is not None and norms is not None:
            text = f"norm of the model {number(earlier)} in {before.name}, {number(now)} here"
            changed = _most_changed(before.norms, norms)
            self._tell("drift", row, norm=norm, drift=factor, drifted=changed, detail=text)
        elif norms is not None and (before is not None or self.memory.good is None):
            self.memory.good = Good(row.name, row.step, norms, self.model)

    def _is_later(self, row: CheckpointRow) -> bool:
        good = self.memory.good
        return good is not None and (good.step is None or row.step is None or good.step < row.step)


def _norm(norms: Mapping[str, float]) -> float:
    return float(sum(norm * norm for norm in norms.values()) ** 0.5)


def _most_changed(before: Mapping[str, float], now: Mapping[str, float]) -> tuple[str, ...]:
    """List the tensors with the largest change of norm, with both norms."""
    moved = sorted((name for name in now if name in before), key=lambda name: -abs(now[name] - before[name]))
    return tuple(f"{clip_middle(name, 80)}: {number(before[name])} -> {number(now[name])}" for name in moved[:MOST])


# -- old checkpoints that may be deleted: older than the newest proven ones to keep ------------------------------------


def may_go(run: RunFolder, keep: int) -> list[CheckpointRow]:
    """Find the checkpoints older than the `keep` newest proven ones; none if fewer are proven.

    Excluded are checkpoints that a tracker names or that may still be written; and checkpoints without a step beside
    others with one, as their age is unknown.
    """
    proven = [n for n, row in enumerate(run.rows) if is_proven(row)]
    if keep < 1 or len(proven) < keep:
        return []
    tracked = {tracker.checkpoint for tracker in run.trackers}
    later = list(run.rows)[proven[keep - 1] + 1 :]
    ordered = run.ordered_by == "file time"
    return [r for r in later if r.name not in tracked and not r.being_written and (ordered or r.step is not None)]


def delete(row: CheckpointRow, run: RunFolder, files: Mapping[str, Sequence[Path]], sure: Callable[[], bool]) -> None:
    """Delete a checkpoint: its folder if no other checkpoint has files in it, else its files alone.

    A folder is renamed first, so that an interrupted deletion leaves a temporary folder and no half checkpoint. Rank
    files are deleted one by one. `sure` is called right before: it tells whether the newest proven checkpoint is
    unchanged.

    Raises:
        RefusedError: the checkpoint shares files with another, a link leads out of the run folder, or `sure` is False.
        WriteError: the file system refuses.
    """
    path, own = path_of(row.path), set(files.get(row.name, ()))
    others = {real_path(file) for name, found in files.items() if name != row.name for file in found}
    if is_remote(path):
        raise RefusedError(path, "is in a store; ckptools deletes on a disk alone")
    if not own or any(real_path(file) in others for file in own):
        raise RefusedError(path, "shares files with another checkpoint" if own else "its files are not known")
    root = real_path(run.path)
    if any(file.is_symlink() or root not in real_path(file).parents for file in own):
        raise RefusedError(path, "leads out of the folder of the run")
    if not sure():
        raise RefusedError(path, "stays: the newest proven checkpoint has changed since it was verified")
    folder = path if path.is_dir() else None
    try:
        if folder is not None and _is_of_one(folder, run, others):
            aside = folder.with_name(f".ckptools-deleted-{secrets.token_hex(4)}-{folder.name[:200]}")
            folder.rename(aside)
            shutil.rmtree(aside)
        else:
            for file in sorted(own):
                file.unlink(missing_ok=True)
            for above in {folder for file in own for folder in file.parents if root in real_path(folder).parents}:
                with suppress(OSError):
                    above.rmdir()  # fails if the folder is not empty
    except OSError as error:
        raise WriteError(path, f"cannot be deleted: {(error.strerror or str(error)).lower()}") from error


def _is_of_one(folder: Path, run: RunFolder, others: set[Path]) -> bool:
    """Whether a folder below the run folder contains no links and no files of other checkpoints."""
    inside = {real_path(Path(above) / name) for above, _, names in os.walk(folder) for name in names}
    return (
        folder.absolute() != run.path.absolute()
        and not folder.is_symlink()
        and not inside & others
        and not any(path_of(row.path) != folder and path_of(row.path).is_relative_to(folder) for row in run.rows)
    )


# -- after each look: save the state, write metrics, run commands, delete old checkpoints ------------------------------


COMMAND_SECONDS = 60.0
"""Seconds after which a command of `--on-problem` is killed."""

Say = Callable[[str], None]


@contextmanager
def following(folder: str | Path, options: WatchOptions, how: Mapping[str, Any], say: Say) -> Iterator[Following]:
    """Watch a run; each call of `look` is one look. `say` is called with warnings that concern no checkpoint.

    Raises:
        RefusedError: another process watches the run with the same state file.
        UsageError: the options contradict each other.
    """
    path = location(folder)
    state = state_path(path, options.state)
    with only_watch(state):
        memory = Memory.at(state, path)
        if memory.note:
            say(f"warning: {memory.note}")
        yield Following(Watcher(path, options, memory, how), say)


class Following:
    """A running watch; each warning is given once until it changes."""

    def __init__(self, watcher: Watcher, say: Say) -> None:
        self.watcher, self.options, self.say = watcher, watcher.options, say
        self.reachable = True
        self._said: dict[str, str] = {}
        self._may_go: set[str] = set()

    @property
    def remembers(self) -> bool:
        """Whether the state file was written after the last look."""
        return not self._said.get("state")

    def look(self) -> Watched:
        """Look once, then save the state, delete checkpoints, run commands and write metrics as the options ask.

        Raises:
            ReadError: the folder cannot be listed.
            UsageError: the path is not a folder.
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
        """Look once; if the folder cannot be listed, report that as an event, once until it is listed again."""
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
        """Run the user's command for an event; return its failure as text, or ""."""
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
        # The command sees the values only as variables, so that no name in them is parsed or taken for an option.
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
        """Report checkpoints that may be deleted, each once; or delete them, the oldest first."""
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
        """Whether the files of the newest proven checkpoint are unchanged since their checksums were verified."""
        newest = found.newest
        seen = None if newest is None else self.watcher.memory.seen.get(newest.name)
        if newest is None or seen is None or not (seen.proven and seen.deep):
            return False
        return self.watcher.stamps.of(self.watcher.listing.files[newest.name]) == seen.stamp
