"""`losses.csv`: the losses of a run so far, kept beside its checkpoint for the run that goes on from there."""

from __future__ import annotations

import csv
from pathlib import Path

LOSSES = "losses.csv"


def write(folder: Path, losses: list[float], steps: int) -> None:
    """Write a line for each of the last of so many steps; every digit that it takes to read the same number back."""
    with (folder / LOSSES).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "loss"])
        rows.writerows((step, repr(loss)) for step, loss in enumerate(losses, steps - len(losses) + 1))


def read(checkpoint: Path, steps: int) -> list[float]:
    """Read the losses before each of the first steps; none where not all of them are known.

    Args:
        checkpoint: its file or folder.
        steps: that the checkpoint has taken.
    """
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    path = folder / LOSSES
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        found = {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}
    wanted = range(1, steps + 1)
    return [found[step] for step in wanted] if found.keys() >= set(wanted) else []
