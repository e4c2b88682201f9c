"""Elements of tensors as numbers that numpy computes with: every dtype as float64, bf16 and fp8 decoded."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy.typing as npt

from ckptools.tensor_io.read import fp8_table

Raw = npt.NDArray[Any]

VIEWS = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1",
    "uint64": "<u8", "uint32": "<u4", "uint16": "<u2", "uint8": "u1", "bool": "u1",
    "complex128": "<f8", "complex64": "<f4", "complex32": "<f2",
}  # fmt: skip
"""How numpy sees the elements; of complex numbers their two parts."""

table = lru_cache(maxsize=8)(fp8_table)


def is_number(dtype: str) -> bool:
    """Whether elements of a dtype are numbers each for itself: not packed in halves of a byte, and not quantized."""
    return dtype in VIEWS or dtype == "bfloat16" or dtype.startswith("float8")


def parts_of(dtype: str) -> int:
    """Numbers in an element: two of a complex one."""
    return 2 if dtype.startswith("complex") else 1


def as_numbers(raw: Raw, dtype: str) -> Raw:
    """Raw elements as numbers, flat: as numpy has the dtype, else as float32, which holds bf16 and fp8 exactly."""
    flat = raw.reshape(-1)
    if dtype == "bfloat16":
        return (flat.astype("<u4") << 16).view("<f4")
    if dtype.startswith("float8"):
        return table(dtype)[flat]
    return flat.view(VIEWS[dtype])
