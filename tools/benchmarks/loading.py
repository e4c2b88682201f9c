"""Section `loading` of `make load`: checkpoints into an FSDP2 model, beside torch's own readers and the usual detours.

Ranks of gloo are started once for each pair, and take turns: ours, theirs, ours, theirs. Only loading is timed, from
the barrier before it to the barrier after it; memory is the most that a rank has resident beyond what it had before,
when it had its tensors.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.benchmarks.measure import high_water, run, table_as_measured

SIZE = {"width": 1030, "layers": 8, "vocab": 1999, "context": 8}
"""About 1.3 GB with both moments."""

WEIGHTS_ALONE = {**SIZE, "layers": 24}
"""As much without them."""

LAYOUTS = ("composer",)
ROUNDS = 5

STARTED = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

TITLES = ("what", "ours", "theirs", "ratio", "memory ours / theirs", "bytes read / kept")

PAIRS = {
    "dcp.load of a DCP on 4 ranks beside FileSystemReader": (4, "dcp", "reader", "torch_reader"),
    "4 FSDP1 rank files into FSDP2 on 2 ranks beside consolidate and dcp.load": (2, "composer", "reader", "detour"),
    "DeepSpeed ZeRO-3 of 4 ranks into FSDP2 on 2 beside zero_to_fp32 and torch.load": (
        2,
        "zero3",
        "model",
        "zero_to_fp32",
    ),
    "safetensors into FSDP2 on 4 ranks beside HuggingFaceStorageReader": (4, "weights", "model", "torch_hf"),
}


ZERO3 = """
import sys, deepspeed, torch
from ckptools.training.model import Transformer
from ckptools.training.options import ModelSize
from tools.benchmarks.loading import SIZE
deepspeed.init_distributed(dist_backend="gloo")
model = Transformer(ModelSize(**SIZE))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "bf16": {"enabled": True},
          "zero_force_ds_cpu_optimizer": False}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
engine.backward(engine(torch.zeros(1, SIZE["context"], dtype=torch.long)).float().sum())
engine.step()
engine.save_checkpoint(sys.argv[1])
"""


WEIGHTS = """
import os, sys
from safetensors.torch import save_file
from ckptools.training.model import Transformer
from ckptools.training.options import ModelSize
from tools.benchmarks.loading import WEIGHTS_ALONE
state = Transformer(ModelSize(**WEIGHTS_ALONE)).state_dict()
del state["head.weight"]
os.mkdir(sys.argv[1])
save_file(state, sys.argv[1] + "/model.safetensors")
"""


def make(work: Path) -> None:
    """Train with 4 ranks and save; the weights alone are not trained, and the ranks save the DCP as they load it."""
    for layout in LAYOUTS:
        if not (work / layout).exists():
            size = [word for name, value in SIZE.items() for word in (f"--{name}", str(value))]
            steps = ["--steps", "1", "--batch", "1", "--layout", layout]
            run([sys.executable, "-m", "ckptools", "create", str(work / layout), *steps, *size])
    if not (work / "weights").exists():
        run([sys.executable, "-c", WEIGHTS, str(work / "weights")])
    if find_spec("deepspeed") and not (work / "zero3").exists():
        code = work / "zero3.py"
        code.write_text(ZERO3)
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
        words = [*STARTED, "--nproc-per-node=4", str(code), str(work / "zero3")]
        subprocess.run(words, check=True, capture_output=True, env=environment)


def report(work: Path) -> Iterator[str]:
    """Yield the lines of the table."""
    yield from table_as_measured(TITLES, (row(work, what, *of) for what, of in PAIRS.items()))


def row(work: Path, what: str, ranks: int, layout: str, ours: str, theirs: str) -> Sequence[str]:
    """Time one pair."""
    if not (work / layout).exists() and layout == "zero3":
        return (what, "not run: deepspeed is not installed", *[""] * 4)
    words = [*STARTED, f"--nproc-per-node={ranks}", "-m", __name__, str(work), layout, ours, theirs]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    turns = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
    mine, others = turns[::2], turns[1::2]
    seconds = [statistics.median(turn["seconds"] for turn in some) for some in (mine, others)]
    ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(mine, others, strict=True))
    memory = [max(turn["memory"] for turn in some) / 2**20 for some in (mine, others)]
    return (
        what,
        *(f"{one:.2f} s" for one in seconds),
        f"{ratio:.2f}",
        f"{memory[0]:.0f} / {memory[1]:.0f} MiB",
        f"{mine[0]['read']:.2f}",
    )


# -- what each rank does -----------------------------------------------------------------------------------------------


def main() -> None:
    """One of the ranks of a pair: work, layout, ours, theirs."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")
    work, layout, *sides = sys.argv[1:]
    dist.init_process_group("gloo")
    size = WEIGHTS_ALONE if layout == "weights" else SIZE
    state = state_of(size, whole_run=layout not in ("weights", "zero3"))
    saved = (Path(work) / layout / ".metadata").exists()
    dist.barrier()  # every rank has looked before one of them saves
    if layout == "dcp" and not saved:
        dcp.save(state, checkpoint_id=Path(work) / layout)
    turns = [turn(WAYS[side], Path(work), layout, state) for _ in range(ROUNDS + 1) for side in sides][len(sides) :]
    if dist.get_rank() == 0:
        print(json.dumps(turns), flush=True)
    dist.destroy_process_group()


