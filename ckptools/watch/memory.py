"""The state file of `watch`: results of verified checkpoints, with size, time and digest of their files."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptools.errors import RefusedError, UsageError, WriteError
from ckptools.files.opening import JsonError, is_remote, parse_json, real_path
from ckptools.files.partial_files import write_text
from ckptools.ls.record import CheckpointRow, RunFolder, seconds_of
from ckptools.ls.rows import is_proven
from ckptools.watch.record import Watched

SCHEMA = "ckptools/watch-state/1"

MAX_STATE = 64 << 20
"""Largest state file in bytes that is read."""

ENDS = 4096
"""Bytes at either end of a file that its digest covers: headers, and the directory of a zip, with its CRC-32s."""


@dataclass(frozen=True)
class Seen:
    """The result for one checkpoint, valid as long as its files have this stamp.

    `deep` and `values` say how it was verified; `norm` is the l2 norm of the model's tensors, and `model` the name of
    the model that the user gave, "" for the trained one.
    """

    stamp: str
    deep: bool
    values: bool
    proven: bool
    facts: Mapping[str, Any]
    norm: float | None = None
    drifted: bool = False
    model: str = ""

    def covers(self, deep: bool, values: bool, model: str) -> bool:
        """Whether verifying now would read no more than before; a checkpoint with a problem is not read again."""
        same_model = not values or self.model == model
        return not self.proven or (self.deep >= deep and self.values >= values and same_model)

    def on(self, row: CheckpointRow) -> CheckpointRow:
        """Return the row of the checkpoint with this result."""
        facts: dict[str, Any] = {name: self.facts[name] for name in FACTS}
        facts |= {name: tuple(self.facts[name]) for name in ("codes", "notes")}
        return replace(row, **facts)


FACTS = ("whole", "recoverable", "joinable", "depth", "verdict", "why", "remedy", "looked_into")
"""Fields of a row that are stored, beside `codes` and `notes`."""


def facts_of(row: CheckpointRow) -> dict[str, Any]:
    """Return the fields of a row that are stored."""
    return {name: getattr(row, name) for name in (*FACTS, "codes", "notes")}


@dataclass
class Good:
    """The last proven checkpoint with measured norms: its step, and the norms of the tensors of a model."""

    name: str
    step: int | None
    norms: dict[str, float] = field(default_factory=dict)
    model: str = ""


@dataclass
class Memory:
    """Results for the checkpoints of a run, from earlier looks or an earlier process.

    Attributes:
        since: for each checkpoint that waits to be verified, its stamp and the time it was first seen with it, in
            seconds since 1970.
        note: why the state file could not be used; "" if it was, or did not exist.
    """

    path: Path
    folder: str
    seen: dict[str, Seen] = field(default_factory=dict)
    since: dict[str, tuple[str, float]] = field(default_factory=dict)
    good: Good | None = None
    note: str = ""
    _saved: str = ""

    @classmethod
    def at(cls, path: Path, folder: Path) -> Memory:
        """Read the state file of a run; if it cannot be used, start anew and verify all checkpoints again."""
        made = cls(path, str(real_path(folder)))
        try:
            if path.stat().st_size > MAX_STATE:
                raise ValueError(f"more than {MAX_STATE} bytes")
            found = parse_json(path.read_text("utf-8"))
            if found["schema"] != SCHEMA or found["folder"] != made.folder:
                raise ValueError("the state of another folder")
            for name, one in found["checkpoints"].items():
                made.seen[name] = Seen(**one)
                made.seen[name].on(CheckpointRow(name, name))  # raises if a field is missing
            made.since = {name: (str(stamp), float(when)) for name, (stamp, when) in found["since"].items()}
            made.good = Good(**found["good"]) if found["good"] else None
        except FileNotFoundError:
            pass
        except (OSError, JsonError, KeyError, TypeError, ValueError, AttributeError) as error:
            made = cls(path, made.folder, note=f"{path}: not used, all is verified anew: {error}")
        return made

    def save(self) -> str:
        """Write the state file if anything has changed; return why it cannot be written, or ""."""
        made = {
            "schema": SCHEMA,
            "folder": self.folder,
            "checkpoints": {name: vars(one) for name, one in self.seen.items()},
            "since": self.since,
            "good": None if self.good is None else vars(self.good),
        }
        text = json.dumps(made, allow_nan=True) + "\n"
        if text == self._saved:
            return ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, text, force=True)
        except (OSError, WriteError, UsageError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            return f"{self.path}: what was verified is not remembered: {why}"
        self._saved = text
        return ""


def state_path(folder: Path, given: str | Path | None) -> Path:
    """Return the path of a run's state file: the given one, or one below `$XDG_STATE_HOME` named after the folder.

    Source: XDG Base Directory Specification; `$HOME/.local/state` if the variable is not set.

    Raises:
        UsageError: the given file lies in the run folder.
    """
    if given is not None:
        path = Path(given)
        if not is_remote(folder) and path.absolute().is_relative_to(folder.absolute()):
            raise UsageError(path, "--state lies in the folder of the run; choose a place outside of it")
        return path
    home = os.environ.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
    name = str(real_path(folder))
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
    return Path(home) / "ckptools" / f"watch-{digest}.json"


@contextmanager
def only_watch(path: Path) -> Iterator[None]:
    """Lock a state file, so that only one process uses it; a killed process loses the lock too.

    Raises:
        RefusedError: another process holds the lock.
    """
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_name(f"{path.name}.lock").open("a")
    except (ImportError, OSError):  # no locks on this system, or the folder cannot be written: `Memory.save` reports it
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = "is in use: another watch of this run is going on; stop it, or give this one a --state of its own"
            raise RefusedError(path, text) from None
        except OSError:  # the file system has no locks
            pass
        yield


class Stamps:
    """Stamps of checkpoints: digests of names, sizes, times and both ends of their files."""

    def __init__(self) -> None:
        self._ends: dict[Path, tuple[int, int, str]] = {}

    def of(self, files: Iterable[Path]) -> str | None:
        """Return the stamp of some files; None if one of them no longer exists."""
        made = hashlib.blake2b(digest_size=16)
        for path in sorted(files):
            try:
                status = path.stat()
                ends = self._digest(path, status.st_size, getattr(status, "st_mtime_ns", 0) or 0)
            except OSError:
                return None
            made.update(repr((str(path), *ends)).encode("utf-8", "surrogateescape"))
        return made.hexdigest()

    def _digest(self, path: Path, size: int, time_ns: int) -> tuple[int, int, str]:
        known = self._ends.get(path)
        if known is None or known[:2] != (size, time_ns):
            known = self._ends[path] = size, time_ns, "" if is_remote(path) else _ends_of(path, size)
        return known


def _ends_of(path: Path, size: int) -> str:
    """Digest both ends of a file; does not wait on pipes and other special files."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        made = hashlib.blake2b(file.read(ENDS) or b"", digest_size=16)
        with suppress(OSError):
            file.seek(max(0, size - ENDS))
            made.update(file.read(ENDS) or b"")
    return made.hexdigest()


