"""Train a toy model with FSDP2 on two gloo ranks and save it with DCP: `python -m … NAME FOLDER`.

`FOLDER/run` is the checkpoint, as `get_model_state_dict` and `dcp.save` make it; `FOLDER/trained.pt` is the whole state
dict of the model that was trained, gathered by torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

from tests.hugging_face.toy_models import VOCABULARY, toy_model

RANKS = 2


def train(rank: int, name: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    model = toy_model(name).train()
    mesh = init_device_mesh("cpu", (RANKS,))
    layers: Any = model.transformer.h if name == "gpt2" else model.model.layers
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
    dcp.save(state, checkpoint_id=f"{folder}/run")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(whole, Path(folder, "trained.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    start_processes(train, (sys.argv[1], sys.argv[2]), nprocs=RANKS, start_method="spawn")
