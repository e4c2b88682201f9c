"""NaN and infinity are found by their bits, in every dtype that has them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptools.dtypes import EXPONENTS, NAN_CODES, has_nonfinite, scannable
from tests.versions import torch_with

WIDE = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
EIGHT = tuple(d for d in (*EXPONENTS, *NAN_CODES) if d.startswith("float8"))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", WIDE)
@given(place=st.integers(0, 99), odd=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_one_odd_element_among_many_is_found(dtype, place, odd):
    tensor = torch.linspace(-100, 100, 100).to(getattr(torch, dtype))
    assert not has_nonfinite(raw(tensor), dtype)
    tensor[place] = odd
    assert has_nonfinite(raw(tensor), dtype)


@pytest.mark.parametrize("dtype", WIDE)
def test_the_largest_and_the_smallest_numbers_are_finite(dtype):
    of = torch.finfo(getattr(torch, dtype))
    assert not has_nonfinite(raw(torch.tensor([of.max, of.min, of.tiny, 0.0], dtype=getattr(torch, dtype))), dtype)


@pytest.mark.parametrize("dtype", EIGHT)
def test_every_code_of_eight_bits_is_judged_as_torch_does(dtype):
    torch_with(dtype)
    values = torch.arange(256).to(torch.uint8).view(getattr(torch, dtype)).float()
    for code in range(256):
        assert has_nonfinite(bytes([code]), dtype) == (not torch.isfinite(values[code]))


def test_integers_and_a_part_of_an_element_are_never_odd():
    assert not scannable("int64") and not has_nonfinite(b"\xff" * 16, "int64")
    assert not has_nonfinite(b"\xff" * 3, "float32") and not has_nonfinite(b"", "float32")
