"""`make load`: what big inputs cost. `python -m tools.benchmarks.load scale` prints one section of it.

stores: rank files in a bucket of a local S3 server, by requests and bytes, with 20 ms of latency added to each request.

scale: worlds of 64, 256 and 1,024 ranks and a model of 70 B parameters, by files whose values are holes.

metadata: DCP folders of a model of 70 B parameters on 64 and 256 ranks, beside torch's reader of their lists;
metadata-512, by name only: on 512 ranks too. metadata-filled, by name only: with values, of 128 bytes an item on 256
ranks, in place of holes.

ranks: 64 rank files of 5,000 tensors beside torch.load(mmap=True); ranks-1024, by name only: 64, 256 and 1,024 of them.

browse: the first screen of 1,024 ranks beside inspect, and keys that are pressed while it goes on reading.

weights: 2.6 GB of real bytes on 32 ranks, consolidated beside `cp` and torch's own converter.

loading: 1.3 GB into an FSDP2 model on 2 and 4 ranks, beside torch's own readers and DeepSpeed's converter.

alternatives: the same 1.3 GB through what others have for it, and what they say of damaged copies.

big: against something run in the same minute; most of the time goes into making the inputs.

1,024 rank files     real FSDP1 files of torch's fake process group, one for each rank
200 MB pickle        one rank of 1,024: torch's ShardedTensors for 580 parameters and their moments, 1.8 million records
5,000 tensors        one torch.save file
10 GB sparse file    a safetensors file that is nearly all hole
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptools.tensor_io.fetch_ahead import in_threads
from tools.benchmarks import alternatives, browse, loading, metadata, ranks, scale, stores, weights
from tools.benchmarks.measure import run, table_as_measured, workplace

CKPTOOLS = [sys.executable, "-m", "ckptools"]
PEER = [sys.executable, "-m", "tools.benchmarks.peers"]
WORLD = 1024
PARAMETERS = 580
"""Of the one rank whose pickle is 200 MB."""

RANKS_AT_ONCE = 64
"""Ranks that one process makes; each leaves some of torch's caches behind."""

Row = tuple[str, str, str, str, str, str]


def main() -> None:
    """Make the inputs, run every command once, print one table."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.load", description=__doc__)
    parser.add_argument("--keep", type=Path, help="folder for the inputs, kept for the next run")
    every = {**SECTIONS, **BY_NAME}
    usual = f"all but {', '.join(BY_NAME)} where none is named"
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(every)}; {usual}")
    options = parser.parse_args()
    if unknown := set(options.sections) - every.keys():
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(every)}")
    with workplace(options.keep) as work:
        for name in options.sections or SECTIONS:
            print_section(name, every[name], work)


def print_section(name: str, section: Section, work: Path) -> None:
    """Make the inputs of a section and print its lines, each when it is known."""
    begun = time.monotonic()
    print(f"\n{name}: about {section.minutes} minutes\n", flush=True)
    section.make(work)
    for line in section.report(work):
        print(line, flush=True)
    print(f"\n{name} took {time.monotonic() - begun:.0f} s", flush=True)


def against_others(work: Path) -> Iterator[str]:
    """The table of every command beside what else could be used."""
    titles = ("what", "ours", "theirs", "ratio", "peak ours / theirs", "files open at once")
    yield from table_as_measured(titles, measured(work))


def make_inputs(work: Path) -> None:
    """Write what is not there yet."""
    many, big = work / "many", work / "big"
    if not many.exists():
        print(f"{WORLD} rank files ...", file=sys.stderr)
        new = work / "many.new"
        new.mkdir(exist_ok=True)
        firsts = range(0, WORLD, RANKS_AT_ONCE)
        in_threads(lambda first: python(MANY, new, first, first + RANKS_AT_ONCE, WORLD), firsts, 2)
        new.rename(many)
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
from tests.fake_world import create_rank
out, first, last, world = Path(sys.argv[1]), *map(int, sys.argv[2:])
for rank in range(first, last):
    create_rank(out, world, rank, parameters=1)
"""

BIG = """
import sys
from pathlib import Path
from tests.fake_world import write_sharded
out, world, parameters = Path(sys.argv[1]), *map(int, sys.argv[2:])
write_sharded(out, world, range(1), parameters)
"""

