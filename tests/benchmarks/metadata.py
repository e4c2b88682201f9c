"""DCP folders that list a chunk of every tensor for every rank: each command beside torch's own reader of the list."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.measure import Run, run, table_as_measured
from tests.benchmarks.scale import CKPTOOLS, hollow, slope_of

PEER = [sys.executable, "-m", "tests.benchmarks.peers"]
WORLDS = 64, 256
"""70 B parameters with AdamW's state on 512 ranks are a million chunks, twice as many as on 256, and take minutes."""

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
    for ranks in WORLDS:
        _folder(work, ranks).parent.mkdir(parents=True, exist_ok=True)
        hollow(_folder(work, ranks), ranks, "llama3-70b", "--layout", "dcp")


def _folder(work: Path, ranks: int) -> Path:
    return work / "metadata" / str(ranks) / "run"


def report(work: Path) -> Iterator[str]:
    """The table of this section; peaks and ratios are of the larger world."""
    worlds = (f"{ranks} ranks" for ranks in WORLDS)
    titles = ("DCP of Llama 3 70B", *worlds, "slope", "x read_metadata", "peak", "x read_metadata", "x inspect")
    yield from table_as_measured(titles, _rows([_folder(work, ranks) for ranks in WORLDS]))


def _rows(folders: Sequence[Path]) -> Iterator[list[str]]:
    theirs = [run([*PEER, "metadata", str(folder)], watch=True) for folder in folders]
    yield [*_row("torch's read_metadata()", theirs, theirs), ""]
    opened = 0.0
    for what, command in COMMANDS.items():
        ours = [run([*CKPTOOLS, *_at(folder, command)], watch=True) for folder in folders]
        opened = opened or ours[-1].cpu
        yield [*_row(what, ours, theirs), f"{ours[-1].cpu / opened:.2f}"]


def _at(folder: Path, command: Sequence[str]) -> list[str]:
    return [str(folder / word) if word.startswith(".") else word for word in command]


def _row(what: str, ours: Sequence[Run], theirs: Sequence[Run]) -> list[str]:
    seconds, peak, other = [one.cpu for one in ours], ours[-1].peak_of_all, theirs[-1].peak_of_all
    slope, ratio = slope_of(seconds, WORLDS), seconds[-1] / theirs[-1].cpu
    processor = [f"{one:.1f} s" for one in seconds]
    return [what, *processor, f"{slope:.2f}", f"{ratio:.2f}", f"{peak >> 20} MiB", f"{peak / other:.2f}"]
