"""A torch.distributed.checkpoint (DCP) folder, which `torch.distributed.checkpoint.load` reads at any world size.

`.distcp` files are items back to back. An item is a torch.save archive of one value; a tensor's item has only that
tensor, in a storage of its own. A loading rank reads each item with a needed row whole into memory, so large tensors
are cut into items of several rows. A tied weight is written under each of its names, as torch does: items that two
names share would load, but would look like a `.metadata` that points to the wrong bytes.
Source: torch/distributed/checkpoint/{filesystem,planner_helpers}.py of torch 2.13; class paths as of 2.6.

`.metadata` is a pickle of the dataclasses of torch/distributed/checkpoint/{metadata,filesystem}.py, with their
attributes as of torch 2.4, under the names of every version since; an older reader ignores unknown ones
(`storage_meta`, `version`), and `_StorageInfo.transform_descriptors` of newer versions keeps its default None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from ckptools.consolidate.provenance import record_of
from ckptools.consolidate.writers.dcp_tree import Leaf, arrange
from ckptools.consolidate.writers.layout import (
    Framing,
    Job,
    OutputContents,
    OutputLayout,
    ReadBack,
    ReadTensor,
    WriteOptions,
    files_of,
    output_dtype,
    quoted,
)
from ckptools.consolidate.writers.pickle_emitter import Call, Emitter, Instance
from ckptools.consolidate.writers.pt import Packed, pack
from ckptools.dtypes import ITEMSIZE
from ckptools.model.provenance import FILE_NAME as RECORD
from ckptools.model.regions import Box
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import fqn_of
from ckptools.model.values import Global, Size, TorchName

ITEM_BYTES = 8 << 20
"""Larger tensors are cut into items of about this size. Measured with 0.9 GB on 2 cores: 8 ranks that load
their rows took 9.0 s without cutting, 4.0 s with items of 64 MiB, 1.0 s with 16, 0.6 s with 4; writing is equally fast
down to 8, and slower below.
"""

MAX_KEYS = 6
"""Keys of the state dict that the loading line names."""

FILE_NAME = ".metadata"
VERSION = "1.0.0"
"""torch/distributed/checkpoint/filesystem.py, `CURRENT_DCP_VERSION`."""

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def lay_out(selection: OutputContents, out: Path, options: WriteOptions) -> OutputLayout:
    """Plan a DCP folder."""
    arranged = arrange(selection, out)
    items = [item for leaf in arranged.leaves for item in _items(leaf, selection, options)]
    groups = files_of([item.packed.archive.nbytes for item in items], options.max_shard_size)
    jobs, sizes = _place(items, groups)
    record = record_of(selection, name_of=arranged.name)
    # The metadata comes last: once it has its name, the folder can be loaded.
    others = [(RECORD, record.to_json().encode("ascii"))] if record else []
    others.append((FILE_NAME, _metadata(items)))

    def framing(file: int) -> Iterator[Framing]:
        if file >= len(groups):
            yield Framing(0, lambda _: others[file - len(groups)][1])
            return
        for number in groups[file]:
            item = items[number]
            yield from item.packed.archive.framing(item.at, item.first_job)

    return OutputLayout(
        files=(
            *((out / _file_name(i), size) for i, size in enumerate(sizes)),
            *((out / name, len(data)) for name, data in others),
        ),
        jobs=tuple(jobs),
        framing=framing,
        read_back=partial(_read_back, items),
        checksums=True,
        folder=out,
        notes=tuple(arranged.notes),
        tensors=sum(isinstance(leaf.value, Tensor) for leaf in arranged.leaves),
        name_of=arranged.name,
        load=_load(out, arranged.leaves),
    )


@contextmanager
def _read_back(items: Sequence[_Item], paths: Sequence[Path]) -> Iterator[ReadBack]:
    """Let torch's reader read the `.metadata`, then each item."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(paths[-1].parent)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    tensors = [
        ReadTensor(item.fqn, item.value, item.dtype, partial(_read_item, reader, metadata, item, item.box))
        for item in items
        if item.box is not None
    ]
    yield ReadBack(f"torch.distributed.checkpoint {torch.__version__}", tensors)


def _read_item(reader: Any, metadata: Any, item: _Item, box: Box) -> Any:
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    target = torch.empty(box.sizes, dtype=getattr(torch, item.dtype))
    planner = DefaultLoadPlanner()
    planner.set_up_planner({item.fqn: target}, metadata, is_coordinator=True)
    index = MetadataIndex(item.fqn, torch.Size(box.offsets), item.number)
    begin, sizes = torch.Size([0] * len(box.sizes)), torch.Size(box.sizes)
    read = ReadItem(LoadItemType.TENSOR, MetadataIndex(item.fqn), begin, index, begin, sizes)
    reader.read_data(LoadPlan([read]), planner).wait()
    return target


def _load(out: Path, leaves: Iterable[Leaf]) -> str:
    """The line that fills the caller's state dict, with a comment on its keys."""
    tops = list(dict.fromkeys(str(leaf.path[0]) for leaf in leaves))
    keys = ", ".join(map(quoted, tops[:MAX_KEYS])) + (", …" if len(tops) > MAX_KEYS else "")
    what = f"  # state: a dict with what you want of {keys}" if tops else ""
    return f"import torch.distributed.checkpoint as dcp; dcp.load(state, checkpoint_id={quoted(out)}){what}"


def _file_name(number: int) -> str:
    """The name that rank 0 gives its files: `__{rank}_{number}.distcp`."""
    return f"__0_{number}.distcp"


