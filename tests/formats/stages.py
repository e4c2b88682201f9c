"""Stages of a pipeline as a plain script saves them: each rank its module, and its optimizer by number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 4


class Model(nn.Module):
    """An embedding, blocks that are named in the whole model's way, and a head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleDict({str(i): self._block() for i in range(blocks)})
        self.head = nn.Linear(WIDTH, 7)

    def _block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


def stage(number: int, stages: int, blocks: int = 4) -> Model:
    """The part of a model that a stage trains; every stage begins with the same weights."""
    torch.manual_seed(0)
    model, per_stage = Model(blocks), blocks // stages
    for name in list(model.blocks):
        if int(name) // per_stage != number:
            del model.blocks[name]
    if number > 0:
        del model.emb
    if number < stages - 1:
        del model.head
    return model


Params = Callable[[nn.Module], Any]


def all_in_one(model: nn.Module) -> Any:
    return model.parameters()


def by_decay(model: nn.Module) -> Any:
    """Two param groups, as most recipes make them: matrices decay, vectors do not."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


@dataclass
class Trained:
    """A stage that made some real steps: what it saves, and the moments of each of its parameters."""

    content: dict[str, Any]
    moments: dict[str, dict[str, torch.Tensor]]


def trained(model: nn.Module, seed: int, params: Params = all_in_one) -> Trained:
    """Make three steps of AdamW on a loss of the parameters."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(params(model), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        sum((p * torch.randn_like(p)).sum() for p in model.parameters()).backward()
        optimizer.step()
    moments = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    return Trained({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, moments)


def save(folder: Path, contents: Iterable[dict[str, Any]], name: str = "ckpt-rank{}.pt") -> Path:
    """Save what each rank has to a file of its own."""
    folder.mkdir(exist_ok=True)
    for rank, content in enumerate(contents):
        torch.save(content, folder / name.format(rank))
    return folder


def train_stages(stages: int = 2, params: Params = all_in_one, blocks: int = 4) -> list[Trained]:
    """Train every stage by itself."""
    return [trained(stage(number, stages, blocks), 100 + number, params) for number in range(stages)]
