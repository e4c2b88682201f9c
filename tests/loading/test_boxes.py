"""Any box of any tensor, however it was cut when it was saved, is filled with its own bits, and nothing around it."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import ckptools
from ckptools.model.regions import Box
from tests.fake_world import fake_group
from tests.loading.odd_targets import RANKS, ROWS, ask
from tests.state_dicts import raw
from tests.training.forked import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "complex64", "complex128", "int64", "int16", "uint8", "bool",
)  # fmt: skip


def numbers(shape: Sequence[int], dtype: str, seed: int = 0) -> torch.Tensor:
    """A tensor whose elements differ, as far as the dtype goes."""
    generator = torch.Generator().manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_complex or kind in (torch.float32, torch.float64):
        return torch.randn(tuple(shape), dtype=kind, generator=generator)
    if kind.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(kind)
    return torch.randint(0, 2 if kind is torch.bool else 120, tuple(shape), generator=generator).to(kind)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return raw(tensor.clone(memory_format=torch.contiguous_format))


# -- one tensor, cut at random -----------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a shape: one, cut again and again."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        here = draw(st.integers(0, box.sizes[dim]))
        for begin, size in ((0, here), (here, box.sizes[dim] - here)):
            if size:
                offsets = (*box.offsets[:dim], box.offsets[dim] + begin, *box.offsets[dim + 1 :])
                boxes.append(Box(offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :])))
    return boxes


@st.composite
def some_box(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box in a shape; it may be empty."""
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


def sharded(whole: torch.Tensor, boxes: Sequence[Box], rank: int | None) -> ShardedTensor:
    """The shards of one rank, or with None all of them on rank 0; each box is on the rank of its number."""
    pieces = [
        ShardMetadata(list(b.offsets), list(b.sizes), f"rank:{0 if rank is None else n}/cpu")
        for n, b in enumerate(boxes)
    ]
    mine = [LocalShard(part(whole, box).clone(), pieces[n]) for n, box in enumerate(boxes) if rank is None or n == rank]
    metadata = ShardedTensorMetadata(pieces, whole.size(), TensorProperties(whole.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata)


def saved(folder: Path, kind: str, whole: torch.Tensor, boxes: Sequence[Box]) -> Path:
    """Save a tensor in boxes: by DCP, in a file of torch.save for each box, or whole as safetensors."""
    if kind == "safetensors" and not whole.is_complex():
        save_file({"w": whole}, folder / "w.safetensors")
        return folder / "w.safetensors"
    if not boxes:  # what has no elements, or no dimension, is in no ShardedTensor
        torch.save({"model": {"w": whole}}, folder / "w.pt")
        return folder / "w.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "dcp":
            with fake_group(0, 1):
                dcp.save({"model": {"w": sharded(whole, boxes, None)}}, checkpoint_id=folder / "dcp", no_dist=True)
            return folder / "dcp"
        for rank in range(len(boxes)):
            with fake_group(rank, len(boxes)):
                torch.save({"model": {"w": sharded(whole, boxes, rank)}}, folder / f"model-rank{rank}.pt")
    return folder


class OneTensor(dcp.DefaultLoadPlanner):
    """Asks for boxes of one tensor, into tensors that are given."""

    def __init__(self, boxes: Sequence[Box], targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.boxes, self.targets = boxes, targets

    def create_local_plan(self) -> LoadPlan:
        items = []
        for n, box in enumerate(self.boxes):
            assert self.metadata is not None and self.metadata.state_dict_metadata["model.w"]
            at, zero = torch.Size(box.offsets), torch.Size([0] * len(box.sizes))
            whose = MetadataIndex("model.w", index=n)
            items.append(ReadItem(LoadItemType.TENSOR, whose, zero, whose, at, torch.Size(box.sizes)))
        return LoadPlan(items)

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        assert item.dest_index.index is not None
        return self.targets[item.dest_index.index]


def target_of(sizes: Sequence[int], dtype: torch.dtype, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor to fill, and the memory that it is a view of."""
    if layout == "turned":
        around = torch.ones(tuple(reversed(sizes)), dtype=dtype)
        return around.permute(tuple(reversed(range(len(sizes))))), around
    if layout == "within":
        around = torch.ones([2 * n + 1 for n in sizes], dtype=dtype)
        return around[tuple(slice(1, 2 * n + 1, 2) for n in sizes)], around
    around = torch.ones(tuple(sizes), dtype=dtype)
    return around, around


@given(
    st.data(),
    st.lists(st.integers(0, 6), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    st.sampled_from(["dcp", "rank files", "safetensors"]),
    st.sampled_from(["plain", "turned", "within"]),
    st.booleans(),
)
def test_a_box_is_filled_with_its_bits_and_nothing_around_it(
    data: st.DataObject, shape: tuple[int, ...], dtype: str, kind: str, layout: str, cast: bool
) -> None:
    whole = numbers(shape, dtype)
    boxes = data.draw(cuts(shape)) if whole.numel() and shape else []
    asked = data.draw(st.lists(some_box(shape), min_size=1, max_size=3))
    into = torch.complex128 if whole.is_complex() else torch.float64
    into = into if cast else whole.dtype
    targets = [target_of(box.sizes, into, layout) for box in asked]
    with tempfile.TemporaryDirectory() as folder:
        reader = ckptools.StorageReader(saved(Path(folder), kind, whole, boxes), cast=cast, strict=False, no_dist=True)
        dcp.load({}, storage_reader=reader, planner=OneTensor(asked, [one for one, _ in targets]), no_dist=True)
    for box, (target, around) in zip(asked, targets, strict=True):
        assert bits(target) == bits(part(whole, box).to(into)), box
        if layout == "within":
            target.fill_(1)
            assert bits(around) == bits(torch.ones_like(around))


# -- tensors of many dtypes in distributed tensors ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one file", "rank files"])
def test_every_kind_of_distributed_tensor_is_filled_on_every_rank(kind: str, tmp_path: Path) -> None:
    shapes = [*ROWS, ()]
    whole = {f"{dtype}.{n}": numbers(shape, dtype, n) for dtype in DTYPES for n, shape in enumerate(shapes)}
    torch.save(whole, tmp_path / "truth.pt")
    source = tmp_path / "source"
    source.mkdir()
    if kind == "one file":
        torch.save({"model": whole}, source / "w.pt")
    for rank in range(2) if kind == "rank files" else ():
        with fake_group(rank, 2), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mine = {name: in_two(value, rank) for name, value in whole.items()}
            torch.save({"model": mine}, source / f"r-rank{rank}.pt")
    run_ranks(RANKS, ask, source, tmp_path / "truth.pt")


def in_two(whole: torch.Tensor, rank: int) -> torch.Tensor:
    """One rank's file has the first rows, the other the rest."""
    if not whole.numel() or not whole.ndim:
        return whole
    rows = len(whole) // 2 + 1
    tail = tuple(whole.shape[1:])
    boxes = [Box((0,) * whole.ndim, (rows, *tail)), Box((rows, *[0] * len(tail)), (len(whole) - rows, *tail))]
    return sharded(whole, [box for box in boxes if box.sizes[0]], rank)
