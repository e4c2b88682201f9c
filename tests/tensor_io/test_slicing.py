"""Slices of lazy tensors are what numpy makes of them, and of the files only what they have is read."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools import Tensor
from ckptools.errors import NotWholeError, UsageError
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.tensor_io.slicing import bands_of, count_bands
from tests.truth import FIXTURES

COMMON = settings(deadline=None, max_examples=60)


def part(parent: Source, box: Box) -> Shard:
    return Shard(box, None, parent.part(box))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    path = tmp_path_factory.mktemp("numbers") / "n.bin"
    path.write_bytes(np.arange(4096 * 1024, dtype="<f4").tobytes())
    return path


def stored(path: Path, shape: tuple[int, ...], *cuts: list[int]) -> Tensor:
    """A tensor of the numbers from 0 on, cut into a grid of shards."""
    parent = Source(path, 0, "float32", shape, contiguous_strides(shape), "r", (0, 1 << 24))
    axes = [pairwise(sorted({0, n, *(c for c in cut if c < n)})) for n, cut in zip(shape, cuts, strict=True)]
    boxes = [Box(tuple(a for a, _ in runs), tuple(b - a for a, b in runs)) for runs in product(*map(list, axes))]
    return Tensor(shape, "float32", tuple(part(parent, box) for box in boxes), "sharded_tensor")


@st.composite
def cut_tensors(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    return shape, [draw(st.lists(st.integers(0, 7), max_size=3)) for _ in shape]


@st.composite
def indices(draw, shape):
    """Ints, slices with any step, and perhaps an ellipsis, of at most as many dimensions as there are."""
    bound = st.none() | st.integers(-9, 9)
    one = st.builds(slice, bound, bound, st.sampled_from([None, 1, 2, 3, -1, -2]))
    parts = [draw(one | st.integers(-n, n - 1)) for n in shape]
    kept = parts[: draw(st.integers(0, len(parts)))]
    return (*kept, Ellipsis) if draw(st.booleans()) else tuple(kept)


def values_of(shape):
    return np.arange(np.prod(shape), dtype="<f4").reshape(shape)


@COMMON
@given(data=st.data(), made=cut_tensors())
def test_a_slice_is_what_numpy_makes_of_it(numbers, data, made):
    shape, cuts = made
    index = data.draw(indices(shape))
    found, expected = stored(numbers, shape, *cuts)[index], values_of(shape)[index]
    assert (tuple(found.shape), found.tolist()) == (expected.shape, expected.tolist())


@COMMON
@given(data=st.data(), made=cut_tensors())
def test_so_is_a_slice_of_the_transposed(numbers, data, made):
    shape, cuts = made
    index, turned = data.draw(indices(shape[::-1])), stored(numbers, shape, *cuts).T
    expected = values_of(shape).T[index]
    assert (tuple(turned[index].shape), turned[index].tolist()) == (expected.shape, expected.tolist())
    assert (turned.shape, turned.load().tolist()) == (shape[::-1], values_of(shape).T.tolist())
    assert np.asarray(turned).tolist() == values_of(shape).T.tolist() and turned.T.shape == shape


@COMMON
@given(data=st.data(), made=cut_tensors())
def test_a_slice_through_a_hole_is_refused_and_one_beside_it_is_not(numbers, data, made):
    shape, cuts = made
    whole = stored(numbers, shape, *cuts)
    assume(len(whole.shards) > 1)
    gone, *kept = data.draw(st.permutations(whole.shards))
    index = data.draw(indices(shape))
    named = np.zeros(shape, bool)
    named[tuple(slice(o, e) for o, e in zip(gone.box.offsets, gone.box.ends, strict=True))] = True
    with_hole = Tensor(shape, "float32", tuple(kept), "sharded_tensor")
    if named[index].any():
        with pytest.raises(NotWholeError, match="no file here holds"):
            with_hole[index]
    else:
        assert with_hole[index].tolist() == values_of(shape)[index].tolist()


@pytest.mark.parametrize("step", [0, "x"], ids=str)
def test_a_step_that_is_none_is_refused_as_python_does(numbers, step):
    with pytest.raises((ValueError, TypeError)):
        stored(numbers, (4,), [])[::step]


@pytest.mark.parametrize("index", [True, (0, 0), [0], "0", 1.0, None], ids=str)
def test_an_index_of_another_kind_is_refused(numbers, index):
    with pytest.raises(UsageError):
        stored(numbers, (4,), [])[index]


@pytest.mark.parametrize("index", [4, -5, (slice(None, None, 2), 2)], ids=str)
def test_an_int_beyond_the_end_raises(numbers, index):
    with pytest.raises(IndexError, match="out of range"):
        stored(numbers, (4, 2), [2], [])[index]


def test_a_mask_is_refused_and_says_what_to_do(numbers):
    with pytest.raises(UsageError, match="load it for others"):
        stored(numbers, (4,), [])[np.array([True, False, True, True])]


# -- what is read -------------------------------------------------------------------------------------------------


def bytes_read(what: str = "rchar") -> int:
    """Bytes that this process has asked the kernel for; or with `syscr`, how often."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told[what])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no /proc/self/io here")
