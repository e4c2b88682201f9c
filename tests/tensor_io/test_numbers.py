"""Elements as numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptools.tensor_io.numbers import RUN, digits, halves, sum_of_squares


@given(st.integers(0, 3 * RUN + 1), st.integers(0, 2**32))
def test_the_sum_of_squares_is_that_of_every_element(length, seed):
    values = np.random.default_rng(seed).standard_normal(length)
    assert sum_of_squares(values) == pytest.approx(math.fsum(v * v for v in values.tolist()), rel=1e-13)


def test_every_float16_becomes_the_float32_that_numpy_makes_of_it():
    codes = np.arange(1 << 16, dtype=np.uint16)
    finite = codes[codes & 0x7FFF < 0x7C00]
    for raw in (codes, codes[: 0x7C00 + 1], finite, finite[:0]):
        assert halves(raw).tobytes() == raw.view(np.float16).astype(np.float32).tobytes()


def test_small_float16_are_not_lost_where_the_processor_takes_small_float32_for_zeros():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot be told to")
    try:
        found = halves(np.array([1, 0x8003], np.uint16))
    finally:
        torch.set_flush_denormal(False)
    assert found.tolist() == [2**-24, -3 * 2**-24]


@pytest.mark.parametrize("top", [0x0000, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0x7C01, 0xFBFF, 0xFC00, 0x8000])
def test_halves_are_numpys_up_to_the_largest_and_beyond(top):
    raw = np.array([0x3C00, top, 0x8001], "<u2")
    expected, found = raw.view("<f2").astype("<f4"), halves(raw.copy())
    assert found.dtype == np.float32 and found.tobytes() == expected.tobytes()


def test_an_element_is_written_with_the_digits_of_its_dtype():
    for dtype, element, text in [
        ("float16", np.float16(0.1), "0.1"),
        ("float32", np.float32(0.1), "0.1"),
        ("float64", np.float64(0.1), "0.1"),
        ("int8", np.int8(-3), "-3"),
        ("bool", np.bool_(True), "True"),
        ("complex64", np.complex64(1 - 2j), "(1-2j)"),
    ]:
        assert digits(element.tobytes(), dtype) == text
