"""The first place at which two long lists, or two arrays of numpy, are not the same."""

from __future__ import annotations

from math import prod
from struct import calcsize, unpack
from typing import Any

from ckptools.contents.leaves import LONG, is_plain
from ckptools.contents.value_digests import scalar_bytes, text_of
from ckptools.model.regions import Box, Ints
from ckptools.model.values import NUMPY_CODES, NumpyArray, scalar
from ckptools.text import clip, shape

MAX_WORDS = 40
"""Characters of an item."""


def first_unlike(a: Any, b: Any) -> str:
    """Where two values differ first, and what is there: `first at [3]: 7 / 5`.

    Nothing is said of a list that is short enough to be shown, nor where their items cannot be told apart here.
    """
    found = None
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and max(len(a), len(b)) > LONG:
        found = _in_lists(a, b, ())
        if found is None and len(a) != len(b):
            return f"the first {min(len(a), len(b))} are the same; A has {len(a)}, B {len(b)}"
    elif isinstance(a, NumpyArray) and isinstance(b, NumpyArray):
        found = _in_arrays(a, b)
    if found is None:
        return ""
    place, x, y = found
    return f"first at {shape(place)}: {clip(text_of(x), MAX_WORDS)} / {clip(text_of(y), MAX_WORDS)}"


def _in_lists(a: Any, b: Any, above: Ints) -> tuple[Ints, Any, Any] | None:
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)) and len(x) == len(y):
            found = _in_lists(x, y, (*above, n))
            if found is not None:
                return found
        elif is_plain(x) and is_plain(y) and scalar_bytes(scalar(x)) != scalar_bytes(scalar(y)):
            return (*above, n), x, y
    return None


def _in_arrays(a: NumpyArray, b: NumpyArray) -> tuple[Ints, Any, Any] | None:
    """In the order of the bytes, of arrays of one common dtype and shape."""
    code = NUMPY_CODES.get(a.dtype.lstrip("<>|="))
    alike = (a.dtype, a.shape, a.fortran_order, len(a.data)) == (b.dtype, b.shape, b.fortran_order, len(b.data))
    if code is None or not alike or a.fortran_order or len(a.data) != calcsize(code) * prod(a.shape):
        return None
    width, order = calcsize(code), ">" if a.dtype.startswith(">") else "<"
    pairs = ((n, a.data[n : n + width], b.data[n : n + width]) for n in range(0, len(a.data), width))
    place = next(((n, x, y) for n, x, y in pairs if x != y), None)
    if place is None:
        return None
    values = (unpack(order + code, data)[0] for data in place[1:])
    return Box.whole(a.shape).index_of(place[0] // width), next(values), next(values)
