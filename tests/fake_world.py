"""`python -m tests.fake_world OUT --world-size 256 --rank 0`: one rank's file of a big world.

Real FSDP1 in one process: torch's fake process group answers every collective at once, so the layout of all
ranks is as in a world of that size and only the values mean nothing. Every ShardedTensor in the file lists
the shards of all ranks: 50 parameters with two moments each make 150 × 256 = 38,400 shard records.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptools.training import output, strategies

PARAMETERS = 50
WIDTH = 3


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world whose other ranks do not exist; there must be no process group yet."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Columns(nn.Module):
    """A sum of independent matrices, each (rows, WIDTH) and each a unit of FSDP.

    In one common unit a rank would hold a piece of one matrix only, and would need the others' optimizer state.
    """

    def __init__(self, rows: int, count: int) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Linear(WIDTH, rows, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, WIDTH) to (batch, rows)."""
        return torch.stack([column(x) for column in self.columns]).sum(0)


def create_rank(out: Path, world_size: int = 256, rank: int = 0, parameters: int = PARAMETERS) -> Path:
    """Train one step in a fake world and write this rank's file in composer's layout.

    Args:
        out: folder, made if it is not there.
        world_size: ranks in the layout.
        rank: the one whose file it is.
        parameters: sharded parameters; AdamW adds two moments to each.

    Returns:
        The file, `ep0-ba1-rank{rank}.pt`.
    """
    torch.manual_seed(0)
    with (
        warnings.catch_warnings(),
        fake_group(rank, world_size),
        output.partial_folder(out, f"rank{rank}") as partial,
    ):
        warnings.simplefilter("ignore")
        partial.mkdir(parents=True)
        torch.save(_content(world_size, parameters), partial / f"ep0-ba1-rank{rank}.pt")
        return output.finish(partial, out)[0]


def _content(world_size: int, parameters: int) -> dict[str, Any]:
    # Rows that do not divide evenly, and still leave no rank without any: ranks own two rows, the last one.
    model = strategies.wrap_units(Columns(2 * world_size - 1, parameters), nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    fsdp1 = strategies.BY_NAME["fsdp1"]
    state = {
        "model": fsdp1.model_state(model),
        "optimizers": {"AdamW": fsdp1.optimizer_state(model, optimizer)},
        "timestamp": {"Timestamp": {"epoch": 0, "batch": 1, "sample": world_size, "total_wct": timedelta(0)}},
        "metadata": {"torch_version": str(torch.__version__), "world_size": world_size},
    }
    return {"state": state, "rng": [{"torch": torch.get_rng_state()}] * world_size}


def write_sharded(out: Path, world_size: int, ranks: Iterable[int], parameters: int) -> None:
    """Write files of ShardedTensors of ones as FSDP1's are, without training: in a hundredth of the time."""
    pieces = [ShardMetadata([2 * rank, 0], [2, WIDTH], f"rank:{rank}/cpu") for rank in range(world_size)]
    whole = ShardedTensorMetadata(pieces, torch.Size([2 * world_size, WIDTH]), TensorProperties(torch.float32))
    names = [f"layer{number}.weight" for number in range(parameters)]
    out.mkdir()
    for rank in ranks:

        def sharded(rank: int = rank) -> ShardedTensor:
            mine = [Shard(torch.ones(2, WIDTH), pieces[rank])]
            return ShardedTensor._init_from_local_shards_and_global_metadata(mine, whole)

        with warnings.catch_warnings(), fake_group(rank, world_size):
            warnings.simplefilter("ignore")
            state = {name: {"exp_avg": sharded(), "exp_avg_sq": sharded()} for name in names}
            optimizer = {"state": state, "param_groups": [{"params": names, "lr": 0.1}]}
            tree = {"model": {name: sharded() for name in names}, "optimizers": {"AdamW": optimizer}}
            torch.save({"state": tree}, out / f"ep0-ba1-rank{rank}.pt")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_world", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--world-size", type=int, default=256)
    parser.add_argument("--rank", type=int, default=0)
    arguments = parser.parse_args()
    create_rank(arguments.out, arguments.world_size, arguments.rank)


if __name__ == "__main__":
    main()
