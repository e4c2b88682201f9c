"""Elements of a slice of a tensor; only the bytes of the slice are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from ckptools.dtypes import short
from ckptools.errors import NotWholeError, UsageError
from ckptools.model.cover import cover
from ckptools.model.regions import Box
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.dcp_items import with_source
from ckptools.tensor_io.slicing import slicing_of
from ckptools.text import few

if TYPE_CHECKING:
    from types import EllipsisType

MAX_ELEMENTS = 10_000
"""At most this many elements are shown."""

UNDECODED = ("complex32", "float4_e2m1fn_x2")

INDEX = re.compile(r"\s*(-?\d{1,18})?\s*(?:(:)\s*(-?\d{1,18})?\s*)?")


def index_of(text: str) -> tuple[int | slice | EllipsisType, ...]:
    """Parse an index such as `0:4,:8`: ints and slices with step 1, `-1` for the last, `...` for all dimensions left.

    Raises:
        UsageError: the text is no index.
    """
    found: list[int | slice | EllipsisType] = []
    for part in text.strip().strip("[]").split(","):
        if part.strip() == "...":
            found.append(...)
            continue
        spelled = INDEX.fullmatch(part)
        if spelled is None or not (spelled[1] or spelled[2]):
            raise UsageError(None, f"--values {text!r}: {part.strip()!r} is no index; write slices such as '0:4,:8'")
        start, stop = (None if word is None else int(word) for word in (spelled[1], spelled[3]))
        found.append(slice(start, stop) if spelled[2] else int(spelled[1]))
    return tuple(found)


def elements(tensor: Tensor, text: str) -> Any:
    """Read the elements of a slice as nested lists of numbers and flags; complex numbers as text.

    Raises:
        NotWholeError: some elements are in no file here.
        ReadError: a file cannot be read, or the tensor cannot be put together.
        UsageError: it is no slice of this tensor, has too many elements, or the dtype cannot be decoded.
    """
    import numpy as np

    from ckptools.tensor_io.numbers import decoded, raw_dtype
    from ckptools.tensor_io.read import read_box

    if tensor.dtype in UNDECODED:
        raise UsageError(None, f"{short(tensor.dtype)} is not decoded; load it with torch")
    try:
        cut = slicing_of(tensor.shape, index_of(text))
    except IndexError as error:
        raise UsageError(None, f"--values {text!r}: {error}") from error
    box = cut.box
    if box.numel > MAX_ELEMENTS:
        raise UsageError(None, f"--values {text!r}: {box.numel} elements; at most {MAX_ELEMENTS} are shown")
    out = np.empty(box.sizes, raw_dtype(tensor.dtype))
    placed = replace(tensor, shards=tuple(_meeting(tensor, box)))
    _check_all_is_here(placed, box, text)
    for row in _rows(box):
        place = zip(row.seen_from(box).offsets, row.sizes, strict=True)
        out[tuple(slice(o, o + n) for o, n in place)] = read_box(placed, row)
    values = decoded(out, tensor.dtype).reshape(cut.kept)
    return (values.astype(str) if values.dtype.kind == "c" else values).tolist()


def _meeting(tensor: Tensor, box: Box) -> Iterator[Shard]:
    """The shards that overlap a region, each place once, with their sources."""
    known: dict[Box, Shard] = {}
    for shard in tensor.shards:
        if shard.is_here and (not box.sizes or shard.box.intersect(box)):
            known.setdefault(shard.box, shard)
    yield from map(with_source, known.values())


def _check_all_is_here(tensor: Tensor, box: Box, text: str) -> None:
    if tensor.note or not box.sizes:
        return
    parts = (shard.box.intersect(box) for shard in tensor.shards)
    found = cover(box.sizes, [common.seen_from(box) for common in parts if common is not None])
    if found.missing:
        gaps = [Box(tuple(a + b for a, b in zip(g.offsets, box.offsets, strict=True)), g.sizes) for g in found.gaps]
        where = few(list(map(str, gaps)), 3)
        reason = f"no file here holds {found.missing} of the {box.numel} elements of [{text}]: {where}"
        raise NotWholeError("tensor", reason)


def _rows(box: Box) -> Iterator[Box]:
    """Split a region into rows, so that bytes between two rows in the file are not read."""
    if not box.numel:
        return
    *outer, last = zip(box.offsets, box.sizes, strict=True) if box.sizes else [(0, 1)]
    for at in product(*(range(start, start + size) for start, size in outer)):
        yield Box((*at, last[0]), (*(1 for _ in at), last[1])) if box.sizes else box
