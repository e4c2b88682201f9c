"""Several runs, one after the other, by the same ranks; the losses of each go into `OUT.json`, beside its folder."""

from __future__ import annotations

import json
import shutil

import torch.distributed as dist

from ckptools.cluster.waiting import say_nothing
from ckptools.training import output
from ckptools.training.options import CreateOptions
from ckptools.training.rank import train_and_save


def train_all(runs: list[CreateOptions]) -> None:
    """Be one rank; every rank of the runs is called alike."""
    dist.init_process_group("gloo")
    for asked in runs:
        partial = output.partial_folder(asked.out, "run")
        partial.mkdir(parents=True, exist_ok=True)
        created = train_and_save(asked, partial, say_nothing)
        if created.rank == 0:
            shutil.rmtree(partial)
            asked.out.with_suffix(".json").write_text(json.dumps(created.losses))
    dist.barrier()
    dist.destroy_process_group()
