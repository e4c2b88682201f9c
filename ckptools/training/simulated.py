"""Checkpoints that no run has made: ranks of a simulated world, and hollow files of a large model (`--hollow FROM`)."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import multiprocessing
import os
import pickle
import signal
import struct
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import groupby, islice, pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
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
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptools.cluster.environment import calm_torch
from ckptools.cluster.waiting import Say, say_nothing
from ckptools.dtypes import ITEMSIZE, SAFETENSORS
from ckptools.errors import UsageError, WriteError
from ckptools.formats.shared.given_names_and_shapes import shapes_from_json
from ckptools.model.regions import chunk
from ckptools.text import first_line, plural
from ckptools.training import layouts, option_checks, output, strategies, worker
from ckptools.training.layouts import composer_state, whole_files
from ckptools.training.model import (
    RandomState,
    capture_random_states,
    decayed_names,
    make_optimizer,
    restore_random_states,
    seed_all,
)
from ckptools.training.option_checks import Chosen, check_world_size
from ckptools.training.options import (
    CreateOptions,
    FileOptions,
    LaunchOptions,
    ModelSize,
    ParallelOptions,
    ResumeOptions,
    from_json,
    run_name,
    to_json,
)
from ckptools.training.output import FULL_STATE, Created
from ckptools.training.run import Run, full_state, place, prepare, quiet, train
from ckptools.training.strategies import FSDP1

# -- `--simulate-world 256 --ranks 0,137`: true rank files of a big world, written by one process ----------------------
# One process trains for real. Then torch's fake process group, which answers every collective at once, lets it be one
# rank after the other of a world that does not exist: the values are those of one process, the layout is the world's.


T = TypeVar("T")
R = TypeVar("R")

FAKE = Chosen("fake", "cpu")


@dataclass(frozen=True)
class Trained:
    """The result of the training that one process did.

    Attributes:
        options: of the simulated world; those of `run` are of the one process.
        rng: states for all ranks: freshly seeded for each; with `--tiny` one object for all.
    """

    options: CreateOptions
    run: Run
    state: dict[str, Any]
    rng: list[RandomState]

    @cached_property
    def model(self) -> nn.Module:
        """The model without its wrapper."""
        module: nn.Module = self.run.model.module  # type: ignore[assignment]
        return module


def train_alone(options: CreateOptions, report: Say) -> Trained:
    """Train in this process alone, which is a world of one."""
    torch.set_num_threads(1)
    alone = dataclasses.replace(options, strategy="ddp", world_size=1, layout="composer")
    # A whole world, with real collectives and without a port.
    with quiet(), _group("gloo", HashStore(), 0, 1):
        run = prepare(alone, say_nothing)
        train(run, report, lambda run: None)
        state = copy.deepcopy(full_state(run))
        world_size = options.world_size or 1
        rng = []
        for rank in range(1 if options.simulation.tiny else world_size):
            seed_all(options.seed + rank)
            rng.append(capture_random_states(run.device))
        return Trained(options, run, state, rng * world_size if options.simulation.tiny else rng)


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world whose other ranks do not exist; there must be no process group yet."""
    with _group("fake", FakeStore(), rank, world_size):
        yield