@pytest.mark.parametrize(
    ("index", "elements"),
    [
        (np.s_[::512], 8 * 1024),
        (np.s_[..., 0], None),
        (np.s_[5], 1024),
        (np.s_[-1, ::2], 1024),
        (np.s_[:0], 0),
        (np.s_[::-1024, :16], 4 * 16),
    ],
    ids=str,
)
def test_only_what_a_slice_has_is_read(numbers, index, elements):
    tensor = stored(numbers, (4096, 1024), [1000, 3000], [])
    assert tensor[0, 0] == 0  # imports what reading needs
    before = bytes_read()
    found = tensor[index]
    read = bytes_read() - before
    assert found.tolist() == values_of((4096, 1024))[index].tolist()
    # Of a column whose rows are 4 KiB all is read: that is fewer calls and the same pages.
    assert read <= 4 * (elements if elements is not None else 4096 * 1024) + 4096


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no /proc/self/io here")
def test_of_a_wide_matrix_a_column_is_read_without_the_rest(numbers):
    tensor = stored(numbers, (512, 8192), [100], [])
    assert tensor[0, 0] == 0  # imports what reading needs
    before = bytes_read()
    assert tensor[:, 3:5].tolist() == values_of((512, 8192))[:, 3:5].tolist()
    assert bytes_read() - before <= 512 * 8 + 4096


# -- what numpy, torch and loops ask for --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex64", "float16"])
@pytest.mark.parametrize("make", [torch.as_tensor, torch.asarray, torch.from_dlpack], ids=lambda make: make.__name__)
def test_torch_takes_it_in_its_own_dtype(tmp_path, make, dtype):
    value = torch.tensor([[0, 1, 2], [3, 0, 1]]).to(getattr(torch, dtype))
    torch.save({"w": value}, tmp_path / "m.pt")
    made = make(ckptools.open(tmp_path / "m.pt").model["w"])
    assert made.dtype == value.dtype and torch.equal(made, value)


def test_what_cannot_be_handed_over_says_what_to_do(tmp_path):
    value = torch.zeros(3, dtype=torch.complex32)
    torch.save({"w": value}, tmp_path / "m.pt")
    tensor = ckptools.open(tmp_path / "m.pt").model["w"]
    with pytest.raises(UsageError, match=r"numpy has no complex32; use \.load\(\)"):
        np.asarray(tensor)
    with pytest.raises(BufferError, match="always a copy"):
        tensor.__dlpack__(copy=False)
    assert tensor.load().dtype == value.dtype


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no /proc/self/io here")
def test_a_loop_reads_many_rows_at_once(numbers):
    assert stored(numbers, (4,), [])[0] == 0  # imports what reading needs
    calls = bytes_read("syscr")
    assert sum(1 for _ in stored(numbers, (4096, 1024), [1000], [])) == 4096
    assert bytes_read("syscr") - calls < 100


def test_a_loop_gives_each_row_and_len_is_that_of_the_first_dimension(numbers):
    tensor = stored(numbers, (4096, 1024), [1000], [])
    rows = iter(tensor)
    assert (len(tensor), next(rows)[:2].tolist(), next(rows)[:2].tolist()) == (4096, [0, 1], [1024, 1025])
    assert sum(1 for _ in rows) == 4094
    assert [int(x) for x in stored(numbers, (5,), [2])] == [0, 1, 2, 3, 4]


def test_of_no_dimensions_there_are_no_rows_and_nothing_has_a_truth(numbers):
    scalar = Tensor((), "float32", (part(Source(numbers, 28, "float32", (), (), "r", (0, 99)), Box((), ())),))
    assert scalar[()].item() == scalar[...].item() == 7.0
    held = scalar.called("scalar")
    for ask in (len, iter, bool):
        with pytest.raises(TypeError):
            ask(held)


def test_items_of_a_dcp_are_sliced_too():
    with ckptools.open(FIXTURES / "torch2.13.0-fsdp2-dcp-w3") as ck:
        tensor = next(t for t in ck.model.values() if t.sharded and len(t.shape) == 2 and len(t.shards) > 1)
        assert torch.equal(tensor[::-2, 1::2], tensor.load().flip(0)[::2, 1::2])


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 40))
def test_bands_are_counted_without_making_them(sizes, most):
    shape = tuple(sizes)
    assert count_bands(shape, most) == len(list(bands_of(Box.whole(shape), most)))


def test_bands_of_a_tensor_that_no_disk_holds_are_counted_at_once():
    assert count_bands((3, 1 << 50), 1 << 20) == 3 << 30
