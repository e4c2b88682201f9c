"""Figures of tensors are those that numpy takes of all elements at once in float64, or a reason why there are none."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.keys.entries import Selection
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.stats import passes
from ckptools.stats.figures import summed, tensor_stats
from ckptools.stats.passes import elsewhere
from tests.versions import torch_with

RNG = np.random.default_rng(0)


def stored(path: Path, values: torch.Tensor, cuts: int = 1) -> Tensor:
    """A tensor whose rows lie in a file in `cuts` shards, one behind the other."""
    path.write_bytes(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    dtype, row = str(values.dtype)[6:], values[:1].numel() * values.element_size()
    edges = [len(values) * i // cuts for i in range(cuts + 1)]
    shards = []
    for rank, (a, b) in enumerate(itertools.pairwise(edges)):
        shape = (b - a, *values.shape[1:])
        source = Source(path, a * row, dtype, shape, contiguous_strides(shape), "r", (0, path.stat().st_size))
        shards.append(Shard(Box((a,) + (0,) * (values.dim() - 1), shape), rank, source))
    return Tensor(tuple(values.shape), dtype, tuple(shards))


def known(values: np.ndarray) -> dict[str, float]:
    """The figures of finite float64 values, taken in long double, which holds their squares."""
    wide = values.astype(np.longdouble)
    mean = wide.mean()
    std = np.sqrt(((wide - mean) ** 2).mean())
    l2 = np.sqrt((wide**2).sum())
    figures = {"rms": l2 / np.sqrt(np.longdouble(len(wide))), "l2": l2, "mean": mean, "std": std}
    return {k: float(v) for k, v in figures.items()} | {"min": values.min(), "max": values.max()}


ADVERSARIAL = {
    "a large mean and a small variance": 1e8 + RNG.standard_normal(100_001),
    "a mean of 1e9 and deviations of 1": 1e9 + RNG.integers(0, 3, 70_000).astype(float),
    "bands that differ by far": np.repeat([1e-9, 1e9, -1e9, 3.0], 40_000) * (1 + 1e-6 * RNG.standard_normal(160_000)),
    "squares that overflow": RNG.standard_normal(40_000) * 1e300,
    "squares that vanish": RNG.standard_normal(40_000) * 1e-300,
    "smallest numbers behind many zeros": np.concatenate([np.zeros(70_000), RNG.standard_normal(1000) * 1e-310]),
    "smallest and largest numbers": np.concatenate([RNG.standard_normal(40_000) * 1e-300, [1e300, -1e300]]),
    "all equal": np.full(100_000, 0.1),
    "one element": np.array([-3.5]),
}


@pytest.mark.parametrize("values", ADVERSARIAL.values(), ids=ADVERSARIAL)
@pytest.mark.parametrize("cuts", [1, 3])
def test_figures_are_sound_where_squares_and_sums_are_not(tmp_path, values, cuts):
    found = tensor_stats(stored(tmp_path / "t", torch.from_numpy(values), cuts))
    for name, value in known(values).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-11, abs=1e-13 * abs(values).max()), name
    assert found.std == pytest.approx(known(values)["std"], rel=1e-9)
    assert (found.elements, found.zeros) == (len(values), int((values == 0).sum()))


FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
          "float8_e5m2fnuz", "float8_e8m0fnu")  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_bit_pattern_of_a_float_is_counted_as_torch_reads_it(tmp_path, dtype):
    torch_with(dtype)
    width = getattr(torch, dtype).itemsize
    codes = np.arange(1 << 8 * min(width, 2), dtype=np.uint16 if width > 1 else np.uint8)
    raw = RNG.integers(0, 256, (4096, width), dtype=np.uint8) if width > 2 else codes
    values = torch.from_numpy(raw.reshape(-1).view(np.uint8)).view(getattr(torch, dtype))
    found, real = tensor_stats(stored(tmp_path / "t", values)), values.double().numpy()
    finite = real[np.isfinite(real)]
    assert (found.nan, found.inf) == (np.isnan(real).sum(), np.isinf(real).sum())
    assert (found.zeros, found.min, found.max) == ((finite == 0).sum(), finite.min(), finite.max())
    assert found.elements == len(real)
    for name, value in known(finite).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12, abs=1e-15 * abs(finite).max()), name


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"])
def test_integers_and_flags_have_exact_extremes(tmp_path, dtype):
    real = RNG.integers(0, 256, 8000, dtype=np.uint8) & (1 if dtype == "bool" else 255)
    raw = real.repeat(getattr(torch, dtype).itemsize)
    values = torch.from_numpy(raw).view(getattr(torch, dtype))
    found, numbers = tensor_stats(stored(tmp_path / "t", values)), values.numpy()
    assert (found.min, found.max) == (int(numbers.min()), int(numbers.max()))
    assert type(found.min) is int
    assert found.zeros == (numbers == 0).sum()
    assert found.mean == pytest.approx(numbers.astype(float).mean(), rel=1e-12)
    assert found.std == pytest.approx(numbers.astype(float).std(), rel=1e-12)


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "complex32"])
def test_complex_numbers_are_taken_by_their_magnitudes(tmp_path, dtype):
    parts = torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.nan, math.inf], [math.inf, 1.0], [0.0, -1.0]])
    real = {"complex64": torch.float32, "complex128": torch.float64, "complex32": torch.float16}[dtype]
    values = torch.view_as_complex(parts.to(real))
    found = tensor_stats(stored(tmp_path / "t", values))
    assert (found.elements, found.nan, found.inf, found.zeros) == (5, 1, 1, 1)
    assert (found.min, found.max, found.l2) == (0.0, 5.0, pytest.approx(math.sqrt(26)))


def test_nothing_finite_and_nothing_at_all_have_no_figures(tmp_path):
    nothing = tensor_stats(stored(tmp_path / "a", torch.empty(0, 3)))
    odd = tensor_stats(stored(tmp_path / "b", torch.tensor([math.nan, math.inf, -math.inf, math.nan])))
    assert (nothing.elements, nothing.rms, nothing.min, nothing.problem) == (0, None, None, "")
    assert (odd.elements, odd.nan, odd.inf, odd.l2, odd.max) == (4, 2, 2, None, None)
    assert repr(odd) == "Stats(rms=None, l2=None, min=None, max=None, zeros=0, nonfinite=4)"


def test_what_is_not_finite_is_left_out_of_the_other_figures(tmp_path):
    values = torch.arange(50_000.0)
    values[[7, 40_000]] = torch.tensor([math.nan, -math.inf])
    found, finite = tensor_stats(stored(tmp_path / "t", values, 2)), values[values.isfinite()].double().numpy()
    assert (found.nan, found.inf, found.nonfinite, found.elements) == (1, 1, 2, 50_000)
    assert found.mean == pytest.approx(finite.mean(), rel=1e-13)
    assert found.std == pytest.approx(finite.std(), rel=1e-12)


@settings(deadline=None, max_examples=50)
@given(
    data=st.lists(
        st.lists(st.floats(-1e307, 1e307) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=30),
        min_size=1,
        max_size=5,
    )
)
def test_sums_do_not_depend_on_where_bands_begin(data):
    def sums(bands):
        return summed((np.array(band).view("<u8") for band in bands), "float64")

    a, b = sums(data), sums([[x for band in data for x in band]])
    assert (a.count, a.nan, a.inf, a.zeros, a.low, a.high) == (b.count, b.nan, b.inf, b.zeros, b.low, b.high)
    size = max(abs(a.low or 0), abs(a.high or 0))
    for name in ("rms", "l2", "average", "std"):
        x, y = getattr(a, name), getattr(b, name)
        assert x == y or x == pytest.approx(y, rel=1e-9, abs=1e-13 * size)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 40_000, 1_100_000])
def test_every_element_is_counted_once_whatever_the_size(tmp_path, monkeypatch, size):
    monkeypatch.setattr(passes, "PIECE", 1 << 18)
    values = torch.arange(1, size + 1, dtype=torch.int64)
    found = tensor_stats(stored(tmp_path / "t", values), histogram=True)
    assert (found.elements, found.min, found.max, found.mean) == (size, 1, size, pytest.approx((size + 1) / 2))
    assert sum(found.histogram) == size


@pytest.mark.parametrize("view", ["transposed", "every third", "expanded", "one column"])
def test_strided_shards_are_read_by_element(tmp_path, view):
    base = torch.from_numpy(RNG.standard_normal((300, 210)))
    seen = {
        "transposed": base.T,
        "every third": base[::3, 1::3],
        "expanded": base[:, :1].expand(300, 1000),
        "one column": base[:, 7],
    }[view]
    (tmp_path / "t").write_bytes(base.numpy().tobytes())
    source = Source(tmp_path / "t", 8 * seen.storage_offset(), "float64", tuple(seen.shape), seen.stride(), "r",
                    (0, 8 * base.numel()))  # fmt: skip
    found = tensor_stats(Tensor(tuple(seen.shape), "float64", (Shard(Box.whole(seen.shape), 0, source),)))
    for name, value in known(seen.reshape(-1).numpy()).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-10, abs=1e-12), name
    assert found.elements == seen.numel()


def test_an_expanded_number_is_read_once_and_a_record_never_more_often_than_it_is_long(tmp_path):
    (tmp_path / "t").write_bytes(np.array([2.0]).tobytes())
    huge, one = (1 << 50,), (1 << 14, 1 << 14)

    def shown(shape, strides, span):
        source = Source(tmp_path / "t", 0, "float64", shape, strides, "r", (0, span))
        return tensor_stats(Tensor(shape, "float64", (Shard(Box.whole(shape), 0, source),)))

    found = shown(huge, (0,), 8)
    assert (found.elements, found.mean, found.rms) == (1 << 50, 2.0, 2.0)
    assert "more than" in shown((1 << 62, 1 << 62), (0, 0), 8).problem
    assert shown(one, (1, 1), 1 << 20).problem == f"t: its strides show the {1 << 20} bytes of a record more than once"


def test_a_histogram_is_that_of_numpy(tmp_path):
    values = torch.from_numpy(RNG.standard_normal(100_000))
    values[5], values[6] = math.nan, math.inf
    found = tensor_stats(stored(tmp_path / "t", values, 3), histogram=True)
    finite = values[values.isfinite()].numpy()
    assert found.histogram == tuple(np.histogram(finite, 32)[0])


@pytest.mark.parametrize("scale", [1e308, 1e-320, 1.0])
def test_histograms_of_the_largest_and_smallest_numbers_count_every_element(tmp_path, scale):
    values = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0], dtype=torch.float64) * scale
    found = tensor_stats(stored(tmp_path / "t", values), histogram=True).histogram
    assert [n for n, count in enumerate(found) if count] == [0, 8, 16, 24, 31]
    assert set(found) == {0, 1}


@pytest.mark.parametrize("value", [0.1, 0.0])
def test_a_histogram_of_equal_elements_is_one_bin(tmp_path, value):
    found = tensor_stats(stored(tmp_path / "t", torch.full((9,), value)), histogram=True)
    assert sum(found.histogram) == max(found.histogram) == 9


def test_a_histogram_of_equal_elements_leaves_out_what_is_no_number(tmp_path):
    values = torch.tensor([2.0, math.nan, 2.0, math.inf, -math.inf])
    assert sum(tensor_stats(stored(tmp_path / "t", values), histogram=True).histogram) == 2


def test_where_the_model_has_no_such_tensor_the_sections_that_do_are_named(tmp_path):
    tree = {"model": {"w": torch.ones(2)}, "extra": {"zeta": torch.ones(3), "n": 1}}
    tree["optimizer"] = {"state": {"w": {"exp_avg": torch.ones(2), "zeta": torch.ones(2)}}, "param_groups": []}
    torch.save(tree, tmp_path / "a.pt")
    ck = ckptools.open(tmp_path / "a.pt")
    assert elsewhere(ck, Selection(("*zeta",), (), "")) == "2 tensors elsewhere: --section other or optimizer"
    assert elsewhere(ck, Selection(("*exp_avg",), (), "")) == "1 tensor elsewhere: --section optimizer"
    assert elsewhere(ck, Selection(("*none",), (), "")) == elsewhere(ck, Selection(("extra.n",), (), "")) == ""
