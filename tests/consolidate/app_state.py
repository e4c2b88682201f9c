"""A training script as PyTorch's tutorial of distributed checkpoints writes it: `AppState`, and an average beside.

Each start is as many ranks as it is told. One start trains and saves; any other begins with other weights, loads the
folder with the same call, and leaves in a file what it then holds.
"""

from __future__ import annotations

import multiprocessing
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel


class AppState(Stateful):
    """The model and the optimizer of a run, as the tutorial saves them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


class Average(nn.Module):
    """An average with a name of its own for the module in it, as many scripts write it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def net(seed: int) -> nn.Module:
    """The layers of the run."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))


class Run:
    """A run after some steps, all of it."""

    def __init__(self, seed: int, steps: int) -> None:
        self.model, self.ema, self.own = net(seed), AveragedModel(net(seed)), Average(net(seed + 7))
        for module in (self.model, self.ema.module, self.own.module):
            fully_shard(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 * (seed + 1))
        self.step = 0
        for _ in range(steps):
            self.model(torch.randn(6, 8)).sum().backward()
            self.optimizer.step()
            self.ema.update_parameters(self.model)
            self.step += 1

    def state(self) -> dict[str, Any]:
        """The state dict of the script; the same for saving and for loading."""
        averages = {"ema": self.ema.state_dict(), "own": self.own.state_dict()}
        return {"app": AppState(self.model, self.optimizer), **averages, "step": self.step}

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        self.ema.load_state_dict(state["ema"])
        self.own.load_state_dict(state["own"])
        self.step = state["step"]

    def full(self) -> dict[str, Any]:
        """Everything the run holds, with full tensors."""
        state = {**self.state(), "app": AppState(self.model, self.optimizer).state_dict()}
        return _full(state)


def _full(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _full(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_full(value) for value in node]
    return node.full_tensor() if isinstance(node, DTensor) else node


def main(folder: Path, rank: int, ranks: int, given: Path | None) -> None:
    """Be one rank: save to `folder`, or load `given` and leave what was loaded in `folder`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store of {ranks} {given and given.name}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=100))
    if given is None:
        run = Run(seed=0, steps=3)
        dcp.save(run.state(), checkpoint_id=folder / "saved")
        name = "saved.pt"
    else:
        run = Run(seed=5, steps=1)
        run.load(given)
        name = f"{given.name} on {ranks}.pt"
    full = run.full()
    if rank == 0:
        torch.save(full, folder / name)
    dist.destroy_process_group()


def start(folder: Path, ranks: int, given: Path | None = None) -> list[int | None]:
    """Run every rank and return the exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    started = [context.Process(target=main, args=(folder, rank, ranks, given)) for rank in range(ranks)]
    for one in started:
        one.start()
    for one in started:
        one.join(100)
    return [one.exitcode for one in started]
