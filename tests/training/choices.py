"""Several runs, one after the other, by the same ranks; the losses of each go into `OUT.json`, beside its folder."""

from __future__ import annotations

import json

import torch.distributed as dist

from ckptools.training.options import CreateOptions
from ckptools.training.rank import say_nothing, train_and_save


def train_all(runs: list[CreateOptions]) -> None:
    """Be one rank; every rank of the runs is called alike."""
    dist.init_process_group("gloo")
    for asked in runs:
        created = train_and_save(asked, None, say_nothing)
        if created.rank == 0:
            asked.out.with_suffix(".json").write_text(json.dumps(created.losses))
    dist.barrier()
    dist.destroy_process_group()
