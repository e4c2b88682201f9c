"""One of three ranks: load every DCP folder of a folder into sharded tensors, then resume a run from one.

Rank 0 leaves what was loaded in `NAME.pt`, gathered, and in `resumed.json` what came of training on.
"""

from __future__ import annotations

import json
import multiprocessing
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ckptools
from ckptools.training import layouts, model
from ckptools.training.options import CreateOptions, ModelSize
from ckptools.training.run import Run, prepare, train_step

RANKS = 3
CAN_TRAIN = torch.cuda.is_available() or hasattr(getattr(torch.cpu, "Stream", None), "record_event")
"""FSDP2 of torch 2.6 asks for streams, which a CPU has only in later ones."""


def load_sharded(folder: Path, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Load everything in a DCP folder as a training job would; without a mesh in this process alone."""
    metadata = FileSystemReader(folder).read_metadata()
    flat = {fqn: _target(described, mesh) for fqn, described in metadata.state_dict_metadata.items()}
    tree = unflatten_state_dict(flat, metadata.planner_data)
    group = None if mesh is None else mesh.get_group()
    dcp.load(tree, checkpoint_id=folder, process_group=group)
    return {fqn: _local(_at(tree, path)) for fqn, path in metadata.planner_data.items()}


def _target(described: Any, mesh: DeviceMesh | None) -> Any:
    """An empty value of the kind: rows of a tensor on each rank, which are filled with something wrong."""
    if not hasattr(described, "size"):
        return "not loaded"
    full = torch.full(described.size, 7).to(described.properties.dtype)
    if mesh is None or not described.size:
        return full
    rank, rows = mesh.get_local_rank(), -(-full.shape[0] // mesh.size())
    local = full[min(rank * rows, full.shape[0]) :][:rows].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def gather(loaded: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Join the rows of all ranks on rank 0."""
    ranks: list[Any] = [None] * mesh.size()
    dist.gather_object(loaded, ranks if dist.get_rank() == 0 else None, group=mesh.get_group())
    if dist.get_rank():
        return {}
    sharded = [k for k, v in loaded.items() if isinstance(v, torch.Tensor) and v.ndim]
    return loaded | {k: torch.cat([rank[k] for rank in ranks]) for k in sharded}


def resume(folder: Path) -> dict[str, Any]:
    """Train, save rank files, make a DCP of them, load it into a new run, take one more step in both."""
    size = ModelSize(width=20, layers=1, context=7)
    options = CreateOptions(folder / "run", "fsdp2", steps=2, layout="verl", batch=2, size=size)
    run = prepare(options, lambda _: None)
    batches = [tokens for (tokens,), _ in zip(run.loader, range(3), strict=False)]
    run.losses += [train_step(run, tokens) for tokens in batches[:2]]
    run.step = 2
    _save(run, folder)

    other = prepare(CreateOptions(folder / "run", "fsdp2", seed=9, batch=2, size=size), lambda _: None)
    state = {
        "model": get_model_state_dict(other.model),
        "optimizer": get_optimizer_state_dict(other.model, other.optimizer),
        "extra_state": {"lr_scheduler": other.scheduler.state_dict()},
    }
    dcp.load(state, checkpoint_id=folder / "resumed")
    set_model_state_dict(other.model, state["model"])
    set_optimizer_state_dict(other.model, other.optimizer, state["optimizer"])
    other.scheduler.load_state_dict(state["extra_state"]["lr_scheduler"])
    losses = [_seeded_step(r, batches[2]) for r in (run, other)]
    lrs = [r.scheduler.get_last_lr() for r in (run, other)]
    return {"losses": losses, "lrs": lrs, "differ": _differing(run, other)}


def _seeded_step(run: Run, tokens: torch.Tensor) -> float:
    """Take a step whose dropout and noise in the data are the same for every run."""
    model.seed_all(dist.get_rank())
    return train_step(run, tokens)


def _save(run: Run, folder: Path) -> None:
    """Save as verl does, with the optimizer by number, and make a DCP of it on one rank."""
    ranks = folder / "ranks"
    ranks.mkdir(exist_ok=True)
    layouts.save_verl(run, ranks)
    dist.barrier()
    if dist.get_rank() == 0:
        ckptools.consolidate(ranks, folder / "resumed", format="dcp", layout="flat")
    dist.barrier()


def _differing(run: Run, other: Run) -> list[str]:
    """What is not bit for bit the same after the step: weights, buffers and moments."""
    a, b = ({**get_model_state_dict(r.model), **_moments(r)} for r in (run, other))
    same = {k: torch.equal(_local(a[k]), _local(b[k])) for k in a}
    return [k for k, equal in same.items() if not equal]


def _moments(run: Run) -> dict[str, Any]:
    state = get_optimizer_state_dict(run.model, run.optimizer)["state"]
    return {f"{fqn}/{slot}": value for fqn, slots in state.items() for slot, value in slots.items()}


def _save_loaded(path: Path, mesh: DeviceMesh, to: Path) -> None:
    full = gather(load_sharded(path, mesh), mesh)
    if dist.get_rank() == 0:
        torch.save(full, to)


def main(folder: Path, rank: int) -> None:
    """Be one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=100))
    everyone, two = DeviceMesh("cpu", list(range(RANKS))), DeviceMesh("cpu", [0, 1])
    for path in sorted(folder.glob("*.dcp")):
        _save_loaded(path, everyone, path.with_suffix(".pt"))
    if rank < two.size():
        _save_loaded(sorted(folder.glob("*.dcp"))[0], two, folder / "two ranks.pt")
    if CAN_TRAIN:
        resumed = resume(folder)
        if rank == 0:
            (folder / "resumed.json").write_text(json.dumps(resumed))
    dist.destroy_process_group()


def start(folder: Path) -> list[int | None]:
    """Run every rank and return the exit codes; torch is imported once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks = [context.Process(target=main, args=(folder, rank)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    return [rank.exitcode for rank in ranks]
