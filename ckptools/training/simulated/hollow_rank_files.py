"""Hollow rank files of DTensors, in composer's layout.

torch itself saves the first two ranks of those whose shards have the same shapes; their pickles differ in the rank's
number alone, so the others' are made by putting theirs in its place. A file of 5,000 tensors takes 0.05 s instead of
0.5 s so. The bytes of shards are skipped, as `torch.serialization.skip_data` does: they are holes, and their records
state no checksum.

Only DTensors scale so: a ShardedTensor lists the shards of all ranks in every file.

The values of every tensor with dimensions are holes. What has none, the step counts, is true: nothing was trained, so
they are zero.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptools.model.regions import chunk
from ckptools.training.options import CreateOptions, run_name
from ckptools.training.simulated.world import fake_group

Shapes = dict[str, tuple[int, ...]]
"""Shapes of parameters by their names, in the order of the model."""

WIDTHS = (1, 2, 4)
"""Bytes of a number in a pickle. Source: pickle.py, `save_long`: BININT1, BININT2, BININT."""

WRITTEN_BY_TORCH = ("data.pkl", "version", ".data/serialization_id")
"""Records that are not copied: the pickle is each rank's own, and torch's writer adds the others."""


@dataclass(frozen=True)
class HollowRankFile:
    """The common content of the files of some ranks.

    Attributes:
        pickled: the pickle of one of them.
        places: where the rank's number is in it.
        width: bytes of that number.
        records: the other records in order: their content, or of holes how many bytes they have.
    """

    pickled: bytes
    places: tuple[int, ...]
    width: int
    records: tuple[tuple[str, bytes | int], ...]

    def write(self, path: Path, rank: int) -> None:
        """Write the file of one of the ranks."""
        pickled, number = bytearray(self.pickled), rank.to_bytes(self.width, "little")
        for place in self.places:
            pickled[place : place + self.width] = number
        with torch.serialization._open_zipfile_writer(str(path)) as writer:
            writer.write_record("data.pkl", bytes(pickled), len(pickled))
            for name, content in self.records:
                if isinstance(content, int):
                    writer.write_record_metadata(name, content)
                else:
                    writer.write_record(name, content, len(content))


def rank_files(run: HollowRun, ranks: Sequence[int]) -> Iterator[tuple[HollowRankFile, list[int]]]:
    """Group the ranks whose files have the same content but for the rank."""
    bounds = [0, *(1 << (8 * width) for width in WIDTHS)]
    for alike in run.ranks_alike():
        # The numbers of the ranks become longer at these bounds.
        for width, (low, high) in zip(WIDTHS, pairwise(bounds), strict=True):
            span = range(max(low, alike.start), min(high, alike.stop))
            if wanted := [rank for rank in ranks if rank in span]:
                yield _rank_file(run, span, width), wanted


def _rank_file(run: HollowRun, ranks: range, width: int) -> HollowRankFile:
    """Let torch save one or two ranks of a span, and see what differs."""
    pickled, records = _saved(run, ranks[0])
    places = _places(pickled, _saved(run, ranks[1])[0], ranks[0], width) if len(ranks) > 1 else ()
    return HollowRankFile(pickled, places, width, records)


def _places(first: bytes, second: bytes, rank: int, width: int) -> tuple[int, ...]:
    """Find the rank's number in a pickle: only there does the pickle of the next rank differ.

    Raises:
        RuntimeError: it differs in something else, as it might with another torch.
    """
    places: list[int] = []
    for at, (mine, other) in enumerate(zip(first, second, strict=True)):
        if mine == other or (places and at < places[-1] + width):
            continue
        found = [int.from_bytes(pickled[at : at + width], "little") for pickled in (first, second)]
        if found != [rank, rank + 1]:
            raise RuntimeError(f"pickles of rank {rank} and {rank + 1} differ in more than the rank, at byte {at}")
        places.append(at)
    return tuple(places)


def _saved(run: HollowRun, rank: int) -> tuple[bytes, tuple[tuple[str, bytes | int], ...]]:
    """The pickle that torch makes of a rank's content, and the other records."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(1) as own:
        # In a thread of its own: DTensor remembers its meshes per thread, and without regard to the rank.
        hollow, true = Path(folder) / "hollow.pt", Path(folder) / "true.pt"
        own.submit(_save, run, rank, hollow, true).result()
        with zipfile.ZipFile(hollow) as archive:
            sizes = {info.filename.removeprefix("hollow/"): info.file_size for info in archive.infolist()}
            pickled = archive.read("hollow/data.pkl")
        with zipfile.ZipFile(true) as archive:
            contents = {info.filename.removeprefix("true/"): archive.read(info) for info in archive.infolist()}
    names = [name for name in sizes if name not in WRITTEN_BY_TORCH]
    return pickled, tuple((name, contents[name] or sizes[name]) for name in names)


