"""A torch.distributed.checkpoint (DCP) folder, which `torch.distributed.checkpoint.load` reads at any world size.

`.distcp` files are items back to back. An item is a torch.save archive of one value; a tensor's item has only that
tensor, in a storage of its own. A loading rank reads each item with a needed row whole into memory, so large tensors
are cut into items of several rows. A tied weight is written under each of its names, as torch does: items that two
names share would load, but would look like a `.metadata` that points to the wrong bytes.
Source: torch/distributed/checkpoint/{filesystem,planner_helpers}.py of torch 2.13; class paths as of 2.6.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptools.consolidate.provenance import record_text
from ckptools.consolidate.selection import OutputContents
from ckptools.consolidate.writers.dcp_metadata import FILE_NAME, FlatValue, ItemPlace, metadata
from ckptools.consolidate.writers.dcp_tree import Leaf, arrange
from ckptools.consolidate.writers.layout import (
    Framing,
    Job,
    OutputLayout,
    ReadBack,
    ReadTensor,
    WriteOptions,
    files_of,
    output_dtype,
    quoted,
)
from ckptools.consolidate.writers.pt import Packed, pack
from ckptools.dtypes import ITEMSIZE
from ckptools.model.provenance import FILE_NAME as RECORD
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Tensor

NAME = "dcp"
WRITES = "a torch.distributed.checkpoint folder to resume from at any world size: model, optimizer and the rest"
SUFFIXES: tuple[str, ...] = (".dcp",)
ONLY = "all"
FILE = ""
BY_NAME = False
"""The tree is arranged for torch's state_dict API, names included (`dcp_tree`)."""

ITEM_BYTES = 8 << 20
"""Larger tensors are cut into items of about this size. Measured with 0.9 GB on 2 cores: 8 ranks that load
their rows took 9.0 s without cutting, 4.0 s with items of 64 MiB, 1.0 s with 16, 0.6 s with 4; writing is equally fast
down to 8, and slower below.
"""


MAX_KEYS = 6
"""Keys of the state dict that the loading line names."""


def lay_out(selection: OutputContents, out: Path, options: WriteOptions) -> OutputLayout:
    """Plan a DCP folder.

    Raises:
        RefusedError: two values would get one name, or there is no dict to begin with.
    """
    arranged = arrange(selection, out)
    items = _Items(selection, options)
    for leaf in arranged.leaves:
        items.add(leaf)
    items.place()
    record = record_text(selection, name_of=arranged.name)
    # The metadata comes last: once it has its name, the folder can be loaded.
    others = [*([(RECORD, record.encode("ascii"))] if record else []), (FILE_NAME, metadata(items.entries))]

    def framing(file: int) -> Iterator[Framing]:
        for item in items.placed[file] if file < len(items.placed) else ():
            yield from item.packed.archive.framing(item.at, item.first_job)
        for _, data in others[file - len(items.placed) :][:1] if file >= len(items.placed) else ():
            yield Framing(0, lambda _, data=data: data)  # type: ignore[misc]

    return OutputLayout(
        files=(
            *((out / _file_name(i), size) for i, size in enumerate(items.sizes)),
            *((out / name, len(data)) for name, data in others),
        ),
        jobs=tuple(items.jobs),
        framing=framing,
        read_back=partial(_read_back, items.parts),
        checksums=True,
        folder=out,
        notes=tuple(arranged.notes),
        tensors=items.tensors,
        name_of=arranged.name,
        load=_load(out, arranged.leaves),
    )


@dataclass(frozen=True)
class _ItemRows:
    """Rows of a tensor in one item: the item's name and number in the folder, and its place."""

    fqn: str
    number: int
    box: Box
    tensor: Tensor
    dtype: str


@contextmanager
def _read_back(parts: Sequence[_ItemRows], paths: Sequence[Path]) -> Iterator[ReadBack]:
    """Let torch's reader read the `.metadata`, then each item."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(paths[-1].parent)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    tensors = [ReadTensor(p.fqn, p.tensor, p.dtype, partial(_read_item, reader, metadata, p)) for p in parts]
    yield ReadBack(f"torch.distributed.checkpoint {torch.__version__}", tensors)


def _read_item(reader: Any, metadata: Any, part: _ItemRows) -> Any:
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    target = torch.empty(part.box.sizes, dtype=getattr(torch, part.dtype))
    planner = DefaultLoadPlanner()
    planner.set_up_planner({part.fqn: target}, metadata, is_coordinator=True)
    index = MetadataIndex(part.fqn, torch.Size(part.box.offsets), part.number)
    begin, sizes = torch.Size([0] * len(part.box.sizes)), torch.Size(part.box.sizes)
    item = ReadItem(LoadItemType.TENSOR, MetadataIndex(part.fqn), begin, index, begin, sizes)
    reader.read_data(LoadPlan([item]), planner).wait()
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


@dataclass(frozen=True)
class _Placed:
    """An item with its byte offset in the file, and the number of the job that copies its tensor."""

    packed: Packed
    at: int
    first_job: int


class _Items:
    """The items of all values, one after the other in as few files as the caller allows, of nearly equal size.

    Attributes:
        tensors: number of tensors.
        parts: the rows of tensors that torch will read, item by item.
        entries: every value with the places of its items; empty until `place`.
        placed: the items of each file, after `place`.
        jobs: every copy of a tensor, or a part of one, after `place`.
        sizes: bytes of each file, after `place`.
    """

    def __init__(self, selection: OutputContents, options: WriteOptions) -> None:
        self.tensors = 0
        self.parts: list[_ItemRows] = []
        self.entries: list[FlatValue] = []
        self.placed: list[list[_Placed]] = []
        self.jobs: list[Job] = []
        self.sizes: list[int] = []
        self._selection, self._options = selection, options
        self._items: list[tuple[FlatValue, Box | None, Packed]] = []

    def add(self, leaf: Leaf) -> None:
        """Give a value its items."""
        if not isinstance(leaf.value, Tensor):
            self._add(FlatValue(leaf.path, None), None, leaf.value, leaf)
            return
        dtype = output_dtype(leaf.source, leaf.value, self._selection, self._options.dtype)
        entry = FlatValue(leaf.path, replace(leaf.value, dtype=dtype))
        self.tensors += 1
        # An item is what torch saves of a state dict: no parameter, and nothing of autograd.
        plain = replace(leaf.value, parameter=False, requires_grad=False)
        for number, (box, part) in enumerate(_cut(plain, ITEMSIZE[dtype])):
            self.parts.append(_ItemRows(entry.fqn, number, box, part, dtype))
            self._add(entry, box, part, leaf)

    def _add(self, entry: FlatValue, box: Box | None, value: Any, leaf: Leaf) -> None:
        if not self.entries or self.entries[-1] is not entry:
            self.entries.append(entry)
        self._items.append((entry, box, pack(value, leaf.source, self._selection, self._options)))

    def place(self) -> None:
        """Give every item its place."""
        nbytes = [packed.archive.nbytes for _, _, packed in self._items]
        for file, numbers in enumerate(files_of(nbytes, self._options.max_shard_size)):
            at = 0
            self.placed.append([])
            for number in numbers:
                entry, box, packed = self._items[number]
                entry.items.append((box, ItemPlace(_file_name(file), at, nbytes[number])))
                self.placed[file].append(_Placed(packed, at, len(self.jobs)))
                self.jobs += packed.jobs(file, at)
                at += nbytes[number]
            self.sizes.append(at)


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