@contextmanager
def _group(backend: str, store: HashStore | FakeStore, rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_rank(trained: Trained, folder: Path, rank: int) -> None:
    """Be one rank of the simulated world, and write its files into a folder.

    In a thread of its own: what DTensor remembers of its meshes it remembers per thread, and without regard to the
    rank, which no process of a real world changes.
    """
    with ThreadPoolExecutor(1) as own:
        own.submit(_write_rank, trained, rank, folder).result()


def _write_rank(trained: Trained, rank: int, folder: Path) -> None:
    options = trained.options
    with quiet(), fake_group(rank, options.world_size or 1):
        run = _fsdp1(trained) if options.strategy == "fsdp1" else _wrapped(trained)
        restore_random_states(trained.rng[rank], run.device)
        if options.layout == "composer":
            # The fake group gathers nothing, so the random states of all ranks come from here.
            torch.save({"state": composer_state(run), "rng": trained.rng}, place(run, folder))
        else:
            layouts.SAVE[options.layout](run, folder)


def _fsdp1(trained: Trained) -> Run:
    """Cut as FSDP1 does when it saves, without the gathering that it begins with."""
    names = {name for name, _ in trained.model.named_parameters(remove_duplicate=False)}
    model = {name: _sharded(t) if name in names else t for name, t in trained.state["model"].items()}
    moments = {
        fqn: {name: _sharded(value) if value.ndim else value for name, value in state.items()}
        for fqn, state in trained.state["optimizer"]["state"].items()
    }
    optimizer = trained.state["optimizer"] | {"state": moments}
    strategy = dataclasses.replace(FSDP1, model_state=lambda _: model, optimizer_state=lambda *_: optimizer)
    return dataclasses.replace(trained.run, options=trained.options, strategy=strategy, hardware=FAKE)


def _sharded(tensor: Tensor) -> Any:
    """Make this rank's ShardedTensor of a whole tensor, with the function by which FSDP1 does when it saves."""
    world_size = dist.get_world_size()
    return _create_chunk_sharded_tensor(tensor, dist.get_rank(), world_size, world_size, _get_default_group())


def _wrapped(trained: Trained) -> Run:
    """Wrap as a real rank does, which cuts the parameters that it finds, and cut the optimizer's state alike."""
    options, saved = trained.options, trained.state["optimizer"]
    strategy = strategies.BY_NAME[options.strategy]
    wrapped = strategy.wrap(copy.deepcopy(trained.model), options)
    decayed = decayed_names(trained.model)
    named = dict(strategies.plain_parameters(wrapped))
    optimizer = make_optimizer(options.optimizer, named.items(), decayed)
    for fqn, state in saved["state"].items():
        optimizer.state[named[fqn]] = {name: _like(named[fqn], value) for name, value in state.items()}
    for group, kept in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in kept.items() if key != "params"})
    run = dataclasses.replace(trained.run, options=options, strategy=strategy, hardware=FAKE)
    run.model, run.optimizer = wrapped, optimizer
    return run


