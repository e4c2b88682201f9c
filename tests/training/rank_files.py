"""Read rank files with torch alone, and join them by hand."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor


def ckptools(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "ckptools", *map(str, arguments)]
    # On a machine that has much else to do, starting three ranks takes minutes.
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **more)


@contextmanager
def lone_group() -> Iterator[None]:
    """A process group of one, and a ShardedTensor that does not mind that its world was larger."""

    def keep_parts(self: ShardedTensor, state: tuple[Any, ...]) -> None:
        self._sharded_tensor_id = None
        self._local_shards, self._metadata, _, self._sharding_spec, self._init_rrefs = state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings(), mock.patch.object(ShardedTensor, "__setstate__", keep_parts):
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def load(path: Path) -> Any:
    """Load one rank's file as real torch objects."""
    with lone_group():
        return torch.load(path, weights_only=False)


def load_all(folder: Path, pattern: str) -> list[Any]:
    """Load the files of all ranks, in the order of the ranks."""
    return [load(path) for path in sorted(folder.glob(pattern))]


def join(values: list[Any]) -> Any:
    """Make one tree with full tensors out of one tree per rank; what is not sharded is taken from rank 0."""
    first = values[0]
    if isinstance(first, dict):
        return {key: join([value[key] for value in values]) for key in first}
    if isinstance(first, ShardedTensor):
        return _place([shard for value in values for shard in value._local_shards], first._metadata.size)
    if isinstance(first, DTensor):
        return torch.cat([value._local_tensor for value in values])
    return first


def _place(shards: list[Any], size: torch.Size) -> torch.Tensor:
    full = torch.full(size, torch.nan)
    for shard in shards:
        box = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        full[tuple(slice(offset, offset + length) for offset, length in box)] = shard.tensor
    return full


def local_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what lies in this rank's file: every plain tensor and every local piece."""
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from local_tensors(value, f"{name}/{key}")
    elif isinstance(tree, ShardedTensor):
        yield from ((f"{name}/{shard.metadata.shard_offsets}", shard.tensor) for shard in tree._local_shards)
    elif isinstance(tree, torch.Tensor):
        yield name, tree._local_tensor if isinstance(tree, DTensor) else tree


def assert_same_moments(one: Path, other: Path) -> None:
    """Compare Adam's moments in two `full.pt`: losses say nothing of a gradient's scale, which Adam undoes."""
    states = [torch.load(path / "full.pt")["optimizer"]["state"] for path in (one, other)]
    assert states[0].keys() == states[1].keys()
    for name, state in states[0].items():
        for slot in ("exp_avg", "exp_avg_sq"):
            expected = states[1][name][slot]
            torch.testing.assert_close(state[slot], expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
