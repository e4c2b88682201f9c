"""DCP folders that list a chunk of every tensor for every rank: each command beside torch's own reader of the list."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.measure import Run, run, table_as_measured
from tests.benchmarks.scale import CKPTOOLS, hollow

PEER = [sys.executable, "-m", "tests.benchmarks.peers"]
RANKS = 128
"""70 B parameters with AdamW's state on 512 ranks are a million chunks, four times as many, and take minutes."""

TENSOR = "model.layers.0.self_attn.q_proj.weight"
FILLED = ["--dry-run", "--only", "all", "--allow-missing", "--fill", "zero"]

COMMANDS = {
    "inspect": ["inspect", "."],
    "tree": ["tree", "."],
    "show KEY": ["show", ".", TENSOR],
    "stats --filter KEY": ["stats", ".", "--filter", TENSOR],
    "ls": ["ls", ".."],
    "verify": ["verify", "."],
    "doctor": ["doctor", "."],
    "consolidate --dry-run": ["consolidate", ".", "-o", "../plan.pt", *FILLED],
    "diff with itself": ["diff", ".", "."],
}


def make(work: Path) -> None:
    """Write what is not there yet."""
    (work / "metadata").mkdir(exist_ok=True)
    hollow(work / "metadata" / "run", RANKS, "llama3-70b", "--layout", "dcp")


def report(work: Path) -> Iterator[str]:
    """The table of this section."""
    titles = (f"DCP of Llama 3 70B on {RANKS} ranks", "processor", "x read_metadata", "peak", "x read_metadata")
    yield from table_as_measured(titles, _rows(work / "metadata" / "run"))


def _rows(folder: Path) -> Iterator[list[str]]:
    theirs = run([*PEER, "metadata", str(folder)], watch=True)
    yield _row("torch's read_metadata()", theirs, theirs)
    for what, command in COMMANDS.items():
        at = [str(folder / word) if word.startswith(".") else word for word in command]
        yield _row(what, run([*CKPTOOLS, *at], watch=True), theirs)


def _row(what: str, ours: Run, theirs: Run) -> list[str]:
    peak, other = ours.peak_of_all, theirs.peak_of_all
    return [what, f"{ours.cpu:.1f} s", f"{ours.cpu / theirs.cpu:.2f}", f"{peak >> 20} MiB", f"{peak / other:.2f}"]
