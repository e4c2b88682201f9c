"""Section `alternatives` of `make load`: what others do on the same work, and what they say of two damaged copies.

The work is that of section `loading`: rank files, DCP, ZeRO-3 and Accelerate folders of about 1.3 GB each. One copy
has a flipped bit in the middle of a shard of its largest weight, the other lacks the file of this shard. Each
alternative runs as its own documentation says; ours is the command that gives the same output. DeepSpeed and picklescan
are run where they are installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import ckptools
from ckptools.dtypes import ITEMSIZE
from ckptools.model.tensor import Tensor
from tools.benchmarks import loading
from tools.benchmarks.measure import in_turn, peak, run, table_as_measured

CKPTOOLS = [sys.executable, "-m", "ckptools"]
PEER = [sys.executable, "-m", "tools.benchmarks.peers"]
ROUNDS = 3

TITLES = ("what", "theirs / ours", "peak theirs / ours", "a flipped bit", "a file is missing")

MAPPED = "import sys, torch; torch.load(sys.argv[1], mmap=True, weights_only=False, map_location='cpu')"


@dataclass(frozen=True)
class Alternative:
    """A tool, and the command of ours that does the same work.

    In both commands `{}` is the checkpoint, `{first}` its first rank file and `{out}` the output.

    Attributes:
        source: the checkpoint, a folder of the workplace.
        needs: the package that it needs; "" if torch has it.
    """

    name: str
    source: str
    theirs: Sequence[str]
    ours: Sequence[str]
    needs: str = ""


ACCELERATE = (sys.executable, "-m", "accelerate.commands.accelerate_cli")
FOUND = ("bash", "-c", '"$@" || [ $? = 1 ]', "-")
"""Before a command whose exit code 1 is its answer."""

CONSOLIDATE = (*CKPTOOLS, "consolidate")

ALTERNATIVES = (
    Alternative(
        "a script that joins what torch.load gives", "composer",
        (*PEER, "merge", "{}", "{out}.pt"), (*CONSOLIDATE, "{first}", "-o", "{out}.pt"),
    ),
    Alternative(
        "torch's format_utils dcp_to_torch", "dcp",
        (sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", "{}", "{out}.pt"),
        (*CONSOLIDATE, "{}", "-o", "{out}.pt"),
    ),
    Alternative(
        "DeepSpeed's zero_to_fp32.py", "zero3",
        (sys.executable, "{}/zero_to_fp32.py", "{}", "{out}"),
        (*CONSOLIDATE, "{}", "--only", "model", "-o", "{out}.pt"), "deepspeed",
    ),
    Alternative(
        "DeepSpeed's ds_to_universal", "zero3",
        (sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", "{}/global_step1",
         "--output_folder", "{out}"),
        (*CONSOLIDATE, "{}", "-o", "{out}.dcp"), "deepspeed",
    ),
    Alternative(
        "accelerate merge-weights", "accelerate",
        (*ACCELERATE, "merge-weights", "{}/pytorch_model_fsdp_0", "{out}"),
        (*CONSOLIDATE, "{}", "--only", "model", "-o", "{out}.safetensors"),
    ),
    Alternative(
        "picklescan", "composer",
        (*FOUND, sys.executable, "-m", "picklescan.cli", "-p", "{}"), (*CKPTOOLS, "inspect", "{first}"), "picklescan",
    ),
    Alternative(
        "torch.load(mmap=True) of one rank file", "weights.pt",
        (sys.executable, "-c", MAPPED, "{}"), (*CKPTOOLS, "inspect", "{}"),
    ),
)  # fmt: skip


def make(work: Path) -> None:
    """Make what `loading` loads, a folder of Accelerate and a `.pt`, and damaged copies of each."""
    loading.make(work)
    if not (work / "dcp").exists():
        loading.row(work, "", *loading.PAIRS["dcp.load of a DCP on 4 ranks beside FileSystemReader"])
    if not (work / "accelerate").exists():
        size = [word for name, value in loading.SIZE.items() for word in (f"--{name}", str(value))]
        options = ["--strategy", "fsdp2", "--steps", "1", "--batch", "1", "--layout", "accelerate"]
        run([*CKPTOOLS, "create", str(work / "accelerate"), *options, *size])
    if not (work / "weights.pt").exists():
        run([*CONSOLIDATE, str(work / "weights"), "-o", str(work / "weights.pt")])


def report(work: Path) -> Iterator[str]:
    """The lines of the table."""
    yield from table_as_measured(TITLES, (row(work, one) for one in ALTERNATIVES))


def row(work: Path, one: Alternative) -> Sequence[str]:
    """Run an alternative and ours in turn, then the alternative on both damaged copies."""
    if one.needs and not find_spec(one.needs):
        return (one.name, f"{one.needs} is not installed", "", "", "")
    out, source = work / "out", work / one.source
    pair = in_turn(_filled(one.ours, source, out), _filled(one.theirs, source, out), ROUNDS, lambda: _clear(work, out))
    said = []
    for damage in (_flip, _lose):
        copy = work / "damaged" / one.source
        shutil.rmtree(work / "damaged", ignore_errors=True)
        copy.parent.mkdir()
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
        if source.is_file() and damage is _lose:
            said.append("one file")
            continue
        damage(*_weight_in(copy))
        said.append(_said(one, copy, out))
        _clear(work, out)
    shutil.rmtree(work / "damaged")
    return (one.name, f"{1 / pair.ratio:.1f}", f"{peak(pair.theirs):.0f} / {peak(pair.ours):.0f} MiB", *said)


def _filled(command: Sequence[str], source: Path, out: Path) -> list[str]:
    first = next(source.glob("*-rank0.pt"), source) if source.is_dir() else source
    return [
        word.replace("{out}", str(out)).replace("{first}", str(first)).replace("{}", str(source)) for word in command
    ]


def _clear(work: Path, out: Path) -> None:
    for path in work.glob(f"{out.name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 16]))


def _lose(path: Path, _: int) -> None:
    path.unlink()


def _weight_in(source: Path) -> tuple[Path, int]:
    """A file with a shard of the largest weight of a checkpoint, and the middle byte of the shard in it."""
    ck = ckptools.open(next(source.glob("*-rank0.pt"), source), all_ranks=True)
    tensors = [value for value in ck.model.values() if isinstance(value, Tensor)]
    shard = max(tensors, key=lambda tensor: tensor.nbytes).found[-1]
    assert shard.source is not None
    return shard.source.path, shard.source.offset + shard.box.numel * ITEMSIZE[shard.source.dtype] // 2


def _said(one: Alternative, copy: Path, out: Path) -> str:
    """How an alternative ends on a damaged copy, in its own last words."""
    done = subprocess.run(
        _filled(one.theirs, copy, out), capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    if done.returncode == 0:
        return "says nothing"
    words = [line for line in done.stderr.splitlines() if line.strip()]
    return f"ends with {done.returncode}: {words[-1][:60] if words else ''}"