TENSORS = """
import sys, torch
torch.save({f"layer{i}.weight": torch.full((64, 64), float(i)) for i in range(5000)}, sys.argv[1])
"""

SPARSE = """
import json, os, sys
size = 10_000_000_000
header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
with open(sys.argv[1], "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header)
    file.truncate(8 + len(header) + size)
"""


def python(code: str, *arguments: object) -> None:
    """Run a script in a process of its own."""
    run([sys.executable, "-c", code, *map(str, arguments)])


def measured(work: Path) -> Iterator[Row]:
    """Every command on every input, once, and what it is compared with in the same minute."""
    many, out = str(work / "many"), work / "out"
    one, big = (str(next((work / name).glob("*rank0.pt"))) for name in ("many", "big"))
    tensors, sparse = str(work / "5000.pt"), str(work / "sparse.safetensors")
    inspect, verify, consolidate = ([*CKPTOOLS, name] for name in ("inspect", "verify", "consolidate"))
    out.mkdir(exist_ok=True)
    yield row(f"inspect one of {WORLD} rank files / torch.load", [*inspect, one], [*PEER, "load", one])
    yield row(f"inspect --all-ranks of {WORLD} / torch.load", [*inspect, many, "--all-ranks"], [*PEER, "load", many])
    every = [*inspect, many, "--all-ranks", "-j"]
    yield row(f"inspect --all-ranks of {WORLD} -j 2 / -j 1", [*every, "2"], [*every, "1"])
    yield row(f"verify --deep of {WORLD} / torch.load", [*verify, many, "--deep"], [*PEER, "load", many])
    to_pt = [*consolidate, many, "-o", str(out / "many.pt")]
    yield row(f"consolidate {WORLD} to .pt / torch.load", to_pt, [*PEER, "load", many])
    size = Path(big).stat().st_size >> 20
    yield row(f"inspect a pickle of {size} MiB / torch.load", [*inspect, big, "--only-this-file"], [*PEER, "load", big])
    yield row("inspect 5,000 tensors / torch.load", [*inspect, tensors], [*PEER, "load", tensors])
    to_safetensors = [*consolidate, tensors, "-o", str(out / "5000.safetensors")]
    yield row("consolidate 5,000 tensors to safetensors / cp", to_safetensors, ["cp", tensors, str(out / "copy.pt")])
    yield row("inspect a sparse file of 10 GB / cat", [*inspect, sparse], ["cat", sparse])
    yield row("verify --values of it / cat", [*verify, sparse, "--values"], ["cat", sparse])
    shutil.rmtree(out)


def row(what: str, ours: Sequence[str], theirs: Sequence[str]) -> Row:
    """Run both and compare."""
    a, b = run(ours, watch=True), run(theirs, watch=True)
    memory = f"{a.peak >> 20} / {b.peak >> 20} MiB"
    return what, f"{a.seconds:.2f} s", f"{b.seconds:.2f} s", f"{a.seconds / b.seconds:.2f}", memory, str(a.files)


@dataclass(frozen=True)
class Section:
    """A part of the figures.

    Attributes:
        make: makes its inputs in a folder.
        report: the lines that it prints.
        minutes: that both take together on two cores.
    """

    make: Callable[[Path], None]
    report: Callable[[Path], Iterable[str]]
    minutes: int


SECTIONS = {
    "stores": Section(stores.make, stores.report, 2),
    "scale": Section(scale.make, scale.report, 2),
    "metadata": Section(metadata.maker(metadata.SMALL), metadata.reporter(metadata.SMALL), 6),
    "ranks": Section(ranks.maker(ranks.SMALL), ranks.reporter(ranks.SMALL), 3),
    "browse": Section(browse.make, browse.report, 2),
    "weights": Section(weights.make, weights.report, 8),
    "loading": Section(loading.make, loading.report, 3),
    "alternatives": Section(alternatives.make, alternatives.report, 6),
    "big": Section(make_inputs, against_others, 12),
}

BY_NAME = {
    "ranks-1024": Section(ranks.maker(ranks.LARGE), ranks.reporter(ranks.LARGE), 20),
    "metadata-filled": Section(metadata.make_filled, metadata.reporter(metadata.SMALL, "filled"), 12),
    "metadata-512": Section(metadata.maker(metadata.LARGE), metadata.reporter(metadata.LARGE), 20),
}
"""Sections that are run only where they are named."""


if __name__ == "__main__":
    main()