def state_of(size: Mapping[str, int], whole_run: bool) -> dict[str, Any]:
    """The state dict of an FSDP2 model and its optimizer on this rank."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ckptools.training.model import Transformer, decayed_names, make_optimizer
    from ckptools.training.options import ModelSize

    model = Transformer(ModelSize(**size))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if whole_run:
        optimizer = make_optimizer("AdamW", model.named_parameters(), decayed_names(model))
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    else:
        del state["model"]["head.weight"]  # it is tied, and the others have only the other name
    return state


def turn(load: Callable[[Path, str, dict[str, Any]], int], work: Path, layout: str, state: dict[str, Any]) -> Any:
    """Load once; seconds, memory in bytes, and bytes read over bytes kept."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.tensor import DTensor

    tensors = [value for value in flatten_state_dict(state)[0].values() if isinstance(value, DTensor)]
    kept = sum(tensor.to_local().nbytes for tensor in tensors)
    for tensor in tensors:
        tensor.detach().to_local().fill_(7)
    ctypes.CDLL(None).malloc_trim(0)  # else what an earlier turn has freed hides what this one takes
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak of the resident memory begins anew
    before = high_water()
    dist.barrier()
    started = time.perf_counter()
    with torch.no_grad():
        read = load(work, layout, state)
    dist.barrier()
    seconds = time.perf_counter() - started
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (kept, read, high_water() - before))
    assert not any((tensor.to_local() == 7).all() for tensor in tensors if tensor.to_local().numel() > 100)
    read_by_all = sum(one[1] for one in every) / sum(one[0] for one in every)
    return {"seconds": seconds, "memory": max(one[2] for one in every), "read": read_by_all}


def reader(work: Path, layout: str, state: dict[str, Any], cast: bool = False) -> int:
    """Load through ckptools."""
    import torch.distributed.checkpoint as dcp

    import ckptools

    path = next((work / layout).glob("*-rank0.pt"), work / layout)
    storage = ckptools.StorageReader(path, cast=cast)
    dcp.load(state, storage_reader=storage)
    return storage.bytes_read


def model(work: Path, layout: str, state: dict[str, Any]) -> int:
    """Load the model through ckptools; ZeRO keeps frozen weights in its own dtype alone."""
    return reader(work, layout, state, cast=True)


def torch_reader(work: Path, layout: str, state: dict[str, Any]) -> int:
    """Load a DCP as torch does."""
    import torch.distributed.checkpoint as dcp

    dcp.load(state, checkpoint_id=work / layout)
    return 0


def torch_hf(work: Path, layout: str, state: dict[str, Any]) -> int:
    """Load safetensors as torch does."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    dcp.load(state["model"], storage_reader=HuggingFaceStorageReader(path=str(work / layout)))
    return 0


def detour(work: Path, layout: str, state: dict[str, Any]) -> int:
    """Write a DCP on rank 0, and load it as torch does."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import ckptools

    out = work / "detour.dcp"
    if dist.get_rank() == 0:
        path = next((work / layout).glob("*-rank0.pt"))
        ckptools.consolidate(path, out, layout="flat", force=True)
    dist.barrier()
    dcp.load(state, checkpoint_id=out)
    return 0


def zero_to_fp32(work: Path, layout: str, state: dict[str, Any]) -> int:
    """Let rank 0 write what DeepSpeed makes of the folder, and every rank load all of it."""
    import torch
    import torch.distributed as dist
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
    from torch.distributed.tensor import DTensor, distribute_tensor

    out = work / "zero_to_fp32"
    if dist.get_rank() == 0:
        shutil.rmtree(out, ignore_errors=True)
        convert_zero_checkpoint_to_fp32_state_dict(str(work / layout), str(out), max_shard_size=None)
    dist.barrier()
    whole = {}
    for file in sorted(out.glob("*.bin")):
        whole |= torch.load(file, weights_only=True)
    for name, tensor in state["model"].items():
        if isinstance(tensor, DTensor):
            mine = distribute_tensor(whole[name].float(), tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(mine)
    return 0


WAYS = {way.__name__: way for way in (reader, model, torch_reader, torch_hf, zero_to_fp32, detour)}


if __name__ == "__main__":
    main()
