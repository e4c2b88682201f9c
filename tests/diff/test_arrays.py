"""Arrays held against each other, element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ckptools.diff.arrays import Comparing
from ckptools.diff.record import Measures, Tolerance
from ckptools.model.regions import Box
from ckptools.tensor_io.elements import BAND
from ckptools.tensor_io.numbers import raw_dtype


def compared(a, b, dtypes=("float32", "float32"), tolerance=None, offsets=None):
    raw = [np.ascontiguousarray(x).view(raw_dtype(d)) for x, d in zip((a, b), dtypes, strict=True)]
    box = Box(offsets or (0,) * raw[0].ndim, raw[0].shape)
    comparing = Comparing(dtypes, box, tolerance)
    comparing.add(*(one.reshape(-1) for one in raw), 0)
    return comparing.found


def test_equal_elements_differ_in_nothing():
    found = compared(np.arange(5, dtype="f4"), np.arange(5, dtype="f4"))
    assert (found.compared, found.differing, found.max, found.first, found.aa) == (5, 0, 0.0, None, 30.0)


def test_measures_are_those_of_numpy_over_several_blocks():
    random = np.random.default_rng(1)
    a = random.standard_normal((3, BAND)).astype("f4")
    b = a.copy()
    b[1:] += random.standard_normal((2, BAND)).astype("f4") * np.float32(1e-3)
    found, x, y = compared(a, b), a.astype("f8"), b.astype("f8")
    assert found.differing == np.count_nonzero(a != b) and found.max == np.abs(x - y).max()
    assert found.change == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-12)
    assert found.cosine == pytest.approx((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12)


def test_the_first_index_is_that_of_the_tensor_and_both_values_have_every_digit():
    a, b = np.zeros((4, 3), "f4"), np.zeros((4, 3), "f4")
    b[2, 1], b[3, 0] = 0.1, 7
    found = compared(a, b, offsets=(10, 20))
    assert (found.first, found.values) == ((12, 21), ("0.0", "0.1"))


def test_the_first_of_several_parts_is_the_one_with_the_lowest_index():
    late, early = (
        Measures(differing=1, first=(5, 0), values=("1", "2")),
        Measures(differing=1, first=(4, 9), values=("3", "4")),
    )
    late.add(early)
    assert (late.first, late.values, late.differing) == ((4, 9), ("3", "4"), 2)


def test_nan_equals_nan_only_bit_for_bit():
    quiet, other = (
        np.array([0x7FC00000, 0x3F800000], "u4").view("f4"),
        np.array([0x7FC00001, 0x3F800000], "u4").view("f4"),
    )
    assert compared(quiet, quiet).differing == 0
    found = compared(quiet, other)
    assert (found.differing, found.nonfinite, found.max, found.outside) == (1, 1, 0.0, 1)


def test_what_is_not_finite_is_in_no_measure_and_outside_of_every_tolerance():
    found = compared(np.array([1, np.inf, 3], "f4"), np.array([1.5, 2, 3], "f4"), tolerance=Tolerance(0, 1e9))
    assert (found.differing, found.outside, found.nonfinite, found.max, found.aa) == (2, 1, 1, 0.5, 10.0)
    assert math.isfinite(found.change or 0)


@pytest.mark.parametrize("differ", [False, True])
def test_a_complex_number_that_is_not_finite_in_both_parts_is_one_element(differ):
    a = np.array([complex(np.nan, np.inf), 1, complex(np.inf, 2)], "c8")
    assert compared(a, a + np.array([0, differ, 0], "c8"), ("complex64",) * 2).nonfinite == 2


def test_zeros_of_two_signs_differ_in_bits_and_not_in_value():
    found = compared(np.array([0.0], "f4"), np.array([-0.0], "f4"))
    assert (found.differing, found.max, found.values) == (1, 0.0, ("0.0", "-0.0"))


def test_64_bit_integers_are_compared_as_integers():
    a = np.array([1 << 60, -(1 << 62)], "i8")
    found = compared(a, a + np.array([0, 1]), ("int64", "int64"), Tolerance(0.0, 0.5))
    assert (found.differing, found.max, found.first, found.outside) == (1, 1.0, (1,), 1)


@pytest.mark.parametrize(
    ("rtol", "atol", "outside"), [(0, 0, 2), (0, 0.1, 1), (0.01, 0, 2), (0.0149, 0, 1), (0.02, 0.1, 0)]
)
def test_a_tolerance_is_that_of_numpy(rtol, atol, outside):
    a, b = np.array([1.0, 100.0, 7.0]), np.array([1.0625, 101.5, 7.0])
    found = compared(a, b, ("float64", "float64"), Tolerance(rtol, atol))
    assert found.outside == outside == np.count_nonzero(~np.isclose(a, b, rtol, atol))


def test_tensors_of_two_dtypes_are_compared_by_value():
    values = np.array([1.0, 2.5, -3.0, np.nan], "f4")
    half = (values.view("u4") >> 16).astype("u2")
    found = compared(values, half, ("float32", "bfloat16"))
    assert (found.differing, found.first, found.nonfinite) == (1, (3,), 1)
    assert compared(np.array([1, 2], "i4"), np.array([1, 3], "f8"), ("int32", "float64")).max == 1.0


def test_fp8_and_bf16_are_decoded():
    found = compared(np.array([0x38, 0x40], "u1"), np.array([0x38, 0x44], "u1"), ("float8_e4m3fn",) * 2)
    assert (found.max, found.values) == (1.0, ("2.0", "3.0"))
    found = compared(np.array([0x3F80], "u2"), np.array([0x4000], "u2"), ("bfloat16",) * 2)
    assert (found.max, found.change) == (1.0, 1.0)


def test_a_float16_has_its_own_digits():
    found = compared(np.array([0.1, 1], "f2"), np.array([0.2, 1], "f2"), ("float16",) * 2)
    assert (found.values, found.max) == (("0.1", "0.2"), float(np.float16(0.2)) - float(np.float16(0.1)))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_elements_of_two_parts(dtype):
    a = np.array([1 + 2j, 3 + 4j], dtype)
    found = compared(a, a + np.array([0, 1j], dtype), (dtype, dtype))
    assert (found.differing, found.first, found.max, found.values) == (1, (1,), 1.0, ("(3+4j)", "(3+5j)"))


def test_what_is_no_number_is_compared_by_bits():
    found = compared(np.array([1, 2], "u1"), np.array([1, 3], "u1"), ("float4_e2m1fn_x2",) * 2)
    assert (found.differing, found.first, found.values) == (1, (1,), ("0x2", "0x3"))
