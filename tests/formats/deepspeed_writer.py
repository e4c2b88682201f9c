"""Writes checkpoints as DeepSpeed does, from full values: the same files, keys, flat tensors and foreign classes.

Written after runtime/engine.py, zero/stage_1_and_2.py, zero/stage3.py and bf16_optimizer.py, without DeepSpeed.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

JUNK = 1e30
"""What padding holds, so that it is seen where it should not be."""

SLOTS = ("exp_avg", "exp_avg_sq")


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


class ZeroStageEnum(int, enum.Enum):
    disabled, optimizer_states, gradients, weights = range(4)


@dataclass
class fragment_address:  # noqa: N801 - DeepSpeed's own name
    numel: int
    start: int


HOMES = {
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment": fragment_address,
}


@contextmanager
def deepspeed_classes() -> Iterator[None]:
    """The classes under the names that DeepSpeed's pickles mention, while something is saved."""
    names = {name.rsplit(".", n)[0] for name in HOMES for n in range(4)}
    sys.modules.update({name: types.ModuleType(name) for name in names})
    for name, cls in HOMES.items():
        cls.__module__ = name
        setattr(sys.modules[name], cls.__name__, cls)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def values(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every element of every parameter another number."""
    found, start = {}, 1
    for name, shape in shapes.items():
        n = torch.Size(shape).numel()
        found[name] = (torch.arange(start, start + n, dtype=torch.float64) / 7).to(dtype).reshape(shape)
        start += n
    return found


@dataclass
class Run:
    """A training run to be saved.

    `groups` are the names of each param group; everything else in `master` is unknown to the optimizer.
    """

    master: dict[str, torch.Tensor]
    groups: list[list[str]]
    world: int = 2
    stage: int = 1
    low: torch.dtype = torch.float32
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    step: int = 7
    mappings: bool = True
    round_robin: bool = False
    alignment: int = 1
    padding_on_last_rank_only: bool = False
    elastic: bool = False
    sub_group_size: int = 10**9
    straddle: tuple[int, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    mp: int = 0
    mp_world: int = 1
    dims: dict[str, int] | None = None
    module: Any = "state dict"
    bf16_optimizer: bool = False

    def slot(self, name: str, slot: str) -> torch.Tensor:
        """The full value of one slot of a parameter's state."""
        return self.master[name].float() * (3 if slot == "exp_avg" else 5) + 0.5

    def order(self, group: list[str]) -> list[str]:
        if not self.round_robin:
            return group
        return [name for part in range(self.world) for name in group[part :: self.world]]

    def save(self, folder: Path) -> Path:
        """Write `<folder>/global_stepN` and `latest`; return the tag folder."""
        tag = folder / f"global_step{self.step}"
        tag.mkdir(parents=True, exist_ok=True)
        (folder / "latest").write_text(tag.name)
        with deepspeed_classes():
            for rank in range(self.world):
                if rank == 0 or self.stage == 3:
                    torch.save(self.model_states(rank), tag / self.model_name(rank))
                if self.stage:
                    torch.save(self.optim_states(rank), tag / self.optim_name(rank))
        return tag

    def model_name(self, rank: int) -> str:
        head = f"zero_pp_rank_{rank}_" if self.stage == 3 else ""
        return f"{head}mp_rank_{self.mp:02d}_model_states.pt"

    def optim_name(self, rank: int) -> str:
        bf16 = "bf16_" if self.low is torch.bfloat16 else ""
        return f"{bf16}zero_pp_rank_{rank}_mp_rank_{self.mp:02d}_optim_states.pt"

    def state_dict(self) -> OrderedDict[str, torch.Tensor]:
        full = OrderedDict((k, v.to(self.low)) for k, v in {**self.master, **self.frozen}.items())
        if self.stage == 3:
            full = OrderedDict((k, torch.empty(0, dtype=self.low)) for k in full)
        full.update(self.buffers)
        for alias, name in self.shared.items():
            full[alias] = full[name]
        return full

    def model_states(self, rank: int) -> dict[str, Any]:
        zero3 = self.stage == 3
        shapes = [OrderedDict((n, self.master[n].shape) for n in self.order(g)) for g in self.sub_groups()]
        config = {"zero_optimization": {"stage": self.stage, "round_robin_gradients": self.round_robin}}
        config |= {"bf16": {"enabled": self.low is torch.bfloat16}, **self.config}
        frozen = OrderedDict((n, self.part(t.to(self.low), rank)) for n, t in self.frozen.items()) if zero3 else None
        states = {
            "module": self.state_dict() if self.module == "state dict" else self.module,
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": shapes if self.stage and not self.bf16_optimizer else None,
            "frozen_param_shapes": OrderedDict((n, t.shape) for n, t in self.frozen.items())
            if self.stage > 1
            else None,
            "shared_params": self.shared if rank == 0 else {},
            "frozen_param_fragments": frozen,
            "lr_scheduler": {"last_batch_iteration": self.step - 1},
            "skipped_steps": 0,
            "global_steps": self.step,
            "global_samples": self.step * 32,
            "dp_world_size": self.world,
            "mp_world_size": self.mp_world,
            "ds_config": config,
            "ds_version": "0.19.8",
        }
        if self.dims:
            states["checkpoint_parallel_dimensions"] = self.dims
        return states | self.extra

    def optim_states(self, rank: int) -> dict[str, Any]:
        state = self.stage3(rank) if self.stage == 3 else self.partitions(rank)
        return {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}

    def common(self) -> dict[str, Any]:
        return {
            "loss_scaler": LossScaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "clip_grad": 1.0,
            "zero_stage": ZeroStageEnum(self.stage),
        }

    def torch_state(self, flats: list[dict[str, torch.Tensor]], of_group: list[int]) -> dict[str, Any]:
        """What `torch.optim.Optimizer.state_dict()` says of one flat tensor per (sub-)group."""
        state = {i: {"step": torch.tensor(float(self.step)), **flat} for i, flat in enumerate(flats)}
        groups = [
            {"lr": 0.1 / (g + 1), "params": [i for i, of in enumerate(of_group) if of == g]}
            for g in range(len(self.groups))
        ]
        return {"state": state, "param_groups": groups}

    # Stages 1 and 2.

    def paddings(self, names: list[str]) -> list[int]:
        found, at = [], 0
        for i, name in enumerate(names):
            at += self.master[name].numel()
            found.append(0 if i == len(names) - 1 else -at % self.alignment)
            at += found[-1]
        return found

    def buffer(self, group: list[str], slot: str | None) -> torch.Tensor:
        """The whole flat buffer of a group, padded."""
        names, pieces = self.order(group), []
        for name, padding in zip(names, self.paddings(names), strict=True):
            value = self.master[name] if slot is None else self.slot(name, slot)
            pieces += [value.float().reshape(-1), torch.full((padding,), JUNK)]
        flat = torch.cat(pieces)
        return torch.cat([flat, torch.full((-len(flat) % (2 * self.world),), JUNK)])

    def padding(self, group: list[str], rank: int) -> int:
        names = self.order(group)
        used = sum(self.master[n].numel() for n in names) + sum(self.paddings(names))
        total = len(self.buffer(group, None))
        if self.padding_on_last_rank_only or self.bf16_optimizer:
            return total - used if rank == self.world - 1 else 0
        size = total // self.world
        return min(max((rank + 1) * size - used, 0), size)

    def mapping(self, group: list[str], rank: int) -> OrderedDict[str, fragment_address]:
        """`param_slice_mappings`: of the order before the shuffle, unless there is padding between parameters."""
        paddings = self.paddings(self.order(group))
        names = self.order(group) if any(paddings) else group
        size = len(self.buffer(group, None)) // self.world
        low, high, at = rank * size, (rank + 1) * size, 0
        found = OrderedDict()
        for name, padding in zip(names, paddings, strict=True):
            a, b = max(at, low), min(at + self.master[name].numel(), high)
            if a < b:
                found[name] = fragment_address(b - a, a - low)
            at += self.master[name].numel() + padding
        return found

    def partitions(self, rank: int) -> dict[str, Any]:
        cut = [{s: self.buffer(g, s).chunk(self.world)[rank].clone() for s in (None, *SLOTS)} for g in self.groups]
        lean = [c[None][: len(c[None]) - self.padding(g, rank)] for c, g in zip(cut, self.groups, strict=True)]
        masters = [c[None] for c in cut] if self.bf16_optimizer else lean
        flats = [{s: c[s] for s in SLOTS} for c in cut]
        base: Any = self.torch_state(flats, list(range(len(self.groups))))
        if self.elastic:
            base = [{s: f[s][: len(m)] for s in SLOTS} for f, m in zip(flats, masters, strict=True)]
        state = self.common() | {
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": [self.padding(g, rank) for g in self.groups],
            "partition_count": [self.world] * len(self.groups),
            "ds_version": "0.19.8",
        }
        if self.alignment > 1:
            state["param_alignment_paddings"] = [self.paddings(self.order(g)) for g in self.groups]
        if self.mappings:
            state["param_slice_mappings"] = [self.mapping(g, rank) for g in self.groups]
        if self.bf16_optimizer:
            state = {k: v for k, v in state.items() if k not in ("zero_stage", "loss_scaler", "overflow")}
        return state

    # Stage 3.

    def sub_groups(self) -> list[list[str]]:
        """The groups, in stage 3 cut after as many elements as a sub-group may have."""
        if self.stage != 3:
            return self.groups
        return [names for names, _ in self.sub_groups_of_groups()]

    def sub_groups_of_groups(self) -> list[tuple[list[str], int]]:
        found: list[tuple[list[str], int]] = []
        for number, group in enumerate(self.groups):
            names: list[str] = []
            for name in group:
                names.append(name)
                if sum(self.master[n].numel() for n in names) >= self.sub_group_size:
                    found.append((names, number))
                    names = []
            found += [(names, number)] if names else []
        return found

    def part(self, value: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's piece of a parameter, padded to the size of the others."""
        size = -(-value.numel() // self.world)
        flat = torch.full((size * self.world,), JUNK).to(value.dtype)
        flat[: value.numel()] = value.reshape(-1)
        return flat[rank * size : (rank + 1) * size].clone()

    def row(self, names: list[str], slot: str | None, rank: int) -> torch.Tensor:
        values_ = [self.master[n] if slot is None else self.slot(n, slot) for n in names]
        return torch.cat([self.part(v.float(), rank) for v in values_]) if values_ else torch.empty(0)

    def stage3(self, rank: int) -> dict[str, Any]:
        listed = self.sub_groups_of_groups()
        cut = [{s: self.row(names, s, rank) for s in (None, *SLOTS)} for names, _ in listed]
        of_group = [number for _, number in listed]
        if self.straddle:
            whole = {s: torch.cat([c[s] for c in cut]) for s in (None, *SLOTS)}
            sizes = [*self.straddle, len(whole[None]) - sum(self.straddle)]
            ends = list(accumulate(sizes))
            cut = [{s: whole[s][e - n : e].clone() for s in whole} for n, e in zip(sizes, ends, strict=True)]
            of_group = [0] * len(cut)
        flats = [{s: c[s] for s in SLOTS} for c in cut]
        return self.common() | {
            "partition_count": self.world,
            "optimizer_state_dict": self.torch_state(flats, of_group),
            "fp32_flat_groups": [c[None] for c in cut],
        }
