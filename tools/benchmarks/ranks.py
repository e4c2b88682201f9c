"""Rank files of 5,000 tensors: opening all of a world, and a plan, beside torch.load(mmap=True) of each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tools.benchmarks.measure import run, table_as_measured
from tools.benchmarks.scale import CKPTOOLS, hollow

PEER = [sys.executable, "-m", "tools.benchmarks.peers"]
SMALL, LARGE = (64,), (64, 256, 1024)
"""Worlds of the section that is always run, and of the one that is run by name: 3.3 GB, some minutes of processor."""

SHAPES = {f"layers.{n}.weight": (2048, 8) for n in range(1250)}
"""With AdamW's two moments and step counts 5,000 tensors."""

LOADED = 16
"""Files that torch loads; the others would take it as long."""

OPEN = """
import sys, ckptools
ckptools.open(sys.argv[1], all_ranks=True, jobs=int(sys.argv[2]))
"""


def maker(worlds: Iterable[int]) -> Callable[[Path], None]:
    """What writes the worlds that are not there yet."""

    def make(work: Path) -> None:
        (work / "ranks").mkdir(exist_ok=True)
        shapes = work / "ranks" / "shapes.json"
        shapes.write_text(json.dumps(SHAPES))
        for world in worlds:
            hollow(work / "ranks" / f"world-{world}", world, str(shapes))

    return make


def reporter(worlds: Iterable[int]) -> Callable[[Path], Iterable[str]]:
    """What prints the table of some worlds."""
    titles = ("rank files x 5,000 tensors", "processor", "x torch.load", "peak of all processes")
    return lambda work: table_as_measured(titles, (row for world in worlds for row in _rows(work / "ranks", world)))


def _rows(work: Path, world: int) -> Iterator[list[str]]:
    folder = str(work / f"world-{world}")
    none, some = (run([*PEER, "load_mapped", folder, str(count)], watch=True) for count in (0, LOADED))
    theirs = (some.cpu - none.cpu) / LOADED * world
    yield [f"{world}: torch.load(mmap=True) of {LOADED}, x {world // LOADED}", f"{theirs:.1f} s", "1.00", "-"]
    plan = ["consolidate", folder, "-o", f"{folder}.pt", "--dry-run", "--only", "all"]
    for what, command in (
        ("open, one process", [sys.executable, "-c", OPEN, folder, "1"]),
        ("open, two reader processes", [sys.executable, "-c", OPEN, folder, "2"]),
        ("open and plan, two", [*CKPTOOLS, *plan, "-j", "2", "--allow-missing", "--fill", "zero"]),
    ):
        ours = run(command, watch=True)
        peak = f"{ours.peak_of_all >> 20} MiB"
        yield [f"{world}: {what}", f"{ours.cpu:.1f} s", f"{ours.cpu / theirs:.2f}", peak]
