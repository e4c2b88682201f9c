"""Folders as transformers' Trainer leaves them, made with torch alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file


def trainer_folder(folder: Path, world: int) -> Path:
    """A `checkpoint-3` with a model, an optimizer, a scheduler, RNG states and counters after three steps."""
    folder.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for _ in range(3):
        model(torch.randn(2, 7)).sum().backward()
        optimizer.step()
        scheduler.step()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    for rank in range(world):
        name = f"rng_state_{rank}.pth" if world > 1 else "rng_state.pth"
        torch.save({"python": random.getstate(), "cpu": torch.get_rng_state()}, folder / name)
    log = [{"loss": 0.5, "step": 1}, {"loss": float("nan"), "step": 2}]
    (folder / "trainer_state.json").write_text(json.dumps({"epoch": 0.5, "global_step": 3, "log_history": log}))
    (folder / "config.json").write_text("{}")
    return folder
