"""`python -m tools.simulated OUT --world-size 256`: a hollow checkpoint of a large model and a world that is not there.

Nothing is trained. Names, shapes, layout and metadata are those that FSDP2 would write before its first step; where the
values would be the files have holes, which read as zeros and take no space. So a large model fits on a laptop.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import groupby, islice, pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptools.dtypes import ITEMSIZE, SAFETENSORS
from ckptools.formats.shared.given_names_and_shapes import shapes_from_json
from ckptools.model.regions import chunk
from ckptools.training.layouts import whole_files
from ckptools.training.options import FileOptions
from tests.fake_world import fake_group

# -- hollow rank files of DTensors, in composer's layout ---------------------------------------------------------------
# torch itself saves the first two ranks of those whose shards have the same shapes; their pickles differ in the rank's
# number alone, so the others' are made by putting theirs in its place, in a tenth of the time. The bytes of shards are
# skipped, as `torch.serialization.skip_data` does: they are holes, and their records state no checksum.
#
# Only DTensors scale so: a ShardedTensor lists the shards of all ranks in every file.
#
# The values of every tensor with dimensions are holes. Step counts, which have none, are true: they are zero.


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
        for at in self.places:
            pickled[at : at + self.width] = number
        with torch.serialization._open_zipfile_writer(str(path)) as writer:
            writer.write_record("data.pkl", bytes(pickled), len(pickled))
            for name, content in self.records:
                if isinstance(content, int):
                    writer.write_record_metadata(name, content)
                else:
                    writer.write_record(name, content, len(content))


def rank_files(run: HollowRun) -> Iterator[tuple[HollowRankFile, range]]:
    """Group the ranks whose files have the same content but for the rank."""
    bounds = [0, *(1 << (8 * width) for width in WIDTHS)]
    for alike in run.ranks_alike():
        # The numbers of the ranks become longer at these bounds.
        for width, (low, high) in zip(WIDTHS, pairwise(bounds), strict=True):
            span = range(max(low, alike.start), min(high, alike.stop))
            if span:
                pickled, records = _saved(run, span[0])
                places = _places(pickled, _saved(run, span[1])[0], span[0], width) if len(span) > 1 else ()
                yield HollowRankFile(pickled, places, width, records), span


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

NOTE = "holes: written by tools.simulated, no values"
"""The note that a hollow checkpoint has in it."""


@dataclass(frozen=True)
class HollowRun:
    """A checkpoint in the making."""

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
        return known | {"run_name": f"fsdp2-{self.world_size}-ranks"}


def empty(shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    """A tensor that nothing is written into, so that it takes no memory however large."""
    return torch.empty(shape, dtype=DTYPE, device=device)


# -- A hollow DCP folder: the `.metadata` that torch would write, and files whose items are archives around holes ------
# A plan of all ranks is needed for it, which a fake process group cannot make; here it is made in one go, of torch's
# own records. A tensor that all ranks hold, such as a step count, is written by one of them, in turn.
# Source: torch/distributed/checkpoint/planner_helpers.py and filesystem.py, and what real ranks wrote.


LOCAL_HEADER, NAME_LENGTH_AT = 30, 26
"""Bytes of a zip entry before its name, and where it says how long name and extra field are. Source: APPNOTE, 4.3.7."""

BLOCK = 4096
"""Bytes; a hole that is smaller is written, as file systems have none of that size."""

Box = tuple[torch.Size, torch.Size]
"""Offsets and sizes of a shard in its tensor."""


@dataclass(frozen=True)
class HollowItem:
    """An item as it lies in a file: what is before its values, or all of it, how many bytes they have, and the rest."""

    head: bytes
    hole: int = 0
    tail: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return len(self.head) + self.hole + len(self.tail)


class HollowDcp:
    """The plan of all ranks."""

    def __init__(self, run: HollowRun) -> None:
        self._run = run
        moments = run.moments(lambda shape: empty(shape, "meta"))
        model = {name: empty(shape, "meta") for name, shape in run.shapes.items()}
        optim = {"state": moments, "param_groups": run.param_groups()}
        self._flat, self._paths = flatten_state_dict({"model": model, "optim": optim, "step": 0, "run": run.facts()})

    @cached_property
    def _alone(self) -> dict[str, HollowItem]:
        """The items that one rank writes alone, by key: objects, and tensors without dimensions."""
        alone = {key: v for key, v in self._flat.items() if not isinstance(v, Tensor) or not v.ndim}
        return {key: HollowItem(_archive(value)) for key, value in alone.items()}

    def _written(self, rank: int) -> Iterator[tuple[str, Box | None, HollowItem]]:
        """The items that a rank writes, in the order of its file, with their keys as `.metadata` has them."""
        for key, item in islice(self._alone.items(), rank, None, self._run.world_size):
            yield key, (torch.Size(), torch.Size()) if isinstance(self._flat[key], Tensor) else None, item
        for key, value in self._flat.items():
            if key not in self._alone:
                first, rows = chunk(value.shape[0], self._run.world_size, rank)
                offsets, sizes = (first, *[0] * (value.ndim - 1)), (rows, *value.shape[1:])
                yield key, (torch.Size(offsets), torch.Size(sizes)), _hollow_item(sizes)

    def metadata(self) -> Metadata:
        """The content of `.metadata` for all ranks."""
        known: dict[str, Any] = {
            key: TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [])
            if isinstance(value, Tensor)
            else BytesStorageMetadata()
            for key, value in self._flat.items()
        }
        stored: dict[MetadataIndex, _StorageInfo] = {}
        for rank in range(self._run.world_size):
            offset, file = 0, _file_name(rank)
            for key, box, item in self._written(rank):
                name = "".join([*key])  # each rank sends the names as texts of its own, its file's as one
                index = MetadataIndex(name)
                if box is not None:
                    chunks = known[key].chunks
                    index = MetadataIndex(name, box[0], len(chunks))
                    chunks.append(ChunkStorageMetadata(*box))
                stored[index] = _StorageInfo(file, offset, item.nbytes)
                offset += item.nbytes
        metadata = Metadata(known, self._paths, stored, StorageMeta())
        if (version := getattr(filesystem, "CURRENT_DCP_VERSION", None)) is not None:
            metadata.version = version
        return metadata

    def write_metadata(self, folder: Path) -> None:
        """Write `.metadata`."""
        (folder / ".metadata").write_bytes(pickle.dumps(self.metadata()))

    def write_rank(self, rank: int, folder: Path) -> None:
        """Write the file of a rank."""
        with (folder / _file_name(rank)).open("wb") as file:
            for _, _, item in self._written(rank):
                file.write(item.head)
                if item.hole:
                    file.seek(item.hole, os.SEEK_CUR)
                    file.write(item.tail)


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


@cache
def _hollow_item(shape: tuple[int, ...]) -> HollowItem:
    """An item as torch saves a tensor of a shape, around a hole where its values would be."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "archive.pt"  # as torch calls what it saves into an open file
        with torch.serialization.skip_data():
            torch.save(empty(shape), path)
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            (values,) = (info for info in archive.infolist() if info.filename == "archive/data/0")
            file.seek(values.header_offset + NAME_LENGTH_AT)
            name, extra = struct.unpack("<HH", file.read(4))
            file.seek(0)
            head = file.read(values.header_offset + LOCAL_HEADER + name + extra)
            file.seek(values.file_size, os.SEEK_CUR)
            tail = file.read()
    if values.file_size < BLOCK:
        return HollowItem(head + bytes(values.file_size) + tail)
    return HollowItem(head, values.file_size, tail)


