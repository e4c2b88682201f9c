"""Checkpoints with real bytes: a cut of Llama 3 8B with AdamW's state on 32 ranks, consolidated beside `cp` and torch.

The cut has 2 of 32 layers and no embeddings, 2.6 GB: both inputs and an output fit into 8 GB of memory together.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.benchmarks.measure import Pair, in_turn, peak, run, seconds, table_as_measured
from tools.benchmarks.scale import CKPTOOLS, hollow

PEER = [sys.executable, "-m", "tools.benchmarks.peers"]
RANKS, LAYERS, ROUNDS = 32, 2, 3
HIDDEN, KEYS, INNER = 4096, 1024, 14336
"""Sizes of Llama 3 8B. Source: its config.json on the Hub."""

BLOCK = 16 << 20

MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEYS, HIDDEN), "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
}  # fmt: skip
SHAPES = {f"model.layers.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in MATRICES.items()}

RANK_FILES = """
import json, sys, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from tests.fake_world import fake_group
out, ranks, shapes = sys.argv[1], int(sys.argv[2]), json.load(open(sys.argv[3]))
def sharded(shape):
    local = torch.randint(256, (shape[0] // ranks, *shape[1:], 2), dtype=torch.uint8).view(torch.bfloat16).squeeze(-1)
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
for rank in range(ranks):
    with fake_group(rank, ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        model = {name: sharded(shape) for name, shape in shapes.items()}
        moments = {name: {"step": torch.tensor(1.0), "exp_avg": sharded(shape), "exp_avg_sq": sharded(shape)}
                   for name, shape in shapes.items()}
        optimizer = {"state": moments, "param_groups": [{"params": list(shapes), "lr": 3e-4}]}
        torch.save({"state": {"model": model, "optimizers": {"AdamW": optimizer}}}, f"{out}/ep0-ba1-rank{rank}.pt")
"""


def make(work: Path) -> None:
    """Write what is not there yet."""
    ranks, dcp, shapes = work / "weights-ranks", work / "weights-dcp", work / "weights.json"
    shapes.write_text(json.dumps(SHAPES))
    if not ranks.exists():
        print(f"{ranks.name} ...", file=sys.stderr)
        new = work / "weights-ranks.new"
        new.mkdir()
        run([sys.executable, "-c", RANK_FILES, str(new), str(RANKS), str(shapes)])
        new.rename(ranks)
    if not dcp.exists():
        new = work / "weights-dcp.new"
        hollow(new, RANKS, str(shapes), "--layout", "dcp")
        for file in new.rglob("*.distcp"):
            fill_holes(file)
        new.rename(dcp)


def fill_holes(path: Path) -> None:
    """Write random bytes into every hole of a file."""
    block = os.urandom(BLOCK)
    with path.open("r+b") as file:
        at, end = 0, path.stat().st_size
        while at < end:
            start = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            if start >= end:
                return
            try:
                at = os.lseek(file.fileno(), start, os.SEEK_DATA)
            except OSError:  # the hole is the last of the file
                at = end
            for place in range(start, at, BLOCK):
                os.pwrite(file.fileno(), block[: min(BLOCK, at - place)], place)


def report(work: Path) -> Iterator[str]:
    """The table of this section."""
    titles = ("what", "ours", "theirs", "ratio", "ours", "peak ours / theirs")
    yield from table_as_measured(titles, _rows(work))


def _rows(work: Path) -> Iterator[list[str]]:
    ranks, dcp, out = (str(work / name) for name in ("weights-ranks", "weights-dcp", "weights-out"))
    copy, theirs = ["cp", "-r"], [*PEER, "dcp", dcp, f"{out}.theirs"]
    yield _row(work, "rank files to .safetensors / cp -r", ranks, "safetensors", [*copy, ranks, f"{out}.theirs"])
    yield _row(work, "rank files to .pt / cp -r", ranks, "pt", [*copy, ranks, f"{out}.theirs"])
    yield _row(work, "DCP to .safetensors / cp -r", dcp, "safetensors", [*copy, dcp, f"{out}.theirs"])
    yield _row(work, "DCP to .pt / dcp_to_torch_save", dcp, "pt", theirs)


def _row(work: Path, what: str, source: str, suffix: str, theirs: list[str]) -> list[str]:
    nbytes = sum(file.stat().st_size for file in Path(source).rglob("*") if file.is_file())
    ours = [*CKPTOOLS, "consolidate", source, "-o", str(work / f"weights-out.{suffix}"), "--only", "all"]
    pair = in_turn(ours, theirs, ROUNDS, lambda: _clear(work))
    return [what, *_figures(pair), f"{nbytes / seconds(pair.ours) / 1e9:.2f} GB/s", _peaks(pair)]


def _clear(work: Path) -> None:
    for left in work.glob("weights-out*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def _figures(pair: Pair) -> list[str]:
    return [f"{seconds(pair.ours):.1f} s", f"{seconds(pair.theirs):.1f} s", f"{pair.ratio:.2f}"]


def _peaks(pair: Pair) -> str:
    return f"{peak(pair.ours):.0f} / {peak(pair.theirs):.0f} MiB"
