"""Types of elements that torch saves, by name: sizes, spellings elsewhere, bits of NaN and infinity. No torch.

Sources: torch/storage.py (`_new_dtypes`, `_dtype_to_storage_type_map`) for the legacy storage classes;
the safetensors format description for its spellings.
"""

from __future__ import annotations

from typing import Any

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
    "quint4x2": 1,
    "quint2x4": 1,
}
"""Bytes per element, by torch's dtype name."""

QUANTIZED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})

NO_NUMBERS = QUANTIZED | {"float4_e2m1fn_x2"}
"""Dtypes whose bytes alone are no numbers: several to a byte, or with a scale elsewhere."""

STORAGE_CLASS: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
"""dtype of each storage class that a persistent id may name; an untyped storage counts bytes."""

LEGACY_STORAGE: dict[str, str] = {dtype: name for name, dtype in STORAGE_CLASS.items() if name != "UntypedStorage"}
"""Storage class that torch.save names for a dtype. A dtype that is absent is saved untyped (`_rebuild_tensor_v3`)."""

SAFETENSORS: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Spelling in a safetensors header; a dtype that is absent cannot be stored there."""

SHORT: dict[str, str] = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4m3",
    "float8_e5m2": "fp8e5m2",
}
"""What people say; used in tables. A dtype that is absent keeps its own name."""


def is_floating(dtype: str) -> bool:
    """Whether `--dtype` applies: real floating point, so neither integers, bools, complex nor quantized."""
    return dtype.startswith(("float", "bfloat"))


def short(dtype: str) -> str:
    """Return the short name of `dtype` for tables: `fp32`, `bf16`, `int64`."""
    return SHORT.get(dtype, dtype)


NAN_BITS = {
    "float64": 0x7FF8_0000_0000_0000, "float32": 0x7FC0_0000, "float16": 0x7E00, "bfloat16": 0x7FC0,
    "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F, "float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80,
    "float8_e8m0fnu": 0xFF,
}  # fmt: skip
"""The bits of a quiet NaN, by torch's name of the dtype."""


def can_be_nan(dtype: str) -> bool:
    """Whether a dtype has a NaN that ckptools can write."""
    return dtype in NAN_BITS


# -- NaN and infinity, by the bits of the elements: fast enough to look while bytes pass by ---------------------------


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