def _archive(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


# -- the files of a hollow checkpoint, written by one process or by several --------------------------------------------


AT_ONCE = 32
"""Ranks that a process writes one after the other."""

Write = Callable[[list[int]], None]


def create(
    out: Path,
    shapes: Shapes,
    world_size: int,
    layout: str = "composer",
    jobs: int = 1,
    max_shard_size: str | None = None,
) -> list[Path]:
    """Write a hollow checkpoint into a folder that is not there yet; returns its files, sorted.

    Layouts are `composer`, a file for each rank; `dcp`; and `huggingface`, the whole model in files of at most
    `max_shard_size`, such as 5GB.
    """
    run, new = HollowRun(shapes, world_size), out.with_name(f"{out.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    if layout == "huggingface":
        _write_safetensors(run, new, max_shard_size)
    else:
        tasks = _of_dcp(run, new) if layout == "dcp" else _of_rank_files(run, new)
        parts = [(write, alike[i : i + AT_ONCE]) for write, alike in tasks for i in range(0, len(alike), AT_ONCE)]
        if jobs == 1:
            list(map(_run, parts))
        else:
            with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
                list(pool.map(_run, parts))
    new.rename(out)
    return sorted(out.iterdir())


def _run(part: tuple[Write, list[int]]) -> None:
    write, ranks = part
    write(ranks)


def _of_rank_files(run: HollowRun, folder: Path) -> Iterator[tuple[Write, list[int]]]:
    for alike, ranks in rank_files(run):
        yield partial(_write_rank_files, alike, folder), list(ranks)


def _write_rank_files(alike: HollowRankFile, folder: Path, ranks: list[int]) -> None:
    for rank in ranks:
        alike.write(folder / f"ep0-ba0-rank{rank}.pt", rank)


def _of_dcp(run: HollowRun, folder: Path) -> Iterator[tuple[Write, list[int]]]:
    (folder / ".metadata").write_bytes(pickle.dumps(HollowDcp(run).metadata()))
    yield partial(_write_dcp, run, folder), list(range(run.world_size))


def _write_dcp(run: HollowRun, folder: Path, ranks: list[int]) -> None:
    plan = HollowDcp(run)
    for rank in ranks:
        plan.write_rank(rank, folder)


def _write_safetensors(run: HollowRun, folder: Path, max_shard_size: str | None) -> None:
    """Write the files of the whole model, and their index where they are several."""
    dtype = str(DTYPE).removeprefix("torch.")
    sizes = {name: prod(shape) * ITEMSIZE[dtype] for name, shape in run.shapes.items()}
    for file, fqns in whole_files(sizes, folder, FileOptions(max_shard_size=max_shard_size)).items():
        entries, end = {}, 0
        for fqn in fqns:
            spans = [end, end + sizes[fqn]]
            entries[fqn] = {"dtype": SAFETENSORS[dtype], "shape": run.shapes[fqn], "data_offsets": spans}
            end += sizes[fqn]
        text = json.dumps({"__metadata__": {"format": "pt", "values": NOTE}} | entries)
        header = text.encode().ljust(-(-len(text) // 8) * 8)
        with (folder / file).open("wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            out.truncate(out.tell() + end)


# -- shapes of a large model -------------------------------------------------------------------------------------------


VOCABULARY = 128_256
"""Tokens that Llama 3 knows."""

LLAMA3_70B = (80, 8192, 28672, 1024)
"""Of the `config.json` of Meta-Llama-3-70B; it has 8 key and value heads of 128 features each."""


def shapes_from(source: str) -> Shapes:
    """The shapes of llama3-70b, or those in a JSON of name to shape."""
    if source == "llama3-70b":
        return llama3(*LLAMA3_70B)
    stated = shapes_from_json(Path(source))
    return {name: tuple(shape) for name, shape in stated.shapes.items() if name not in stated.tied}


def llama3(layers: int, hidden: int, intermediate: int, key_rows: int) -> Shapes:
    """Parameters of a Llama 3 model, by the names and in the order of `transformers.LlamaForCausalLM`.

    `key_rows` are those of `k_proj` and `v_proj`: `num_key_value_heads` times the size of a head.
    """
    block = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_rows, hidden),
        "self_attn.v_proj": (key_rows, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    blocks = {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in block.items()}
    ends = {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}
    return {"model.embed_tokens.weight": (VOCABULARY, hidden)} | blocks | ends


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulated", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--shapes", default="llama3-70b", help="llama3-70b, or a JSON of name to shape")
    parser.add_argument("--layout", choices=("composer", "dcp", "huggingface"), default="composer")
    parser.add_argument("--jobs", type=int, default=1, help="processes that write")
    parser.add_argument("--max-shard-size", help="huggingface: bytes of tensors per file, such as 5GB")
    asked = parser.parse_args()
    create(asked.out, shapes_from(asked.shapes), asked.world_size, asked.layout, asked.jobs, asked.max_shard_size)


if __name__ == "__main__":
    main()
