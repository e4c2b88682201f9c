"""`torchrun -m tests.training.choices OPTIONS ...`: several runs, one after the other, by the same ranks.

OPTIONS is what `options.to_json` writes. Losses go into `OUT.json`, beside the folder. Starting a rank takes
seconds, and a run of two steps less than one.
"""

from __future__ import annotations

import json
import shutil
import sys

import torch.distributed as dist

from ckptools.training import options, output, worker
from ckptools.training.rank import say_nothing, train_and_save


def main(texts: list[str]) -> None:
    """Be one rank; every rank of the runs is called alike."""
    worker.prepare_process()
    dist.init_process_group("gloo")
    for asked in map(options.from_json, texts):
        partial = output.partial_folder(asked.out, "run")
        partial.mkdir(parents=True, exist_ok=True)
        created = train_and_save(asked, partial, say_nothing)
        if created.rank == 0:
            shutil.rmtree(partial)
            asked.out.with_suffix(".json").write_text(json.dumps(created.losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
