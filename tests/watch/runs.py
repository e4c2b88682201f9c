"""Runs to watch: small checkpoints of one file or two ranks, written at a given step."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from ckptools.files.opening import location
from ckptools.watch.memory import Memory
from ckptools.watch.run import Watcher, WatchOptions


def save(run: Path, step: int, scale: float = 1.0, old: bool = True) -> Path:
    """Save `step-STEP.pt` with a model; if `old`, its last write was a minute ago."""
    run.mkdir(exist_ok=True)
    path = run / f"step-{step}.pt"
    torch.save({"model": {"w": torch.full((64,), scale), "b": torch.ones(3)}, "step": step}, path)
    return aged(path) if old else path


def aged(path: Path) -> Path:
    os.utime(path, (time.time() - 60, time.time() - 60))
    return path


def flip(path: Path) -> Path:
    """Flip a bit of a tensor; size and time stay."""
    data, status = bytearray(path.read_bytes()), path.stat()
    at = data.index(torch.full((64,), 1.0).numpy().tobytes())
    data[at] ^= 8
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return path


def watcher(run: Path, state: Path, model: str | None = None, **options: object) -> Watcher:
    """A watch with the memory that a state file has."""
    found = location(run)
    return Watcher(found, WatchOptions(**options), Memory.at(state, found), {"model": model})  # type: ignore[arg-type]


def told(watched: object) -> list[tuple[str, int | None]]:
    """The events of a look, with the step of each."""
    return [(event.event, event.row.step) for event in watched.rows]  # type: ignore[attr-defined]
