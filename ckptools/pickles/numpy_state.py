"""The pickled state of numpy's arrays and dtypes, taken without numpy.

Source: numpy/_core/src/multiarray (`array_setstate`, `arraydescr_setstate`).
"""

from __future__ import annotations

from math import prod
from typing import Any

from ckptools.model.values import NumpyArray, NumpyDtype, describe_for_error
from ckptools.pickles.limits import MAX_NDIM


def build_dtype(target: NumpyDtype, state: Any) -> None:
    """Give a dtype its state: version, byte order, subarray, names, fields, size, alignment, flags, and a time's unit.

    Raises:
        ValueError: the state is none that numpy writes.
    """
    _, order, subarray, names, fields, *_, last = (*state, None) if len(state) == 8 else state
    if not isinstance(order, str) or order not in ("<", ">", "|", "="):
        raise ValueError(f"a numpy dtype of byte order {describe_for_error(order)}")
    plain = target.dtype.lstrip("<>|=")
    if subarray is not None or names is not None or fields is not None:
        plain, order = "O", "|"  # a record: nothing that a number or a text says
    elif plain in ("M8", "m8"):
        plain += _time_unit(last)
    target.dtype = order.replace("=", "<") + plain


def _time_unit(metadata: Any) -> str:
    """The unit of a numpy time as its dtype spells it: `[s]`, `[25us]`; nothing for a time without one."""
    inner = metadata[1] if isinstance(metadata, tuple) and len(metadata) == 2 else None
    unit, count = inner[:2] if isinstance(inner, tuple) and len(inner) >= 2 else (None, None)
    if not isinstance(unit, bytes) or not unit.isalpha() or len(unit) > 7 or type(count) is not int:
        raise ValueError("a numpy time of unknown unit")
    return "" if unit == b"generic" else f"[{'' if count == 1 else describe_for_error(count)}{unit.decode()}]"


def build_array(target: NumpyArray, state: Any) -> None:
    """Give an array its state: version, shape, dtype, whether in Fortran's order, bytes or a list of objects.

    Raises:
        ValueError: the state is none that numpy writes, or its bytes are not as many as it says.
    """
    _, shape, dtype, fortran, data = state
    target.shape, target.fortran_order = array_shape(shape), fortran is True
    if isinstance(data, bytes) and isinstance(dtype, NumpyDtype):
        target.dtype, target.data = dtype.dtype, array_data(target.shape, dtype.dtype, data)
    else:  # an array of Python objects
        target.dtype, target.data = "|O", b""


def array_shape(shape: Any) -> tuple[int, ...]:
    """The shape of an array, as the file has it.

    Raises:
        ValueError: it is no tuple of sizes.
    """
    ok = isinstance(shape, tuple) and len(shape) <= MAX_NDIM and all(type(n) is int and 0 <= n < 1 << 63 for n in shape)
    if not ok:
        raise ValueError(f"a numpy array of shape {describe_for_error(shape)}")
    return tuple(shape)


def array_data(shape: tuple[int, ...], dtype: str, data: bytes) -> bytes:
    """`data`, if the array has that many bytes; a dtype with fields or units tells no size.

    Raises:
        ValueError: it has another number of them.
    """
    kind, width = dtype[1:2], dtype[2:]
    if dtype[1:] == "O":
        return b""
    if kind in "mM":
        width = "8"
    if kind in "biufcmMSUV" and width.isdecimal() and len(data) != prod(shape) * int(width) * (4 if kind == "U" else 1):
        raise ValueError(
            f"a numpy array of shape {describe_for_error(shape)} and dtype "
            f"{describe_for_error(dtype)} with {len(data)} bytes"
        )
    return data
