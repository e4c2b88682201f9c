"""Values of lazy tensors: the right ones, only the bytes that are needed, or one line."""

from __future__ import annotations

import os
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptools
from ckptools import Tensor
from ckptools.errors import CkptoolsError, NotWholeError, ReadError, UsageError
from ckptools.model.regions import Box, span_boxes
from ckptools.model.shards import Shard, Source
from ckptools.tensor_io import read
from tests.truth import FIXTURES

SHARDED = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
HSDP = FIXTURES / "torch2.0.1-fsdp1-hsdp2x2-st-w4"


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A file of the float32 numbers 0 to 9999."""
    path = tmp_path_factory.mktemp("numbers") / "n.bin"
    path.write_bytes(np.arange(10_000, dtype="<f4").tobytes())
    return path


def source(path, shape, strides, start=0):
    return Source(path, 4 * start, "float32", shape, strides, "r", (0, 40_000))


def whole(path, shape, strides, start=0):
    return Tensor(shape, "float32", (Shard(Box.whole(shape), None, source(path, shape, strides, start)),))


@st.composite
def views(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    return shape, tuple(draw(st.integers(0, 300)) for _ in shape), draw(st.integers(0, 100))


@settings(deadline=None)
@given(view=views(), span=st.sampled_from([4, 64, 1000, 1 << 20]))
def test_a_view_is_read_in_pieces_of_bounded_span(numbers, view, span):
    shape, strides, start = view
    expected = torch.arange(10_000.0).as_strided(shape, strides, start)
    out = np.empty(shape, "<u4")
    parts = list(read.bounded(source(numbers, shape, strides, start), span))
    assert all(read.extent(part) <= span or set(part.shape) == {1} for part, _ in parts)
    read.fill(out, Box.whole(shape), whole(numbers, shape, strides, start).shards)
    assert out.view("<f4").tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool"])
def test_numpy_gets_the_values_and_never_an_object(tmp_path, dtype):
    value = torch.tensor([[0, 1, 2], [3, 0, 1]]).to(getattr(torch, dtype))
    torch.save({"w": value}, tmp_path / "m.pt")
    tensor = ckptools.open(tmp_path / "m.pt").model["w"]
    array = np.asarray(tensor)
    assert array.dtype == tensor.numpy().dtype != object and array.tolist() == value.float().tolist()
    assert np.asarray(tensor, dtype="float64").dtype == np.float64
    assert np.allclose(np.stack([tensor, tensor]).sum(), 2 * value.float().sum())


def test_numpy_is_refused_an_array_without_a_copy(numbers):
    with pytest.raises(ValueError, match="always a copy"):
        whole(numbers, (2,), (1,)).__array__(copy=False)


def test_numpy_asked_for_a_scalar_gets_one(numbers):
    assert np.asarray(whole(numbers, (), (), 7)).item() == 7.0


@pytest.mark.parametrize("value", [True, 7, 0.5, 1 + 2j], ids=str)
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_the_only_element_of_a_tensor_is_pythons_number(tmp_path, value, dims):
    torch.save({"w": torch.tensor(value).reshape((1,) * dims)}, tmp_path / "m.pt")
    item = ckptools.open(tmp_path / "m.pt").model["w"].item()
    assert item == value and type(item) is type(value)


@pytest.mark.parametrize("sizes", [(2,), (1, 3), (0,)])
def test_a_tensor_of_several_elements_or_none_is_no_number(tmp_path, sizes):
    torch.save({"w": torch.ones(sizes), "v": torch.ones(1)}, tmp_path / "m.pt")
    with pytest.raises(UsageError, match=r"^w: item\(\) is for a tensor of one element") as error:
        ckptools.open(tmp_path / "m.pt").model["w"].item()
    assert "\n" not in str(error.value) and str(list(sizes)) in str(error.value)


def test_an_index_beyond_the_end_raises_so_that_a_loop_over_rows_ends(numbers):
    tensor = whole(numbers, (3, 2), (2, 1))
    for index in (3, -4, (0, 2), (2, -3)):
        with pytest.raises(IndexError, match="out of range"):
            tensor[index]
    assert [row.tolist() for row in tensor] == [[0, 1], [2, 3], [4, 5]]
    assert tensor[-3].tolist() == [0, 1]


@settings(deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 5), cuts=st.lists(st.integers(0, 45), max_size=4))
def test_runs_of_a_flattened_tensor_are_put_back_into_its_shape(numbers, rows, columns, cuts):
    total = rows * columns
    ends = sorted({0, total, *(c for c in cuts if c < total)})
    shards = [
        Shard(box, rank, source(numbers, (box.numel,), (1,), start + at).reshaped(box.sizes))
        for rank, (start, end) in enumerate(pairwise(ends))
        for box, at in span_boxes((rows, columns), start, end - start)
    ]
    tensor = Tensor((rows, columns), "float32", tuple(shards), "flat_pieces", world_size=len(ends) - 1)
    assert tensor.load().tolist() == torch.arange(float(total)).reshape(rows, columns).tolist()
    for rank, (start, end) in enumerate(pairwise(ends)):
        assert tensor.load(rank=rank).reshape(-1).tolist() == list(range(start, end))


def test_replicas_are_read_once(numbers):
    one = source(numbers, (4,), (1,))
    tensor = Tensor((4,), "float32", tuple(Shard(Box.whole((4,)), r, one) for r in range(3)))
    assert tensor.load().tolist() == tensor.load(rank=2).tolist() == [0, 1, 2, 3]


def test_several_boxes_of_a_rank_are_moved_together(numbers):
    """As strided sharding leaves them: the rank has rows 0, 1 and 4, 5 of six."""
    rows = [(0, 2, 0), (2, 2, 1), (4, 2, 0)]
    shards = [Shard(Box((at, 0), (n, 3)), rank, source(numbers, (n, 3), (3, 1), 3 * at)) for at, n, rank in rows]
    tensor = Tensor((6, 3), "float32", tuple(shards))
    assert tensor.load(rank=0).tolist() == [[0, 1, 2], [3, 4, 5], [12, 13, 14], [15, 16, 17]]
    assert tensor.load(rank=1).tolist() == [[6, 7, 8], [9, 10, 11]]


def test_a_hole_is_named_and_never_filled(numbers):
    tensor = Tensor((8,), "float32", (Shard(Box((0,), (3,)), 0, source(numbers, (3,), (1,))),))
    with pytest.raises(NotWholeError, match=r"5 of its 8 elements: \[3:8\]"):
        tensor.load()
    assert tensor[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize("index", [[0], True, (0, 0, 0), "0", 1.0, None], ids=str)
def test_an_index_of_another_kind_is_refused(numbers, index):
    with pytest.raises(UsageError):
        whole(numbers, (4, 5), (5, 1))[index]


def test_shards_that_overlap_are_refused(numbers):
    boxes = [Box((0,), (3,)), Box((2,), (2,))]
    tensor = Tensor((4,), "float32", tuple(Shard(b, None, source(numbers, b.sizes, (1,))) for b in boxes))
    with pytest.raises(NotWholeError, match="overlapping"):
        tensor.load()


@pytest.mark.parametrize(("holder", "found"), [(0, False), (1, True), (None, True)])
def test_a_whole_tensor_of_one_rank_is_no_other_ranks(numbers, holder, found):
    tensor = Tensor((4,), "float32", (Shard(Box.whole((4,)), holder, source(numbers, (4,), (1,))),))
    if found:
        assert tensor.load(rank=1).tolist() == [0, 1, 2, 3]
    else:
        with pytest.raises(UsageError, match="rank 1 holds nothing"):
            tensor.load(rank=1)


def test_a_rank_that_holds_nothing_is_said():
    with pytest.raises(UsageError, match="rank 3 holds nothing"):
        Tensor((4,), "float32", ()).load(rank=3)


# -- shards of other ranks ----------------------------------------------------------------------------------------


def first_sharded(ck):
    return next(t for t in ck.model.values() if t.sharded and len(t.shards) == 4)


@pytest.mark.parametrize("folder", [SHARDED, HSDP], ids=lambda p: p.name)
def test_every_tensor_of_a_lone_rank_finds_its_other_shards(folder):
    path = sorted(folder.glob("*rank1.pt"))[0]
    one, every = ckptools.open(path), ckptools.open(path, all_ranks=True)
    for fqn, tensor in one.model.items():
        assert torch.equal(tensor.load(), every.model[fqn].load())


@pytest.mark.parametrize("rank", range(4))
def test_what_a_rank_held_is_read_from_its_own_file(rank):
    tensor = first_sharded(ckptools.open(SHARDED / "ep0-ba5-rank0.pt"))
    (box,) = [s.box for s in tensor.shards if s.rank == rank]
    region = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    assert torch.equal(tensor.load(rank=rank), tensor.load()[region])


def test_a_rank_that_is_absent_is_named_when_its_values_are_wanted(tmp_path):
    for path in SHARDED.glob("*rank[013].pt"):
        shutil.copy(path, tmp_path)
    tensor = first_sharded(ckptools.open(tmp_path / "ep0-ba5-rank0.pt"))
    with pytest.raises(NotWholeError, match="no file here holds"):
        tensor.load()
    with pytest.raises(UsageError, match="rank 2 holds nothing"):
        tensor.load(rank=2)
    assert tensor[: tensor.shards[1].box.offsets[0]].numel()


@pytest.mark.parametrize(("kept", "fate"), [(5000, "cut short or damaged"), (None, "missing")])
def test_the_file_that_held_a_hole_is_named_with_the_tensor(tmp_path, kept, fate):
    folder = shutil.copytree(SHARDED, tmp_path / "run", ignore=shutil.ignore_patterns("truth*"))
    lost = folder / "ep0-ba5-rank2.pt"
    os.truncate(lost, kept) if kept else lost.unlink()
    name, tensor = next((n, t) for n, t in ckptools.open(folder).model.items() if t.sharded)
    words = rf"^{name}: no file here holds .*; ep0-ba5-rank2\.pt is {fate}$"
    for values in (tensor.load, tensor.numpy, lambda: tensor[:], tensor.dequantize):
        with pytest.raises(NotWholeError, match=words):
            values()


def test_a_cut_sibling_is_one_line_when_its_values_are_wanted(tmp_path, large_world):
    shutil.copytree(SHARDED, tmp_path / "ck")
    cut = tmp_path / "ck" / "ep0-ba5-rank2.pt"
    cut.write_bytes(cut.read_bytes()[:5000])
    with pytest.raises(ReadError, match=r"ep0-ba5-rank2\.pt: is cut short"):
        first_sharded(ckptools.open(tmp_path / "ck" / "ep0-ba5-rank0.pt")).load()


def test_links_that_were_allowed_stay_allowed(tmp_path):
    for path in SHARDED.glob("*rank*.pt"):
        (tmp_path / path.name).symlink_to(path)
    ck = ckptools.open(tmp_path / "ep0-ba5-rank0.pt", follow_symlinks=True)
    assert torch.equal(first_sharded(ck).load(), first_sharded(ckptools.open(SHARDED / "ep0-ba5-rank0.pt")).load())


def test_a_checkpoint_opened_by_its_folder_finds_them_too():
    assert torch.equal(
        first_sharded(ckptools.open(SHARDED)).load(), first_sharded(ckptools.open(SHARDED, all_ranks=True)).load()
    )


# -- what a path may be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["x" * 5000, "none/rank0.pt", "nul\0rank0.pt", "", "/dev/null", "/proc/self/mem/x"])
def test_a_path_that_is_no_file_is_one_line(path):
    with pytest.raises(CkptoolsError) as told:
        ckptools.open(path)
    assert "\n" not in str(told.value)


def test_a_file_without_permission_is_one_line(tmp_path, monkeypatch):
    from pathlib import Path

    torch.save({"w": torch.ones(1)}, tmp_path / "m.pt")

    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    monkeypatch.setattr("os.open", forbidden)
    with pytest.raises(ReadError, match="permission denied"):
        ckptools.open(tmp_path / "m.pt")