def _like(param: nn.Parameter, value: Tensor) -> Tensor:
    """Cut a moment as its parameter is; a counter stays as it is. Without a source, no rank is asked for values."""
    if not isinstance(param, DTensor) or not value.ndim:
        return value.clone()
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def write_ranks(options: CreateOptions, folder: Path, report: Say) -> list[float]:
    """Write the files of the ranks that are asked for; returns the losses of the process that trained."""
    trained = train_alone(options, report)
    if options.full:
        torch.save(trained.state, folder / FULL_STATE)
    ranks, jobs = options.simulation.ranks_written, options.simulation.jobs
    every = max(1, -(-len(ranks) // 10))
    if jobs == 1:
        written: Iterator[None] = map(partial(write_rank, trained, folder), ranks)
    else:
        written = in_processes(jobs, _write_another, ranks, partial(_begin, to_json(options), folder))
    for done, _ in enumerate(written, 1):
        if len(ranks) > 10 and (done % every == 0 or done == len(ranks)):
            report(f"{done} of {len(ranks)} ranks written")
    return trained.run.losses


def in_processes(
    jobs: int, do: Callable[[T], R], things: Iterable[T], begin: Callable[[], None] | None = None
) -> Iterator[R]:
    """Do something for many things in other processes, each of which calls `begin` first; yields results in order."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_begin_process, initargs=(begin,)) as pool:
        try:
            yield from pool.map(do, things)
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_process(begin: Callable[[], None] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    if begin is not None:
        begin()


# What a process of the pool has trained, and the folder that it writes to.
_begun: list[tuple[Trained, Path]] = []


def _begin(text: str, folder: Path) -> None:
    """Prepare a process of the pool: it trains the same run for itself, to the bit."""
    _begun.append((train_alone(from_json(text), say_nothing), folder))


def _write_another(rank: int) -> None:
    write_rank(*_begun[0], rank)


# -- hollow rank files of DTensors, in composer's layout ---------------------------------------------------------------
# torch itself saves the first two ranks of those whose shards have the same shapes; their pickles differ in the rank's
# number alone, so the others' are made by putting theirs in its place, in a tenth of the time. The bytes of shards are
# skipped, as `torch.serialization.skip_data` does: they are holes, and their records state no checksum.
#
# Only DTensors scale so: a ShardedTensor lists the shards of all ranks in every file.
#
# The values of every tensor with dimensions are holes. What has none, the step counts, is true: nothing was trained, so
# they are zero.


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


def rank_files(run: HollowRun, ranks: Sequence[int]) -> Iterator[tuple[HollowRankFile, list[int]]]:
    """Group the ranks whose files have the same content but for the rank."""
    bounds = [0, *(1 << (8 * width) for width in WIDTHS)]
    for alike in run.ranks_alike():
        # The numbers of the ranks become longer at these bounds.
        for width, (low, high) in zip(WIDTHS, pairwise(bounds), strict=True):
            span = range(max(low, alike.start), min(high, alike.stop))
            if wanted := [rank for rank in ranks if rank in span]:
                pickled, records = _saved(run, span[0])
                places = _places(pickled, _saved(run, span[1])[0], span[0], width) if len(span) > 1 else ()
                yield HollowRankFile(pickled, places, width, records), wanted


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
"""Ranks that a process writes before it says so."""

Write = Callable[[list[int]], None]


def write_hollow_ranks(options: CreateOptions, shapes: Shapes, folder: Path, report: Say) -> None:
    """Write the files of the ranks that are asked for, or with huggingface those of the whole model."""
    run = HollowRun(options, shapes, options.world_size or 1)
    if options.layout == "huggingface":
        _write_safetensors(run, _made(_path(run, folder)))
        return
    ranks, jobs, done = options.simulation.ranks_written, options.simulation.jobs, 0
    tasks = _of_dcp(run, folder) if options.layout == "dcp" else _of_rank_files(run, folder)
    parts = ((write, alike[i : i + AT_ONCE]) for write, alike in tasks for i in range(0, len(alike), AT_ONCE))
    for written in map(_run, parts) if jobs == 1 else in_processes(jobs, _run, parts):
        done += written
        if len(ranks) > AT_ONCE:
            report(f"{done} of {len(ranks)} ranks written")


def _run(part: tuple[Write, list[int]]) -> int:
    write, ranks = part
    write(ranks)
    return len(ranks)


def _of_rank_files(run: HollowRun, folder: Path) -> Iterator[tuple[Write, list[int]]]:
    for alike, ranks in rank_files(run, run.options.simulation.ranks_written):
        yield partial(_write_rank_files, alike, run, folder), ranks


def _write_rank_files(alike: HollowRankFile, run: HollowRun, folder: Path, ranks: list[int]) -> None:
    for rank in ranks:
        path = _path(run, folder, rank)
        _made(path.parent)
        alike.write(path, rank)


def _of_dcp(run: HollowRun, folder: Path) -> Iterator[tuple[Write, list[int]]]:
    place = _made(_path(run, folder))
    HollowDcp(run).write_metadata(place)
    yield partial(_write_dcp, run, place), list(run.options.simulation.ranks_written)


def _write_dcp(run: HollowRun, folder: Path, ranks: list[int]) -> None:
    plan = HollowDcp(run)
    for rank in ranks:
        plan.write_rank(rank, folder)


def _path(run: HollowRun, folder: Path, rank: int = 0) -> Path:
    """The path of a rank's file, or of the folder of all ranks."""
    values: dict[str, int | str] = {"epoch": 0, "batch": 0, "rank": rank, "local_rank": rank, "node_rank": 0}
    values |= {"run_name": run_name(run.options, run.world_size), "world_size": run.world_size}
    return folder / run.options.template.format(**values)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_safetensors(run: HollowRun, folder: Path) -> None:
    """Write the files of the whole model, and their index where they are several."""
    dtype = str(DTYPE).removeprefix("torch.")
    sizes = {name: prod(shape) * ITEMSIZE[dtype] for name, shape in run.shapes.items()}
    for file, fqns in whole_files(sizes, folder, run.options.files).items():
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


# -- `--simulate-world` from the options to the files. Free of torch until it writes -----------------------------------


# What a world can be simulated with, and the layouts of which every rank writes files of its own.
SIMULATED: dict[str, tuple[str, ...]] = {
    "fsdp1": ("composer",),
    "fsdp2": ("composer", "verl"),
    "hsdp": ("composer", "verl"),
    **dict.fromkeys(("tp", "fsdp2-tp", "hsdp-tp"), ("composer",)),
}

# The same with --hollow.
HOLLOW: dict[str, tuple[str, ...]] = {"fsdp2": ("composer", "dcp", "huggingface")}


def create(options: CreateOptions, verbose: bool = False) -> Created:
    """Write the files of some ranks of a world that is not there; with `verbose`, lines about it to stdout.

    Raises:
        UsageError: the options do not fit together.
        OutputExistsError: the folder holds a checkpoint already, and `force` is off.
        WriteError: a file could not be written.
    """
    options = _sized(_check(options).completed())
    check_world_size(options, options.world_size or 1)
    hollow = options.simulation.hollow
    shapes = shapes_from(hollow) if hollow else {}
    calm_torch()
    option_checks.check_torch(options)
    report = worker.say if verbose else say_nothing
    for line in _explanation(options, shapes):
        report(line)
    with output.open_partial_folder(options.out, uuid.uuid4().hex) as partial:
        try:
            losses: list[float] = []
            if shapes:
                write_hollow_ranks(options, shapes, partial, report)
            else:
                losses = write_ranks(options, partial, report)
            files = output.finish(partial, options.out)
        except (OSError, RuntimeError, BrokenProcessPool) as error:
            # torch reports a full disk as a RuntimeError.
            raise WriteError(options.out, f"could not be written: {first_line(error)}") from error
        output.remove_older(options.out, files)
    nbytes = sum(path.stat().st_size for path in files)
    return Created(options.out, files, tuple(losses), options.world_size or 1, nbytes, rank=0)


def _explanation(options: CreateOptions, shapes: Shapes) -> list[str]:
    """Describe the files that will be written, and which of their content is true."""
    world_size, simulation = options.world_size or 1, options.simulation
    ranks = len(simulation.ranks_written)
    if shapes:
        count = sum(prod(shape) for shape in shapes.values())
        whose = "the whole model" if options.layout == "huggingface" else f"{ranks} of {world_size} ranks"
        return [
            f"{whose}, hollow: {plural(len(shapes), 'parameter')} of {count:,} elements, bfloat16; no training",
            "values: none, holes that read as zeros and take no space; names, shapes and layout are true",
        ]
    own = "one random state stands for those of all ranks" if simulation.tiny else "random states are freshly seeded"
    return [
        f"one process for {ranks} of {world_size} ranks, by torch's fake process group; {options.strategy}",
        f"values: true, those of a run of one process, cut as {world_size} ranks hold them; {own}",
    ]


def _check(options: CreateOptions) -> CreateOptions:
    """Return the options with the world size in its place."""
    simulation, world_size = options.simulation, options.simulation.simulate_world or 0
    option_checks.check_least("simulate-world", world_size)
    option_checks.check_least("jobs", simulation.jobs)
    option_checks.check_least("replicas", options.parallel.replicas)
    option_checks.check_least("tensor-parallel", options.parallel.tensor_parallel)
    if options.world_size not in (None, world_size):
        raise UsageError(None, f"--world-size is {options.world_size}, --simulate-world {world_size}; leave one out")
    _check_kind(options)
    if (options.damage, options.resuming, options.launch) != ("", ResumeOptions(), LaunchOptions()):
        raise UsageError(None, "--simulate-world starts no ranks, so options to launch, resume or break do not apply")
    mesh = ParallelOptions(tensor_parallel=options.parallel.tensor_parallel, replicas=options.parallel.replicas)
    if options.parallel != mesh:
        raise UsageError(None, "--simulate-world takes --replicas and --tensor-parallel; leave out how else it is cut")
    option_checks.check(options)
    simulation.ranks_written  # noqa: B018  # raises where there is no such rank
    output.refuse_existing(options.out, options.force)
    return dataclasses.replace(options, world_size=world_size)


def _check_kind(options: CreateOptions) -> None:
    """Refuse what cannot be simulated, and options that --hollow has no use for."""
    hollow = options.simulation.hollow is not None
    kinds, command = (HOLLOW, "--hollow") if hollow else (SIMULATED, "--simulate-world")
    if options.layout not in kinds.get(options.strategy, ()):
        known = f"--layout {' or '.join(own)}" if (own := kinds.get(options.strategy)) else f"with {', '.join(kinds)}"
        why = "" if hollow else " (a DCP is planned by all ranks, and a fake group has none; but see --hollow)"
        raise UsageError(None, f"{command} writes no {options.layout} with {options.strategy}, only {known}{why}")
    if hollow and (options.full or options.simulation.tiny or options.size != ModelSize()):
        raise UsageError(None, "--hollow trains no model; leave out --full, --tiny and the size of one")
    plain = FileOptions(options.files.name, options.files.run_name, max_shard_size=options.files.max_shard_size)
    if hollow and options.files != plain:
        raise UsageError(None, "--hollow writes one file per rank, or whole files; leave out how they are cut else")


def _sized(options: CreateOptions) -> CreateOptions:
    """Make the model small with `--tiny`: one block, and an embedding of which each rank has two rows, the last one.

    Of replicas each has all of them. What is cut twice is even: see `option_checks`.
    """
    if not options.simulation.tiny:
        return options
    parallel, twice = options.parallel, options.strategy in ("fsdp2-tp", "hsdp-tp")
    shards = (options.world_size or 1) // (parallel.replicas if options.strategy in ("hsdp", "hsdp-tp") else 1)
    cuts = parallel.tensor_parallel_size if twice else shards if options.strategy == "tp" else 1
    size = ModelSize(
        vocab=max(2 * shards - (not twice), 1), width=max(16, cuts + cuts % 2), layers=1, heads=2, context=15
    )
    return dataclasses.replace(options, size=size)


VOCABULARY = 128_256
"""Tokens that Llama 3 knows."""

# Of the `config.json` of Meta-Llama-3-8B and Meta-Llama-3-70B: 8 key and value heads of 128 features each.
KNOWN = {
    "llama3-8b": (32, 4096, 14336, 1024),
    "llama3-70b": (80, 8192, 28672, 1024),
}


def shapes_from(source: str) -> Shapes:
    """The shapes of a model that is known by its name, or those in a JSON of name to shape.

    Raises:
        UsageError: it is neither, or has nothing that could be cut.
        ReadError: the file is no JSON of name to shape.
    """
    if source in KNOWN:
        return llama3(*KNOWN[source])
    path = Path(source)
    if not path.is_file():
        raise UsageError(None, f"--hollow {source}: expected {', '.join(KNOWN)}, or a JSON file of name to shape")
    stated = shapes_from_json(path)
    found = {name: tuple(shape) for name, shape in stated.shapes.items() if name not in stated.tied}
    for name, shape in found.items():
        if not shape or 0 in shape:
            raise UsageError(path, f"{name}: {list(shape)} cannot be cut over ranks; expected sizes of at least 1")
    return found


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
