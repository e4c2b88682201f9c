"""One rank of a run."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckptools.training.options import CreateOptions
from ckptools.training.rank import in_group, train_and_save
from tests.training.forked import run_ranks


def watch_the_model(out: Path) -> None:
    """Train as a rank, and see whether the process group is there when DDP's model goes."""
    seen: dict[int, weakref.finalize] = {}
    at_the_end: list[bool] = []

    def report(_: str) -> None:
        for model in (o for o in gc.get_objects() if isinstance(o, DistributedDataParallel) and id(o) not in seen):
            seen[id(model)] = weakref.finalize(model, lambda: at_the_end.append(dist.is_initialized()))

    options = CreateOptions(out, "ddp", world_size=1, steps=1)
    with in_group(options):
        train_and_save(options, None, report)
    assert at_the_end == [True]


def test_the_model_of_a_rank_is_gone_before_its_process_group(tmp_path: Path) -> None:
    run_ranks(1, watch_the_model, tmp_path / "run")
