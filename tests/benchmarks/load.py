"""What big inputs cost: wall seconds, peak memory, open files. `python -m tests.benchmarks.load`, some minutes.

1,024 rank files     real FSDP1 files of torch's fake process group, one for each rank
200 MB pickle        one rank of 1,024 with 580 parameters and their moments: 1.8 million shard records
5,000 tensors        one torch.save file
10 GB sparse file    a safetensors file that is nearly all hole
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tabulate import tabulate

from tests.benchmarks.measure import run, workplace

CKPTOOLS = [sys.executable, "-m", "ckptools"]
WORLD = 1024
PARAMETERS = 580
"""Of the one rank whose pickle is 200 MB."""

RANKS_AT_ONCE = 64
"""Ranks that one process makes; each leaves some of torch's caches behind."""

Row = tuple[str, str, str, str]


def main() -> None:
    """Make the inputs, run every command once, print one table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.load", description=__doc__)
    parser.add_argument("--keep", type=Path, help="folder for the inputs, kept for the next run")
    options = parser.parse_args()
    with workplace(options.keep) as work:
        make_inputs(work)
        rows = list(measured(work))
    print(tabulate(rows, ("what", "seconds", "peak MiB", "most open files"), disable_numparse=True))


def make_inputs(work: Path) -> None:
    """Write what is not there yet."""
    many, big = work / "many", work / "big"
    if not many.exists():
        print(f"{WORLD} rank files ...", file=sys.stderr)
        for first in range(0, WORLD, RANKS_AT_ONCE):
            python(MANY, many, first, min(first + RANKS_AT_ONCE, WORLD), WORLD)
    if not big.exists():
        print("one rank with a pickle of 200 MB ...", file=sys.stderr)
        python(BIG, big, WORLD, PARAMETERS)
    if not (work / "5000.pt").exists():
        python(TENSORS, work / "5000.pt")
    if not (work / "sparse.safetensors").exists():
        python(SPARSE, work / "sparse.safetensors")


MANY = """
import sys
from pathlib import Path
from ckptools.training.fake_world import create_rank
out, first, last, world = Path(sys.argv[1]), *map(int, sys.argv[2:])
for rank in range(first, last):
    create_rank(out, world, rank, parameters=1)
"""

BIG = """
import sys
from pathlib import Path
from ckptools.training.fake_world import create_rank
create_rank(Path(sys.argv[1]), int(sys.argv[2]), 0, int(sys.argv[3]))
"""

TENSORS = """
import sys, torch
torch.save({f"layer{i}.weight": torch.full((64, 64), float(i)) for i in range(5000)}, sys.argv[1])
"""

SPARSE = """
import json, os, sys
size = 10_000_000_000
header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
with open(sys.argv[1], "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header)
    file.truncate(8 + len(header) + size)
"""


def python(code: str, *arguments: object) -> None:
    """Run a script in a process of its own."""
    run([sys.executable, "-c", code, *map(str, arguments)])


def measured(work: Path) -> Iterator[Row]:
    """Every command on every input."""
    one = str(next((work / "many").glob("*-rank7.pt")))
    many, big, out = str(work / "many"), str(next((work / "big").iterdir())), str(work / "out")
    size = Path(big).stat().st_size
    yield row(f"inspect one of {WORLD} rank files", ["inspect", one])
    yield row("inspect --all-ranks of them", ["inspect", many, "--all-ranks"])
    yield row("verify --deep of them, -j 1", ["verify", many, "--deep", "-j", "1"])
    yield row("verify --deep of them, -j 2", ["verify", many, "--deep", "-j", "2"])
    yield row("consolidate them to .pt", ["consolidate", many, "-o", f"{out}.pt", "--force"])
    yield row(f"inspect a rank file of {size >> 20} MiB, nearly all pickle", ["inspect", big, "--only-this-file"])
    yield row("inspect 5,000 tensors", ["inspect", str(work / "5000.pt")])
    yield row(
        "consolidate 5,000 tensors to safetensors",
        ["consolidate", str(work / "5000.pt"), "-o", f"{out}.safetensors", "--force"],
    )
    sparse = str(work / "sparse.safetensors")
    yield row("inspect a sparse file of 10 GB", ["inspect", sparse])
    yield row("verify --values of it", ["verify", sparse, "--values"])
    for left in work.glob("out.*"):
        left.unlink()


def row(what: str, arguments: Sequence[str]) -> Row:
    """Run a command and take its figures; exit code 1 says only that a check failed."""
    started = time.perf_counter()
    process = subprocess.Popen([*CKPTOOLS, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    most = 0
    while (usage := _ended(process.pid)) is None:
        most = max(most, _open_files(process.pid))
        time.sleep(0.005)
    seconds = time.perf_counter() - started
    told = process.stderr.read().decode(errors="replace") if process.stderr else ""
    status, peak = usage
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(arguments)}\n{told}")
    return what, f"{seconds:.2f}", f"{peak // 1024}", str(most)


def _ended(pid: int) -> tuple[int, int] | None:
    """Exit status and peak memory in KiB of a process that has ended."""
    ended, status, usage = os.wait4(pid, os.WNOHANG)
    return (status, usage.ru_maxrss) if ended else None


def _open_files(pid: int) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


if __name__ == "__main__":
    main()