# -- metrics for Prometheus's node exporter, read by its textfile collector
# Source of the format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format


HELP = {
    "ckptools_checkpoints": "Checkpoints that are here.",
    "ckptools_checkpoints_proven": "Checkpoints that were verified without a problem.",
    "ckptools_checkpoints_waiting": "Checkpoints that were written too recently to be judged.",
    "ckptools_problems": "Checkpoints with a problem.",
    "ckptools_newest_step": "Training step of the newest checkpoint.",
    "ckptools_newest_proven_step": "Training step of the newest proven checkpoint.",
    "ckptools_newest_proven_saved_seconds": "Time of its last file, in seconds since 1970.",
    "ckptools_newest_proven_bytes": "Bytes of its files.",
    "ckptools_model_norm": "L2 norm of the model in the newest proven checkpoint whose values were read.",
    "ckptools_last_look_seconds": "When the run was last looked at, in seconds since 1970.",
}


def write_metrics(path: Path, watched: Watched, found: RunFolder, norm: float | None) -> None:
    """Write the metrics file; a rename makes it appear whole.

    Raises:
        WriteError, UsageError: the file cannot be written.
    """
    run = str(found.path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    label = '{run="' + run.encode("utf-8", "replace").decode() + '"}'
    lines = []
    for name, value in _figures(watched, found, norm):
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge", f"{name}{label} {value}"]
    write_text(path, "\n".join(lines) + "\n", force=True)


def _figures(watched: Watched, found: RunFolder, norm: float | None) -> Iterator[tuple[str, float]]:
    rows = list(found.rows)
    newest = found.newest
    yield "ckptools_checkpoints", len(rows)
    yield "ckptools_checkpoints_proven", sum(map(is_proven, rows))
    yield "ckptools_checkpoints_waiting", len(watched.waiting)
    yield "ckptools_problems", len(watched.problems)
    if rows and rows[0].step is not None:
        yield "ckptools_newest_step", rows[0].step
    if newest is not None:
        if newest.step is not None:
            yield "ckptools_newest_proven_step", newest.step
        if newest.saved is not None:
            yield "ckptools_newest_proven_saved_seconds", seconds_of(newest.saved)
        yield "ckptools_newest_proven_bytes", newest.bytes
    if norm is not None:
        yield "ckptools_model_norm", norm
    yield "ckptools_last_look_seconds", round(time.time(), 3)
