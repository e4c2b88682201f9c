"""What people do today: the throw-away scripts and torch's own converter. Run as `python -m … NAME ARGUMENTS`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def _gloo() -> None:
    """The one-process group and the patch that such scripts begin with."""
    import torch.distributed as dist
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def set_state(self: Any, state: Any) -> None:
        self._local_shards, self._metadata, _, self._sharding_spec, self._init_rrefs = state
        self._process_group = dist.group.WORLD

    ShardedTensor.__setstate__ = set_state


def _load(path: str) -> Any:
    import torch

    # As the scripts do: everything that the pickle names is run.
    return torch.load(path, map_location="cpu", weights_only=False)


def look(path: str) -> None:
    """The throw-away script: load one rank's file, print what is in it."""
    _gloo()
    state = _load(path)["state"]
    print(state.get("schedulers"))
    for name, optimizer in state["optimizers"].items():
        print(name, [{k: v for k, v in g.items() if k != "params"} for g in optimizer["param_groups"]])
    for fqn, tensor in state["model"].items():
        print(fqn, tuple(tensor.shape), tensor.dtype)


def load(path: str) -> None:
    """Load a file, or those of a folder one after the other, and keep none."""
    _gloo()
    for file in sorted(Path(path).iterdir()) if Path(path).is_dir() else [path]:
        _load(str(file))


def load_mapped(folder: str, count: str) -> None:
    """Load the first files of a folder one after the other, their values mapped, and keep none."""
    import torch
    import torch.distributed.tensor

    _gloo()
    for file in sorted(Path(folder).iterdir())[: int(count)]:
        torch.load(file, map_location="cpu", weights_only=False, mmap=True)


def merge(folder: str, out: str) -> None:
    """The script that loads all ranks and joins their shards."""
    import torch

    _gloo()
    ranks = [_load(str(p)) for p in sorted(Path(folder).glob("*-rank*.pt"))]
    torch.save(_joined([r["state"] for r in ranks]), out)


def _joined(nodes: list[Any]) -> Any:
    import torch

    first = nodes[0]
    if hasattr(first, "local_shards"):
        full = torch.empty(first.size(), dtype=first.dtype)
        for tensor in nodes:
            for shard in tensor.local_shards():
                at = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
                full[tuple(slice(o, o + n) for o, n in at)] = shard.tensor
        return full
    if isinstance(first, dict):
        return {k: _joined([n[k] for n in nodes if k in n]) for k in first}
    return first


def dcp(folder: str, out: str) -> None:
    """torch's own converter, on a DCP folder of the same state."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, out)


def metadata(folder: str) -> None:
    """torch's own reader of what a DCP folder lists."""
    from torch.distributed.checkpoint import FileSystemReader

    FileSystemReader(folder).read_metadata()


def crc(folder: str, threads: str = "") -> None:
    """Read every byte of a folder and take its CRC-32 with `zlib`, a file per thread."""
    import zlib
    from concurrent.futures import ThreadPoolExecutor

    def one(path: Path) -> int:
        total = 0
        with path.open("rb", buffering=0) as file:
            while piece := file.read(4 << 20):
                total = zlib.crc32(piece, total)
        return total

    with ThreadPoolExecutor(int(threads) if threads else None) as pool:
        print(list(pool.map(one, sorted(Path(folder).iterdir()))))


if __name__ == "__main__":
    peers = {
        "look": look,
        "load": load,
        "load_mapped": load_mapped,
        "merge": merge,
        "dcp": dcp,
        "metadata": metadata,
        "crc": crc,
    }
    peers[sys.argv[1]](*sys.argv[2:])
