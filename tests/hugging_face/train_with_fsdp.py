"""Train toy models with FSDP2 on two gloo ranks and save each with DCP: `python -m … FOLDER NAME...`.

`FOLDER/NAME/run` is the checkpoint, as `get_model_state_dict` and `dcp.save` make it; `FOLDER/NAME/trained.pt` is the
whole state dict of the model that was trained, gathered by torch. The ranks are forks of this process: to import
transformers takes each of them longer than to train.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # as every optimizer does, here once for all ranks
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers  # noqa: F401 - here once for all ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

from tests.hugging_face.toy_models import VOCABULARY, toy_model

RANKS = 2


def train_each(rank: int, models: dict[str, Any], out: Path) -> None:
    """Be one rank of all trainings, one after the other."""
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=RANKS)
    for name, model in models.items():
        train(rank, model.train(), out / name)
    dist.barrier()
    dist.destroy_process_group()


def train(rank: int, model: Any, folder: Path) -> None:
    """Train a model for three steps and save it."""
    mesh = init_device_mesh("cpu", (RANKS,))
    layers: Any = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        tokens = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / "run")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(whole, folder / "trained.pt")


if __name__ == "__main__":
    models = {name: toy_model(name) for name in sys.argv[2:]}
    start_processes(train_each, (models, Path(sys.argv[1])), RANKS, start_method="fork")
