"""NaN and infinity, by the bits of the elements: fast enough to look while bytes pass by."""

from __future__ import annotations

from typing import Any

EXPONENTS = {
    "float64": 0x7FF0_0000_0000_0000, "float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7F, "complex64": 0x7F80_0000, "complex128": 0x7FF0_0000_0000_0000,
}  # fmt: skip
"""Bits that are all set in NaN and infinity, and in nothing else."""

NAN_CODES = {"float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80, "float8_e8m0fnu": 0xFF}
"""8-bit formats that have one NaN and no infinity."""

WIDTHS = {"float64": 8, "complex128": 8, "float32": 4, "complex64": 4, "float16": 2, "bfloat16": 2}


def scannable(dtype: str) -> bool:
    """Whether elements of a dtype may be NaN or infinite, and we know the bits of such."""
    return dtype in EXPONENTS or dtype in NAN_CODES


def nonfinite_mask(data: Any, dtype: str) -> Any:
    """Which elements of raw bytes are NaN or infinite, as a flat boolean array; complex numbers count as two."""
    import numpy as np

    raw = np.frombuffer(data, f"<u{WIDTHS.get(dtype, 1)}")
    if dtype in NAN_CODES:
        return raw == NAN_CODES[dtype]
    mask = raw.dtype.type(EXPONENTS[dtype])
    return (raw & mask) == mask


def has_nonfinite(data: Any, dtype: str) -> bool:
    """Whether an element of raw bytes is NaN or infinite; bytes behind the last whole element are not looked at.

    Takes less time than the CRC-32 of the bytes.
    """
    import numpy as np

    width = WIDTHS.get(dtype, 1)
    whole = memoryview(data)[: len(data) // width * width]
    if not scannable(dtype) or not whole:
        return False
    if width >= 4:
        return not np.isfinite(np.frombuffer(whole, f"<f{width}")).all()
    if dtype in NAN_CODES:
        return bool(nonfinite_mask(whole, dtype).any())
    raw = np.frombuffer(whole, f"<u{width}")
    mask = raw.dtype.type(EXPONENTS[dtype])
    return bool((raw & mask).max() == mask)
