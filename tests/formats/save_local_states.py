"""Real LOCAL_STATE_DICT checkpoints of FSDP1, four ranks each, and their values.

`save_all(OUT)` writes `OUT/<variant>/rank{R}.pt`, and of the same moment `OUT/<variant>.pt`, the full state dict, and
`OUT/<variant>-moments.pt`, `{fqn: {slot: values}}`. `OUT/accelerate/` holds `flat_named` as Accelerate lays it out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.training.forked import run_ranks

WORLD = 4
Moments = dict[str, dict[str, torch.Tensor]]
BF16 = MixedPrecision(param_dtype=torch.bfloat16)


class Inner(nn.Module):
    """A unit in a unit, with so few elements that not every rank has one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("offset", torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 9)
        self.inner = Inner()
        self.down = nn.Linear(9, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.down(self.up(x).relu()))


class Model(nn.Module):
    """Units of equal size, a unit in a unit, a tied weight, a parameter between modules, buffers."""

    def __init__(self, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 7))
        self.emb = nn.Linear(7, 11, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11)
        self.register_buffer("seen", torch.tensor(3))
        if tied:
            self.head.weight = self.emb.weight
        if frozen:
            self.norm.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x + self.shift)[..., :7]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


VARIANTS: dict[str, dict[str, Any]] = {
    "flat": {},
    "flat_named": {},
    "flat_tied": {"tied": True, "dtype": torch.bfloat16},
    "orig": {"use_orig_params": True, "groups": True},
    "orig_named": {"use_orig_params": True, "frozen": True},
    "orig_mixed": {"use_orig_params": True, "tied": True, "frozen": True, "mixed_precision": BF16},
}
"""How each is wrapped and trained; those whose names end in `named` save the optimizer state by name."""


def wrapped(tied=False, frozen=False, dtype=torch.float32, groups=False, **options):
    model = Model(tied, frozen).to(dtype)
    policy = ModuleWrapPolicy({Block, Inner})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def optimizer_for(model: nn.Module, groups: bool) -> torch.optim.Optimizer:
    params = list(model.parameters())
    if groups:
        params = [{"params": params[1::2]}, {"params": params[0::2], "weight_decay": 0.0}]
    return torch.optim.AdamW(params, lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, rank: int) -> None:
    """Two steps, each rank with data of its own."""
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 7, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(out: Path, name: str, rank: int) -> None:
    torch.manual_seed(5)
    model = wrapped(**VARIANTS[name])
    optimizer = optimizer_for(model, VARIANTS[name].get("groups", False))
    train(model, optimizer, VARIANTS[name].get("dtype", torch.float32), rank)
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(), LocalOptimStateDictConfig(offload_to_cpu=False)
    ):
        named = name.endswith("_named")
        optim = FullyShardedDataParallel.optim_state_dict(model, optimizer) if named else optimizer.state_dict()
        state = {"model": model.state_dict(), "optim": optim, "step": 2}
        torch.save(state, out / name / f"rank{rank}.pt")
        if name == "flat_named":
            as_accelerate(out / "accelerate", state, rank)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        weights = model.state_dict()
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    if VARIANTS[name].get("use_orig_params"):
        moments = joined(model, optimizer, weights)
    if rank == 0:
        torch.save(weights, out / f"{name}.pt")
        torch.save(moments, out / f"{name}-moments.pt")


def as_accelerate(folder: Path, state: dict[str, Any], rank: int) -> None:
    """What `accelerator.save_state` writes under LOCAL_STATE_DICT."""
    torch.save(state["model"], folder / f"pytorch_model_fsdp_rank{rank}.bin")
    dcp.save({"optimizer": state["optim"]}, storage_writer=dcp.FileSystemWriter(folder / "optimizer_0"))
    torch.save({"step": 0, "torch_manual_seed": torch.get_rng_state()}, folder / f"random_states_{rank}.pkl")


def joined(model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, torch.Tensor]) -> Moments:
    """The ranks' runs of each parameter's live moments, one behind the other.

    With `use_orig_params` torch 2.13 gathers them on CPU into one buffer, so that `exp_avg` has the last slot's values.
    """
    names = {p: n.replace("_fsdp_wrapped_module.", "") for n, p in model.named_parameters()}
    mine = {names[p]: state for p, state in optimizer.state.items()}
    every: list[Moments] = [{}] * WORLD
    dist.all_gather_object(every, mine)
    moments: Moments = {}
    for name in names.values():
        states = [state[name] for state in every if state.get(name)]
        for slot in states[0] if states else ():
            values = [state[slot] for state in states]
            whole = torch.cat(values).reshape(weights[name].shape) if values[0].ndim else values[0]
            moments.setdefault(name, {})[slot] = whole
    return moments


def in_ranks(out: Path, names: Iterable[str], save: Callable[[Path, str, int], None]) -> None:
    """Save every variant in ranks that this forks, each in a folder of its name."""
    for name in names:
        (out / name).mkdir(parents=True)
    run_ranks(WORLD, be_a_rank, out, tuple(names), save)


def be_a_rank(out: Path, names: tuple[str, ...], save: Callable[[Path, str, int], None]) -> None:
    """Be one rank of all variants."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for name in names:
        save(out, name, dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()


def save_all(out: Path) -> None:
    """Fill a folder."""
    (out / "accelerate").mkdir(parents=True)
    in_ranks(out, VARIANTS, save)