@dataclass
class _Item:
    """An item: a plain value, or rows of a tensor.

    Attributes:
        leaf: the whole value, with its path in the state dict.
        number: number of the item among those of the value.
        box: the rows; None for a plain value.
        value: the tensor of these rows, or the plain value.
        dtype: of the tensor in the output; empty for a plain value.
        packed: its archive, at byte `at` of file number `file`.
        first_job: number of the job that copies its tensor.
    """

    leaf: Leaf
    number: int
    box: Box | None
    value: Any
    dtype: str
    packed: Packed
    file: int = 0
    at: int = 0
    first_job: int = 0

    @property
    def fqn(self) -> str:
        return fqn_of(self.leaf.path)


def _items(leaf: Leaf, selection: OutputContents, options: WriteOptions) -> Iterator[_Item]:
    if not isinstance(leaf.value, Tensor):
        yield _Item(leaf, 0, None, leaf.value, "", pack(leaf.value, leaf.source, selection, options))
        return
    dtype = output_dtype(leaf.source, leaf.value, selection, options.dtype)
    # An item is what torch saves of a state dict: no parameter, and nothing of autograd.
    plain = replace(leaf.value, parameter=False, requires_grad=False)
    for number, (box, rows) in enumerate(_cut(plain, ITEMSIZE[dtype])):
        yield _Item(leaf, number, box, rows, dtype, pack(rows, leaf.source, selection, options))


def _place(items: Sequence[_Item], groups: Sequence[range]) -> tuple[list[Job], list[int]]:
    """Put the items of each file one after the other; return the jobs that copy tensors, and the files' sizes."""
    jobs: list[Job] = []
    sizes: list[int] = []
    for file, numbers in enumerate(groups):
        at = 0
        for number in numbers:
            item = items[number]
            item.file, item.at, item.first_job = file, at, len(jobs)
            jobs += item.packed.jobs(file, at)
            at += item.packed.archive.nbytes
        sizes.append(at)
    return jobs, sizes


def _cut(tensor: Tensor, width: int) -> Iterator[tuple[Box, Tensor]]:
    """Cut a tensor into equal pieces of rows with about `ITEM_BYTES` each; a small one stays whole."""
    nbytes = tensor.numel * width
    if nbytes <= ITEM_BYTES or not tensor.shape:
        yield Box.whole(tensor.shape), tensor
        return
    pieces = min(tensor.shape[0], -(-nbytes // ITEM_BYTES))
    yield from row_pieces(tensor, -(-tensor.shape[0] // pieces))


def row_pieces(tensor: Tensor, count: int) -> Iterator[tuple[Box, Tensor]]:
    """Cut a tensor along its first dimension into pieces of `count` rows; yield the box and the tensor of each."""
    total, rest = tensor.shape[0], tensor.shape[1:]
    shards: list[list[Shard]] = [[] for _ in range(0, total, count)]
    boxes = [Box((n, *[0] * len(rest)), (min(count, total - n), *rest)) for n in range(0, total, count)]
    for shard in tensor.shards:
        # Each shard is compared only with the pieces that it overlaps: there may be hundreds of both.
        for number in range(shard.box.offsets[0] // count, -(-shard.box.ends[0] // count)):
            shards[number] += _part(shard, boxes[number])
    for box, found in zip(boxes, shards, strict=True):
        yield box, replace(tensor, shape=box.sizes, shards=tuple(found))


def _part(shard: Shard, window: Box) -> list[Shard]:
    """The part of a shard inside a box, with its place there; empty if there is none."""
    common = shard.box.intersect(window)
    if common is None or not shard.was_read:
        return []
    return [shard.part(common.seen_from(shard.box), common.seen_from(window))]


# -- .metadata --------------------------------------------------------------------------------------------------------


def _metadata(items: Sequence[_Item]) -> bytes:
    values = [(first.fqn, [first, *more]) for _, (first, *more) in groupby(items, key=lambda item: id(item.leaf))]
    state = {
        "state_dict_metadata": {fqn: _described(own) for fqn, own in values},
        "planner_data": {fqn: first.leaf.path for fqn, (first, *_) in values},
        "storage_data": {_index(item): _storage_info(item) for item in items},
        "storage_meta": None,
        "version": VERSION,
    }
    return Emitter().dump(Instance(METADATA, "Metadata", state))


def _described(items: Sequence[_Item]) -> Instance:
    tensor = items[0].leaf.value
    if not isinstance(tensor, Tensor):
        return Instance(METADATA, "BytesStorageMetadata", {})
    boxes = [{"offsets": Size(item.box.offsets), "sizes": Size(item.box.sizes)} for item in items if item.box]
    chunks = [Instance(METADATA, "ChunkStorageMetadata", box) for box in boxes]
    # `TensorProperties.__setstate__` takes dtype, layout, requires_grad, memory format and pin_memory.
    contiguous = Call(METADATA, "_MEM_FORMAT_ENCODING", (0,))
    dtype = Global("torch", items[0].dtype)
    state: Any = (dtype, TorchName("strided"), tensor.requires_grad, contiguous, False)
    properties = Instance(METADATA, "TensorProperties", state)
    state = {"properties": properties, "size": Size(tensor.shape), "chunks": chunks}
    return Instance(METADATA, "TensorStorageMetadata", state)


def _index(item: _Item) -> Instance:
    state: dict[str, Any] = {"fqn": item.fqn, "index": None}
    if item.box is not None:
        state |= {"index": item.number, "offset": Size(item.box.offsets)}
    return Instance(METADATA, "MetadataIndex", state)


def _storage_info(item: _Item) -> Instance:
    state = {"relative_path": _file_name(item.file), "offset": item.at, "length": item.packed.archive.nbytes}
    return Instance(FILESYSTEM, "_StorageInfo", state)
