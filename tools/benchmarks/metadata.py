"""DCP folders that list a chunk of every tensor for every rank: each command beside torch's own reader of the list."""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tools.benchmarks.measure import Run, run, table_as_measured
from tools.benchmarks.scale import CKPTOOLS, hollow, slope_of
from tools.simulated import shapes_from

PEER = [sys.executable, "-m", "tools.benchmarks.peers"]
SMALL, LARGE = (64, 256), (64, 256, 512)
"""Worlds of the section that is always run, and of the one that is run by name; on 512 ranks a million chunks."""

ROUNDS = 3
TENSOR = "model.layers.0.self_attn.q_proj.weight"
PLAN = ["consolidate", ".", "-o", "../plan.pt", "--dry-run", "--only", "all"]

COMMANDS = {
    "inspect": ["inspect", "."],
    "tree": ["tree", "."],
    "show KEY": ["show", ".", TENSOR],
    "stats --filter KEY": ["stats", ".", "--filter", TENSOR],
    "ls": ["ls", ".."],
    "verify": ["verify", "."],
    "doctor": ["doctor", "."],
    "consolidate --dry-run": PLAN,
    "diff with itself": ["diff", ".", "."],
}


def maker(worlds: Sequence[int]) -> Callable[[Path], None]:
    """What writes the worlds that are not there yet."""

    def make(work: Path) -> None:
        for ranks in worlds:
            _folder(work, ranks).parent.mkdir(parents=True, exist_ok=True)
            hollow(_folder(work, ranks), ranks, "llama3-70b", "--layout", "dcp")

    return make


def _folder(work: Path, ranks: int, kind: str = "metadata") -> Path:
    return work / kind / str(ranks) / "run"


def make_filled(work: Path) -> None:
    """Write the small worlds with 128 bytes of values in an item in place of holes, and a CRC-32 of them."""
    shapes = work / "filled.json"
    shapes.write_text(json.dumps({name: (max(SMALL) * 8, 8) for name in shapes_from("llama3-70b")}))
    for ranks in SMALL:
        folder = _folder(work, ranks, "filled")
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            hollow(folder, ranks, str(shapes), "--layout", "dcp")
            for path in folder.glob("*.distcp"):
                path.write_bytes(_filled(path.read_bytes()))


def _filled(data: bytes) -> bytes:
    """The bytes of a file of items, with random numbers and their CRC-32 for values of 64 bytes and more.

    A name stands twice in an archive, 30 bytes behind the beginning of its entry and 46 behind that of its line in the
    directory, which has the CRC-32 and the size. Source: APPNOTE, 4.3.7 and 4.3.12.
    """
    found, at = bytearray(data), 0
    while (name := data.find(b"archive/data/0", at)) >= 0:
        start = name + 14 + int.from_bytes(data[name - 2 : name], "little")
        listed = data.index(b"archive/data/0", start)
        nbytes = int.from_bytes(data[listed - 22 : listed - 18], "little")
        if nbytes >= 64:
            found[start : start + nbytes] = random.randbytes(nbytes)
            found[listed - 30 : listed - 26] = zlib.crc32(found[start : start + nbytes]).to_bytes(4, "little")
        at = listed + 1
    return bytes(found)


def reporter(worlds: Sequence[int], kind: str = "metadata") -> Callable[[Path], Iterable[str]]:
    """What prints the table of some worlds; peaks and ratios are of the largest."""
    titles = ("DCP of Llama 3 70B", *(f"{ranks} ranks" for ranks in worlds), "slope")
    titles += ("x read_metadata", "peak", "x read_metadata", "x inspect")
    # Of holes a plan needs values that stand in their place.
    fill = [] if kind == "filled" else ["--allow-missing", "--fill", "zero"]
    commands = {**COMMANDS, "consolidate --dry-run": [*PLAN, *fill]}
    return lambda work: table_as_measured(
        titles, _rows([_folder(work, ranks, kind) for ranks in worlds], worlds, commands)
    )


def _rows(folders: Sequence[Path], worlds: Sequence[int], commands: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    theirs = [_median([*PEER, "metadata", str(folder)]) for folder in folders]
    yield [*_row("torch's read_metadata()", theirs, theirs, worlds), ""]
    opened = 0.0
    for what, command in commands.items():
        ours = [_median([*CKPTOOLS, *_at(folder, command)]) for folder in folders]
        opened = opened or ours[-1].cpu
        yield [*_row(what, ours, theirs, worlds), f"{ours[-1].cpu / opened:.2f}"]


def _median(command: Sequence[str]) -> Run:
    """Of three runs the one with the median seconds of the processor."""
    return sorted((run(command, watch=True) for _ in range(ROUNDS)), key=lambda one: one.cpu)[ROUNDS // 2]


def _at(folder: Path, command: Sequence[str]) -> list[str]:
    return [str(folder / word) if word.startswith(".") else word for word in command]


def _row(what: str, ours: Sequence[Run], theirs: Sequence[Run], worlds: Sequence[int]) -> list[str]:
    seconds, peak, other = [one.cpu for one in ours], ours[-1].peak_of_all, theirs[-1].peak_of_all
    slope, ratio = slope_of(seconds, worlds), seconds[-1] / theirs[-1].cpu
    processor = [f"{one:.1f} s" for one in seconds]
    return [what, *processor, f"{slope:.2f}", f"{ratio:.2f}", f"{peak >> 20} MiB", f"{peak / other:.2f}"]
