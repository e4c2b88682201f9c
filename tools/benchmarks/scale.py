"""Many ranks and large models, of files whose values are holes: time and memory at 64, 256 and 1,024 ranks.

Seconds are of the processor, of all processes, without those that starting Python and importing ckptools take. What
says more than they do is the slope: by how much a figure grows when there are more ranks, where both axes are
logarithmic. 1 is linear.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.benchmarks.measure import run, table_as_measured

CKPTOOLS = [sys.executable, "-m", "ckptools"]
WORLDS = (64, 256, 1024)
SHAPES = {f"layers.{n}.weight": (2048, 8) for n in range(50)}
"""With AdamW's two moments and step counts 200 tensors, of which every rank has two rows."""

LLAMA_RANKS = 64

STAGES = """
import json, os, sys
import ckptools
from tools.benchmarks.measure import high_water
laps, begun = [], sum(os.times()[:4])
def lap():
    global begun
    now = sum(os.times()[:4])
    laps.append(now - begun)
    begun = now
ck = ckptools.open(sys.argv[1], all_ranks=True); lap()
assert ck.verify(ignore=["CK017"]).ok; lap()
zeros = {"allow_missing": True, "fill": "zero"}
planned = ck.consolidate(sys.argv[1] + ".pt", only="all", dry_run=True, **zeros).planned
copies = len(planned.copies); lap()
print(json.dumps({"seconds": laps, "copies": copies, "memory": high_water()}))
"""


@dataclass(frozen=True)
class Stages:
    """What opening all ranks of a world, verifying and planning took.

    Attributes:
        seconds: of each of the three.
        copies: of bytes in the plan.
        memory: peak of the process that plans, in bytes.
    """

    seconds: list[float]
    copies: int
    memory: int


def make(work: Path) -> None:
    """Write what is not there yet."""
    shapes = work / "shapes.json"
    shapes.write_text(json.dumps(SHAPES))
    for world in WORLDS:
        hollow(work / f"world-{world}", world, str(shapes))
    hollow(work / "llama", LLAMA_RANKS, "llama3-70b")
    hollow(work / "llama-dcp", LLAMA_RANKS, "llama3-70b", "--layout", "dcp")
    hollow(work / "llama-hf", LLAMA_RANKS, "llama3-70b", "--layout", "huggingface", "--max-shard-size", "5GB")


def hollow(out: Path, world: int, shapes: str, *options: str) -> None:
    """Make a checkpoint whose values are holes, if it is not there yet."""
    if not out.exists():
        print(f"{out.name} ...", file=sys.stderr)
        begin = [sys.executable, "-m", "tools.simulated", str(out), "--jobs", "2"]
        run([*begin, "--world-size", str(world), "--shapes", shapes, *options])


def report(work: Path) -> Iterator[str]:
    """The two tables of this section."""
    titles = ("200 tensors of", "open all", "verify", "plan", "copies in it", "peak of that process")
    yield from table_as_measured(titles, _worlds(work))
    yield ""
    titles = (f"Llama 3 70B, bfloat16, {LLAMA_RANKS} ranks", "seconds", "processor", "peak of all processes")
    yield from table_as_measured(titles, _llama(work))


def _worlds(work: Path) -> Iterator[list[str]]:
    found = []
    for world in WORLDS:
        found.append(_stages(work / f"world-{world}"))
        yield _row(f"{world} ranks", found[-1])
    slopes = [slope_of([one.seconds[i] for one in found], WORLDS) for i in range(3)]
    copies, memory = (slope_of([getattr(one, name) for one in found], WORLDS) for name in ("copies", "memory"))
    yield ["slope, first to last", *(f"{slope:.2f}" for slope in (*slopes, copies, memory))]


def _stages(folder: Path) -> Stages:
    done = subprocess.run([sys.executable, "-c", STAGES, str(folder)], check=True, capture_output=True, text=True)
    return Stages(**json.loads(done.stdout))


def _row(what: str, one: Stages) -> list[str]:
    return [what, *(f"{seconds:.2f} s" for seconds in one.seconds), f"{one.copies:,}", f"{one.memory >> 20} MiB"]


def slope_of(figures: Sequence[float], worlds: Sequence[int]) -> float:
    """Of the line through the figures of the first and the last world, both axes logarithmic."""
    return math.log(figures[-1] / figures[0]) / math.log(worlds[-1] / worlds[0])


def _llama(work: Path) -> Iterator[list[str]]:
    one, dcp, hf = str(work / "llama" / "ep0-ba0-rank0.pt"), str(work / "llama-dcp"), str(work / "llama-hf")
    plan = ["--only", "model.layers.0.*", "--dry-run", "-o", str(work / "plan.safetensors")]
    plan += ["--allow-missing", "--fill", "zero"]
    for what, command in (
        ("rank files: inspect one rank", ["inspect", one]),
        ("inspect --all-ranks", ["inspect", one, "--all-ranks"]),
        ("verify", ["verify", one]),
        ("DCP: inspect", ["inspect", dcp]),
        ("verify", ["verify", dcp]),
        ("safetensors: inspect", ["inspect", hf]),
        ("verify", ["verify", hf]),
        ("consolidate --dry-run of one layer", ["consolidate", hf, *plan]),
    ):
        done = run([*CKPTOOLS, *command], watch=True)
        yield [what, f"{done.seconds:.2f} s", f"{done.cpu:.2f} s", f"{done.peak_of_all >> 20} MiB"]
