"""Elements of tensors as numbers that numpy computes with: every dtype as float64, bf16 and fp8 decoded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckptools.dtypes import ITEMSIZE, NO_NUMBERS
from ckptools.tensor_io.read import Raw, decoded

RUN = 2048
"""Elements whose squares are summed at once: too few for the BLAS to start threads of its own."""

VIEWS = {"bool": "u1", "complex128": "<f8", "complex64": "<f4", "complex32": "<f2"}
"""What flags and complex numbers, which become their two parts, are computed with as."""

UNBIASED = np.float32(2.0**112)
"""What the exponents of float32 and of float16 differ by: their biases are 127 and 15."""

SMALLEST = np.array([2.0**-136], np.float32)
"""The smallest float16 with the bias of float32."""


def is_number(dtype: str) -> bool:
    """Whether elements of a dtype are numbers each for itself: not packed in halves of a byte, and not quantized."""
    return dtype in ITEMSIZE and dtype not in NO_NUMBERS


def parts_of(dtype: str) -> int:
    """Numbers in an element: two of a complex one."""
    return 2 if dtype.startswith("complex") else 1


def as_numbers(raw: Raw, dtype: str) -> Raw:
    """Raw elements as numbers, flat: as numpy computes with the dtype, else as float32: fp16, bf16 and fp8 exactly."""
    flat = raw.reshape(-1)
    if dtype == "float16":
        return halves(flat)
    return flat.view(VIEWS[dtype]) if dtype in VIEWS else decoded(flat, dtype)


def halves(raw: Raw) -> npt.NDArray[np.float32]:
    """float16 as float32, bit for bit as numpy converts it, in a quarter of its time, and a tenth where many are small.

    Sign, exponent and fraction are moved to where float32 has them, and the exponent's bias is multiplied in. That is
    no way for infinities and NaN, nor where the processor was told to take the smallest float32 for zeros.
    """
    if np.bitwise_and(raw, 0x7FFF).max(initial=0) >= 0x7C00 or not (SMALLEST * UNBIASED).all():
        return raw.view("<f2").astype("<f4")
    bits = np.left_shift(raw, 16, dtype="<u4").view("<i4")
    bits >>= 3
    bits &= np.int32(-0x70002000)
    found: npt.NDArray[np.float32] = bits.view("<f4")
    found *= UNBIASED
    return found


def sum_of_squares(values: npt.NDArray[np.float64]) -> float:
    """The sum of the squares of contiguous float64, by runs whose sums are added pairwise."""
    whole = len(values) // RUN * RUN
    rows, rest = values[:whole].reshape(-1, 1, RUN), values[whole:]
    return float(np.matmul(rows, rows.transpose(0, 2, 1)).sum() + rest.dot(rest))
