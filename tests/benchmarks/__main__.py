"""Make the inputs, run every comparison, print one table. `--small` is a quick look; `--keep DIR` keeps the inputs."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import ckptools
from ckptools.views.tables import Column, table
from tests.benchmarks.measure import Pair, in_turn, peak, run, seconds, workplace

PYTHON = [sys.executable, "-m"]
CKPTOOLS = [*PYTHON, "ckptools"]
PEER = [*PYTHON, "tests.benchmarks.peers"]

# Sizes of the trained transformer: about 1.3 GB with its two moments, or 25 MB for a quick look.
LARGE = ["--width", "1030", "--layers", "8", "--vocab", "1999", "--context", "8", "--batch", "1"]
SMALL = ["--width", "130", "--layers", "8", "--vocab", "1999", "--context", "8", "--batch", "1"]

Row = tuple[str, str, str, str, str, str]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--small", action="store_true", help="small inputs, for a quick look")
    parser.add_argument("--rounds", type=int, default=5, help="counted pairs of runs")
    parser.add_argument("--keep", type=Path, help="folder for the inputs, kept for the next run")
    options = parser.parse_args()
    with workplace(options.keep) as work:
        make_inputs(work, SMALL if options.small else LARGE)
        rows = list(compare(work, options.rounds))
    headers = ("what", "ours", "theirs", "ratio", "peak ours / theirs", "to reach")
    print("\n".join(table([Column(title) for title in headers], rows)))


def make_inputs(work: Path, size: list[str]) -> None:
    """Train with 4 ranks and save as rank files and as DCP; one file of a 256-rank world."""
    for name, layout in (("ranks", "composer"), ("dcp", "dcp")):
        if not (work / name).exists():
            print(f"training with 4 ranks, saving as {layout} ...", file=sys.stderr)
            run([*CKPTOOLS, "create", str(work / name), "--steps", "1", "--layout", layout, *size])
    if not (work / "wide").exists():
        print("one rank of 256, through torch's fake process group ...", file=sys.stderr)
        run([*PYTHON, "ckptools.training.fake_world", str(work / "wide"), "--world-size", "256", "--rank", "0"])
    (work / "out").mkdir(exist_ok=True)


def compare(work: Path, rounds: int) -> Iterator[Row]:
    """Every comparison, as rows of the table."""
    one = str(next((work / "ranks").glob("*rank0.pt")))
    wide = str(next((work / "wide").glob("*.pt")))
    out = work / "out"

    def clear() -> None:
        for file in out.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()

    look = in_turn([*CKPTOOLS, "inspect", one], [*PEER, "look", one], rounds, clear)
    yield row("inspect one rank of 4 / script", look, f"{look.ratio:.3f}", "<= 0.100; <= 60 MiB")
    look = in_turn([*CKPTOOLS, "inspect", wide, "--only-this-file"], [*PEER, "look", wide], rounds, clear)
    yield row("inspect one rank of 256 / script", look, f"{look.ratio:.3f}", "ours < 1.5 s")
    cost = ckptools.open(one).cost.nbytes
    size = Path(one).stat().st_size
    yield ("bytes read by inspect / file", f"{cost:,}", f"{size:,}", f"{cost / size:.5f}", "", "no tensor bytes")

    ranks, everything = str(work / "ranks"), ["--only", "all"]
    cp = ["cp", "-r", ranks, str(out / "copy")]
    safe = in_turn([*CKPTOOLS, "consolidate", ranks, "-o", str(out / "a.safetensors"), *everything], cp, rounds, clear)
    yield row("consolidate to safetensors / cp", safe, both(safe), "(t - 0.5 s) / cp <= 1.25; <= 200 MiB")
    bare = [*CKPTOOLS, "consolidate", ranks, "-o", str(out / "a.safetensors"), *everything, "--unchecked"]
    safe = in_turn(bare, cp, rounds, clear)
    yield row("consolidate to safetensors --unchecked / cp", safe, both(safe), "what the checksums cost")
    ours = [*CKPTOOLS, "consolidate", ranks, "-o", str(out / "a.pt")]
    pt = in_turn(ours, cp, rounds, clear)
    yield row("consolidate to .pt / cp", pt, both(pt), "(t - 0.5 s) / cp <= 2; <= 200 MiB")
    folder = in_turn([*CKPTOOLS, "consolidate", ranks, "-o", str(out / "a.dcp")], cp, rounds, clear)
    yield row("consolidate to DCP / cp", folder, both(folder), "(t - 0.5 s) / cp <= 2; <= 200 MiB")
    checked = in_turn([*ours, "--check"], ours, rounds, clear)
    yield row("consolidate to .pt with --check / without", checked, f"{checked.ratio:.2f}", "")
    deep = in_turn([*CKPTOOLS, "verify", ranks, "--deep"], [*PEER, "crc", ranks, "1"], rounds, clear)
    yield row("verify --deep / read and zlib.crc32", deep, both(deep), "(t - 0.5 s) / theirs <= 0.33")
    for name, command in (("consolidate to .pt", ours), ("verify --deep", [*CKPTOOLS, "verify", ranks, "--deep"])):
        scaled = in_turn([*command, "-j", str(os.cpu_count())], [*command, "-j", "1"], rounds, clear)
        yield row(f"{name} -j {os.cpu_count()} / -j 1", scaled, both(scaled), "scales over cores")
    merge = in_turn(ours, [*PEER, "merge", ranks, str(out / "b.pt")], max(2, rounds // 2), clear)
    yield row("consolidate to .pt / load-all script", merge, f"{merge.ratio:.3f}", "<= 0.25; memory <= 1/10")
    dcp = in_turn(ours, [*PEER, "dcp", str(work / "dcp"), str(out / "c.pt")], max(2, rounds // 2), clear)
    yield row("consolidate to .pt / dcp_to_torch_save", dcp, f"{dcp.ratio:.3f}", "<= 0.25; memory <= 1/10")


def both(pair: Pair) -> str:
    """The plain ratio, and the one that allows half a second to start."""
    return f"{pair.ratio:.2f} ({pair.over:.2f})"


def row(what: str, pair: Pair, ratio: str, goal: str) -> Row:
    """A row of the table."""
    memory = f"{peak(pair.ours):.0f} / {peak(pair.theirs):.0f} MiB"
    return what, f"{seconds(pair.ours):.2f} s", f"{seconds(pair.theirs):.2f} s", ratio, memory, goal


if __name__ == "__main__":
    main()
