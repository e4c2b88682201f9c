"""Torch's dtypes by name: sizes, other spellings, bits of NaN and infinity. Does not import torch.

Sources: torch/storage.py (`_new_dtypes`, `_dtype_to_storage_type_map`) for the legacy storage classes;
the safetensors format description for its spellings.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class _Dtype(NamedTuple):
    itemsize: int
    storage: str = ""
    safetensors: str = ""
    short: str = ""


_DTYPES = {
    "float64": _Dtype(8, "DoubleStorage", "F64", "fp64"),
    "float32": _Dtype(4, "FloatStorage", "F32", "fp32"),
    "float16": _Dtype(2, "HalfStorage", "F16", "fp16"),
    "bfloat16": _Dtype(2, "BFloat16Storage", "BF16", "bf16"),
    "float8_e4m3fn": _Dtype(1, safetensors="F8_E4M3", short="fp8e4m3"),
    "float8_e5m2": _Dtype(1, safetensors="F8_E5M2", short="fp8e5m2"),
    "float8_e4m3fnuz": _Dtype(1, safetensors="F8_E4M3FNUZ"),
    "float8_e5m2fnuz": _Dtype(1, safetensors="F8_E5M2FNUZ"),
    "float8_e8m0fnu": _Dtype(1, safetensors="F8_E8M0"),
    "float4_e2m1fn_x2": _Dtype(1),
    "complex128": _Dtype(16, "ComplexDoubleStorage"),
    "complex64": _Dtype(8, "ComplexFloatStorage", "C64"),
    "complex32": _Dtype(4),
    "int64": _Dtype(8, "LongStorage", "I64"),
    "int32": _Dtype(4, "IntStorage", "I32"),
    "int16": _Dtype(2, "ShortStorage", "I16"),
    "int8": _Dtype(1, "CharStorage", "I8"),
    "uint64": _Dtype(8, safetensors="U64"),
    "uint32": _Dtype(4, safetensors="U32"),
    "uint16": _Dtype(2, safetensors="U16"),
    "uint8": _Dtype(1, "ByteStorage", "U8"),
    "bool": _Dtype(1, "BoolStorage", "BOOL"),
    "qint8": _Dtype(1, "QInt8Storage"),
    "quint8": _Dtype(1, "QUInt8Storage"),
    "qint32": _Dtype(4, "QInt32Storage"),
    "quint4x2": _Dtype(1, "QUInt4x2Storage"),
    "quint2x4": _Dtype(1, "QUInt2x4Storage"),
}

ITEMSIZE = {name: dtype.itemsize for name, dtype in _DTYPES.items()}
"""Bytes per element, by torch's dtype name."""

QUANTIZED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})

NO_NUMBERS = QUANTIZED | {"float4_e2m1fn_x2"}
"""Dtypes whose bytes alone are not numbers: several elements share a byte, or a scale is stored elsewhere."""

LEGACY_STORAGE = {name: dtype.storage for name, dtype in _DTYPES.items() if dtype.storage}
"""The storage class that torch.save writes for a dtype. A dtype without one is saved untyped (`_rebuild_tensor_v3`)."""

STORAGE_CLASS = {storage: name for name, storage in LEGACY_STORAGE.items()} | {"UntypedStorage": "uint8"}
"""The dtype of each storage class in a persistent id; an untyped storage counts bytes."""

SAFETENSORS = {name: dtype.safetensors for name, dtype in _DTYPES.items() if dtype.safetensors}
"""The name in a safetensors header; a dtype without one cannot be stored there."""

SHORT = {name: dtype.short for name, dtype in _DTYPES.items() if dtype.short}
"""Short names for tables; a dtype without one keeps its own name."""


def is_floating(dtype: str) -> bool:
    """Whether `--dtype` applies: real floating point, not integer, bool, complex or quantized."""
    return dtype.startswith(("float", "bfloat"))


def short(dtype: str) -> str:
    """Return the short name of `dtype` for tables: `fp32`, `bf16`, `int64`."""
    return SHORT.get(dtype, dtype)


NAN_BITS = {
    "float64": 0x7FF8_0000_0000_0000, "float32": 0x7FC0_0000, "float16": 0x7E00, "bfloat16": 0x7FC0,
    "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F, "float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80,
    "float8_e8m0fnu": 0xFF,
}  # fmt: skip
"""The bits of a quiet NaN, by torch's dtype name."""


def can_be_nan(dtype: str) -> bool:
    """Whether ckptools can write a NaN of a dtype."""
    return dtype in NAN_BITS


# -- NaN and infinity, by the bits of the elements: fast enough to check while bytes stream by -------------------------


EXPONENTS = {
    "float64": 0x7FF0_0000_0000_0000, "float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7F, "complex32": 0x7C00, "complex64": 0x7F80_0000,
    "complex128": 0x7FF0_0000_0000_0000,
}  # fmt: skip
"""The exponent bits, which are all set in NaN and infinity only."""

NAN_CODES = {"float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80, "float8_e8m0fnu": 0xFF}
"""8-bit formats that have one NaN and no infinity."""

WIDTHS = {"float64": 8, "complex128": 8, "float32": 4, "complex64": 4, "complex32": 2, "float16": 2, "bfloat16": 2}


def scannable(dtype: str) -> bool:
    """Whether elements of a dtype can be NaN or infinite, with bits that `nonfinite_mask` recognises."""
    return dtype in EXPONENTS or dtype in NAN_CODES


def nonfinite_mask(data: Any, dtype: str) -> Any:
    """Mark the elements of raw bytes that are NaN or infinite: a flat boolean array; complex numbers count as two."""
    import numpy as np

    raw = np.frombuffer(data, f"<u{WIDTHS.get(dtype, 1)}")
    if dtype in NAN_CODES:
        return raw == NAN_CODES[dtype]
    mask = raw.dtype.type(EXPONENTS[dtype])
    return (raw & mask) == mask


def has_nonfinite(data: Any, dtype: str) -> bool:
    """Whether an element of raw bytes is NaN or infinite; bytes behind the last whole element are ignored.

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
