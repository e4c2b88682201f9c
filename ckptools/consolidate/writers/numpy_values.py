"""numpy's values without numpy: arrays as tensors, scalars as Python's own.

A file tells a dtype in a few letters. Only letters that mean numbers and text are given to numpy; what else there is
(times, records, extended precision) has no counterpart in torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptools.model.values import NumpyArray, NumpyScalar

TORCH_DTYPE = {
    "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128",
    "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64",
    "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64", "b1": "bool", "?": "bool",
}  # fmt: skip
"""torch's name for numpy's letters and bytes."""

TEXT = re.compile(r"[US]\d{1,9}")


@dataclass(frozen=True, eq=False, slots=True)
class HeldTensor:
    """A tensor whose bytes are here and in no file.

    Attributes:
        dtype: torch's name.
        shape: sizes per dimension.
        data: the bytes, row-major, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def torch_value(array: NumpyArray) -> HeldTensor | list[Any] | None:
    """An array as a tensor, or one of text as a nested list; None when it is neither."""
    letters = array.dtype.lstrip("<>|=")
    if letters in TORCH_DTYPE:
        return HeldTensor(TORCH_DTYPE[letters], array.shape, _little_endian(array))
    if TEXT.fullmatch(letters) and int(letters[1:]):
        return _nested_text(array, letters)
    return None


def python_value(scalar: NumpyScalar) -> Any:
    """A scalar as Python's own number or text; None when there is none."""
    array = NumpyArray(scalar.dtype, (1,), False, scalar.data)
    if scalar.dtype.lstrip("<>|=") in TORCH_DTYPE:
        try:
            return _made(array).tolist()[0]
        except ValueError:
            return None  # not as many bytes as the dtype has
    listed = torch_value(array)
    return listed[0] if isinstance(listed, list) else None


def _little_endian(array: NumpyArray) -> bytes:
    """The bytes of an array of numbers, row-major."""
    if not array.fortran_order and not array.dtype.startswith(">"):
        return array.data
    made = _made(array)
    return bytes(made.astype(made.dtype.newbyteorder("<")).tobytes("C"))


def _made(array: NumpyArray) -> Any:
    """An array of numbers as numpy has it, whose plain byte order is `|`; `<|` and the like come from no numpy."""
    import numpy as np

    letters = array.dtype.lstrip("<>|=")
    order = "" if letters == "?" else ">" if array.dtype.startswith(">") else "<"
    flat = np.frombuffer(array.data, order + letters) if array.data else np.empty(0, order + letters)
    return flat.reshape(array.shape, order="F" if array.fortran_order else "C")


def _nested_text(array: NumpyArray, letters: str) -> list[Any] | None:
    """An array of text, decoded here: numpy itself fails badly on what is no text. None for that."""
    import numpy as np

    wide, width = letters[0] == "U", int(letters[1:]) * (4 if letters[0] == "U" else 1)
    pieces: list[Any] = [array.data[at : at + width] for at in range(0, len(array.data), width)]
    codec = "utf-32-be" if array.dtype.startswith(">") else "utf-32-le"
    try:
        words = [p.decode(codec, "surrogatepass").rstrip("\0") if wide else p.rstrip(b"\0") for p in pieces]
        nested = np.array([*words, None], object)[:-1].reshape(array.shape, order="F" if array.fortran_order else "C")
    except (UnicodeDecodeError, ValueError):
        return None
    found = nested.tolist()
    return found if isinstance(found, list) else [found]
