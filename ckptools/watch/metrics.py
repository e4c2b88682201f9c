"""Figures of a watch for Prometheus, as the textfile collector of its node exporter reads them.

Source of the format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from ckptools.files.partial_files import write_text
from ckptools.ls.record import RunFolder, seconds_of
from ckptools.ls.rows import is_proven
from ckptools.watch.record import Watched

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
    """Write the file; it appears whole, by a rename.

    Raises:
        WriteError, UsageError: it cannot be written.
    """
    run = str(found.path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    label = '{run="' + run.encode("utf-8", "replace").decode() + '"}'
    lines = []
    for name, value in _figures(watched, found, norm):
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge", f"{name}{label} {value}"]
    write_text(path, "\n".join(lines) + "\n", force=True)


def _figures(watched: Watched, found: RunFolder, norm: float | None) -> Iterator[tuple[str, float]]:
    rows = list(found.rows)
    newest = next((row for row in rows if row.newest_whole), None)
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
