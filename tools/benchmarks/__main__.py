"""Make the inputs, run every comparison, print one table. `--small` is a quick look; `--keep DIR` keeps the inputs."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import ckptools
from ckptools.display.tables import Column, table
from tools.benchmarks.measure import Pair, Run, in_turn, peak, run, seconds, workplace

PYTHON = [sys.executable, "-m"]
CKPTOOLS = [*PYTHON, "ckptools"]
PEER = [*PYTHON, "tools.benchmarks.peers"]

# Sizes of the trained transformer: about 1.3 GB with its two moments, or 25 MB for a quick look.
LARGE = ["--width", "1030", "--layers", "8", "--vocab", "1999", "--context", "8", "--batch", "1"]
SMALL = ["--width", "130", "--layers", "8", "--vocab", "1999", "--context", "8", "--batch", "1"]

ONE_TENSOR = ["--filter", "start"]
"""What a command takes to start: opening all ranks, importing numpy, reading the least that there is."""

NOTHING = Run(0, 0, 0)
"""A start that takes no time."""

Row = tuple[str, str, str, str, str, str]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description=__doc__)
    parser.add_argument("--small", action="store_true", help="small inputs, for a quick look")
    parser.add_argument("--rounds", type=int, default=5, help="counted pairs of runs")
    parser.add_argument("--keep", type=Path, help="folder for the inputs, kept for the next run")
    options = parser.parse_args()
    with workplace(options.keep) as work:
        make_inputs(work, SMALL if options.small else LARGE)
        rows = [row for part in (compare, compare_values, compare_trees) for row in part(work, options.rounds)]
    headers = ("what", "ours", "theirs", "ratio", "peak ours / theirs", "to reach")
    print("\n".join(table([Column(title) for title in headers], rows)))


def make_inputs(work: Path, size: list[str]) -> None:
    """Train with 4 ranks and save as rank files and as DCP, and a step later; one file of a 256-rank world."""
    for name, layout, steps in (("ranks", "composer", "1"), ("dcp", "dcp", "1"), ("later", "composer", "2")):
        if not (work / name).exists():
            print(f"training with 4 ranks, saving as {layout} ...", file=sys.stderr)
            run([*CKPTOOLS, "create", str(work / name), "--steps", steps, "--layout", layout, *size])
    if not (work / "wide").exists():
        print("one rank of 256, through torch's fake process group ...", file=sys.stderr)
        run(
            [
                *PYTHON,
                "tests.fake_world",
                str(work / "wide"),
                "--world-size",
                "256",
                "--rank",
                "0",
            ]
        )
    for name, code in (("columns", COLUMNS), ("tiny.pt", TINY)):
        if not (work / name).exists():
            run([sys.executable, "-c", code, str(work / name)])
    if not (work / "20000.safetensors").exists():
        run([sys.executable, "-c", KEYS, str(work / "20000")])
    if not (work / "copy").exists():
        shutil.copytree(work / "ranks", work / "copy")
    (work / "out").mkdir(exist_ok=True)


DIFFERENT = ["bash", "-c", '"$@" || [ $? = 1 ]', "-"]
"""Before a command whose exit code 1 is its answer."""


def both_folders(work: Path) -> Path:
    """A folder of links to the files of both checkpoints that are held against each other."""
    folder = work / "both"
    folder.mkdir(exist_ok=True)
    for name in ("ranks", "later"):
        for path in (work / name).glob("*.pt"):
            link = folder / f"{name}-{path.name}"
            if not link.is_symlink():
                link.symlink_to(path.absolute())
    return folder


COLUMNS = """
import sys, torch
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from tests.fake_world import fake_group
out, side, world = Path(sys.argv[1]), 1 << 14, 4
out.mkdir()
for rank in range(world):
    with fake_group(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        local = torch.full((side, side // world), float(rank))
        torch.save({"model": {"w": DTensor.from_local(local, mesh, [Shard(1)])}}, out / f"ep0-ba1-rank{rank}.pt")
"""
"""A tensor of 1 GiB whose columns 4 ranks share."""

KEYS = """
import sys, torch
from safetensors.torch import save_file
shapes = {"attn.q": (4, 4), "attn.k": (4, 4), "attn.v": (4, 4), "attn.o": (4, 4), "mlp.up": (8, 4), "mlp.down": (4, 8),
          "norm1": (4,), "norm2": (4,)}
layers = {f"layers.{n}.{name}.weight": torch.ones(shape) for n in range(2500) for name, shape in shapes.items()}
torch.save({"model": layers}, sys.argv[1] + ".pt")
save_file(layers, sys.argv[1] + ".safetensors")
"""
"""20,000 tensors."""

TINY = """
import sys, torch
torch.save({"w": torch.ones(2)}, sys.argv[1])
"""


def compare(work: Path, rounds: int) -> Iterator[Row]:
    """Every comparison, as rows of the table."""
    one = str(next((work / "ranks").glob("*rank0.pt")))
    wide = str(next((work / "wide").glob("*.pt")))
    out = work / "out"

    def clear() -> None:
        for file in out.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()

    look = in_turn([*CKPTOOLS, "inspect", one], [*PEER, "look", one], rounds, clear)
    yield row("inspect one rank of 4 / script", look, f"{look.ratio:.3f}", "<= 0.083; <= 60 MiB")
    look = in_turn([*CKPTOOLS, "inspect", wide, "--only-this-file"], [*PEER, "look", wide], rounds, clear)
    yield row("inspect one rank of 256 / script", look, f"{look.ratio:.3f}", "<= 0.100; ours < 1.5 s")
    for name, command in (("--help", ["--help"]), ("inspect of one tensor", ["inspect", str(work / "tiny.pt")])):
        start = in_turn([*CKPTOOLS, *command], [sys.executable, "-c", "pass"], rounds, clear)
        yield row(f"{name} / python -c pass", start, f"{start.ratio:.1f}", "<= 4.8")
    yield lazy(one, rounds)
    cost = ckptools.open(one).cost.nbytes
    size = Path(one).stat().st_size
    yield ("bytes read by inspect / file", f"{cost:,}", f"{size:,}", f"{cost / size:.5f}", "", "no tensor bytes")

    ranks, everything = str(work / "ranks"), ["--only", "all"]
    cp = ["cp", "-r", ranks, str(out / "copy")]
    safe = in_turn([*CKPTOOLS, "consolidate", ranks, "-o", str(out / "a.safetensors"), *everything], cp, rounds, clear)
    yield row("consolidate to safetensors / cp", safe, both(safe, 0.4), "(t - 0.4 s) / cp <= 1.25; <= 200 MiB")
    columns = [*CKPTOOLS, "consolidate", str(work / "columns"), "-o", str(out / "a.safetensors")]
    wide_copy = in_turn(columns, ["cp", "-r", str(work / "columns"), str(out / "copy")], rounds, clear)
    yield row("consolidate 1 GiB of Shard(1) / cp", wide_copy, both(wide_copy), "<= 79 MiB")
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


def compare_values(work: Path, rounds: int) -> Iterator[Row]:
    """What looks at every value, against reading as many bytes; the time to start is taken off, as it was measured."""
    ranks, later, copy = (str(work / name) for name in ("ranks", "later", "copy"))
    once, twice = ([*PEER, "crc", folder, "1"] for folder in (ranks, str(both_folders(work))))
    diff, stats = [*DIFFERENT, *CKPTOOLS, "diff"], [*CKPTOOLS, "stats", ranks, "--section", "all"]
    skip = in_turn([*diff, ranks, copy, "--values"], [*diff, ranks, copy], rounds)
    yield row("diff --values of the same checksums / without", skip, f"{skip.ratio:.2f}", "no tensor bytes: <= 1.2")
    begun = in_turn([*diff, ranks, later, "--every-byte", *ONE_TENSOR], [*stats, *ONE_TENSOR], rounds)
    for name, other in (("changed", later), ("is the same", copy)):
        held = in_turn([*diff, ranks, other, "--every-byte"], twice, rounds)
        told = beyond(held, begun.ours)
        yield row(f"diff of all that {name} / read and zlib.crc32", held, told, "beyond start <= 2")
    cmp = ["bash", "-c", 'for file in "$0"/*; do cmp "$file" "$1/${file##*/}"; done', ranks, copy]
    same = in_turn([*diff, ranks, copy, "--every-byte"], cmp, rounds)
    yield row("diff of all that is the same / cmp", same, beyond(same, begun.ours), "")
    figures = in_turn(stats, once, rounds)
    told = beyond(figures, begun.theirs)
    yield row("stats of all / read and zlib.crc32", figures, told, "beyond start <= 2; <= 150 MiB")
    deep = in_turn(stats, [*CKPTOOLS, "verify", ranks, "--deep"], rounds)
    yield row("stats of all / verify --deep", deep, beyond(deep, begun.theirs), "what is beyond reading and checksums")


def compare_trees(work: Path, rounds: int) -> Iterator[Row]:
    """The keys of a large file, against the summary of it."""
    for kind in ("pt", "safetensors"):
        path = str(work / f"20000.{kind}")
        for options in ([], ["--jsonl"]):
            tree = in_turn([*CKPTOOLS, "tree", path, *options], [*CKPTOOLS, "inspect", path], rounds)
            what = " ".join(["tree", *options, "of 20,000 tensors in a", f".{kind} / inspect"])
            yield row(what, tree, f"{tree.ratio:.2f} (CPU {tree.beyond([NOTHING])[1]:.2f})", "<= 1.3")


LAZY = """
import sys, time, torch, ckptools
from ckptools.model.tree import tensors_in
def load(all_ranks):
    started = time.perf_counter()
    with ckptools.open(sys.argv[1], all_ranks=all_ranks) as checkpoint:
        for _, tensor in tensors_in(checkpoint.raw):
            tensor.load()
    return time.perf_counter() - started
for _ in range(int(sys.argv[2]) + 1):
    print(load(False), load(True))
"""
"""In a process of its own, for the memory of one that has imported torch is counted as its children's too."""


def lazy(path: str, rounds: int) -> Row:
    """Opening one rank's file and loading every tensor, against the same with all ranks read."""
    command = [sys.executable, "-c", LAZY, path, str(rounds)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    times = [tuple(map(float, line.split())) for line in lines[1:]]
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(a / b for a, b in times)
    name = "load() of every tensor, one rank opened / all"
    return name, f"{ours:.2f} s", f"{theirs:.2f} s", f"{ratio:.2f}", "", "<= 1.2"


def both(pair: Pair, start: float = 0.5) -> str:
    """The plain ratio, and the one that allows some time to start."""
    return f"{pair.ratio:.2f} ({pair.over(start):.2f})"


def beyond(pair: Pair, start: Sequence[Run]) -> str:
    """The plain ratio, and those without the time to start, in wall time and in the processor's."""
    wall, cpu = pair.beyond(start)
    return f"{pair.ratio:.2f} ({wall:.2f}, CPU {cpu:.2f})"


def row(what: str, pair: Pair, ratio: str, goal: str) -> Row:
    """A row of the table."""
    memory = f"{peak(pair.ours):.0f} / {peak(pair.theirs):.0f} MiB"
    return what, f"{seconds(pair.ours):.2f} s", f"{seconds(pair.theirs):.2f} s", ratio, memory, goal


if __name__ == "__main__":
    main()
