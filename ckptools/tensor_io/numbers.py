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


def is_number(dtype: str) -> bool:
    """Whether elements of a dtype are numbers each for itself: not packed in halves of a byte, and not quantized."""
    return dtype in ITEMSIZE and dtype not in NO_NUMBERS


def parts_of(dtype: str) -> int:
    """Numbers in an element: two of a complex one."""
    return 2 if dtype.startswith("complex") else 1


def as_numbers(raw: Raw, dtype: str) -> Raw:
    """Raw elements as numbers, flat: as numpy has the dtype, else as float32, which holds bf16 and fp8 exactly."""
    flat = raw.reshape(-1)
    return flat.view(VIEWS[dtype]) if dtype in VIEWS else decoded(flat, dtype)


def sum_of_squares(values: npt.NDArray[np.float64]) -> float:
    """The sum of the squares of contiguous float64, by runs whose sums are added pairwise."""
    whole = len(values) // RUN * RUN
    rows, rest = values[:whole].reshape(-1, 1, RUN), values[whole:]
    return float(np.matmul(rows, rows.transpose(0, 2, 1)).sum() + rest.dot(rest))