def _save(run: HollowRun, rank: int, hollow: Path, true: Path) -> None:
    """Save a rank's content with its shards as holes, and once more without: what is left there has true values."""
    with fake_group(rank, run.world_size):
        mesh = init_device_mesh("cpu", (run.world_size,))
        with torch.serialization.skip_data():
            torch.save(content(run, rank, mesh), hollow)
        torch.save(content(run, rank, mesh, shards=False), true)


def content(run: HollowRun, rank: int, mesh: DeviceMesh, shards: bool = True) -> dict[str, Any]:
    """The content of a rank's file, as Composer has it; without its shards these have no rows."""

    def cut(shape: tuple[int, ...]) -> DTensor:
        local = empty((chunk(shape[0], run.world_size, rank)[1] if shards else 0, *shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    state = {
        "model": {name: cut(shape) for name, shape in run.shapes.items()},
        "optimizers": {"AdamW": {"state": run.moments(cut), "param_groups": run.param_groups()}},
        "timestamp": {"Timestamp": {"epoch": 0, "batch": 0}},
        "metadata": run.facts(),
    }
    return {"state": state}


DTYPE = torch.bfloat16
"""The dtype of parameters and moments: AdamW gives moments the dtype of their parameter."""

NOTE = "holes: written by ckptools create --hollow, no values"
"""The note that a hollow checkpoint has in it."""


@dataclass(frozen=True)
class HollowRun:
    """A checkpoint in the making."""

    options: CreateOptions
    shapes: Shapes
    world_size: int

    def ranks_alike(self) -> list[range]:
        """Spans of ranks whose shards have the same shapes."""
        heights = {shape[0] for shape in self.shapes.values()}
        alike = groupby(range(self.world_size), lambda rank: [chunk(n, self.world_size, rank)[1] for n in heights])
        spans = [list(ranks) for _, ranks in alike]
        return [range(ranks[0], ranks[-1] + 1) for ranks in spans]

    def moments(self, make: Callable[[tuple[int, ...]], Tensor]) -> dict[str, dict[str, Tensor]]:
        """The state of AdamW before its first step, with moments made of their shapes."""
        names = ("exp_avg", "exp_avg_sq")
        known = self.shapes.items()
        return {fqn: {"step": torch.tensor(0.0)} | {name: make(shape) for name in names} for fqn, shape in known}

    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of AdamW with torch's own defaults, the parameters by name."""
        optimizer = torch.optim.AdamW([torch.empty(1, device="meta")])
        (group,) = optimizer.state_dict()["param_groups"]
        return [group | {"params": list(self.shapes)}]

    def facts(self) -> dict[str, Any]:
        """The facts of the run that the files state."""
        known = {"torch_version": str(torch.__version__), "world_size": self.world_size, "values": NOTE}
        return known | {"run_name": run_name(self.options, self.world_size)}


def empty(shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    """A tensor that nothing is written into, so that it takes no memory however large."""
    return torch.empty(shape, dtype=DTYPE, device=device)
