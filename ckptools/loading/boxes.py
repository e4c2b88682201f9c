"""Read a box of a saved tensor into a tensor of the running job: straight into its memory, or in bands."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from operator import le

import torch
from torch import Tensor

from ckptools.dtypes import ITEMSIZE, NAN_BITS
from ckptools.files.opening import OpenFiles
from ckptools.model.extents import Extents
from ckptools.model.regions import Box
from ckptools.model.shards import Seen, Shard
from ckptools.model.tensor import Tensor as SavedTensor
from ckptools.tensor_io.dcp_items import with_source
from ckptools.tensor_io.numbers import Raw, raw_dtype
from ckptools.tensor_io.read import fill
from ckptools.tensor_io.slicing import bands_of

BAND = 16 << 20
"""Bytes that are read at once for a tensor of another device or dtype."""

VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their width: numpy lacks many dtypes of torch."""


def read_into(target: Tensor, saved: SavedTensor, box: Box, files: OpenFiles, seen: Seen | None) -> None:
    """Read a box of a saved tensor into a tensor of the same sizes, converted to its dtype, on any device.

    Args:
        target: of the box's sizes; it may be a view with any strides.
        saved: has one shard per region.
        box: in elements of the whole tensor.
        files: keeps sources open.
        seen: called with all bytes that are read on the way.

    Raises:
        ReadError: a file cannot be read.
    """
    shards = [with_source(shard) for shard in shards_in(saved.shards, box)]
    width = ITEMSIZE[saved.dtype]
    if target.device.type == "cpu" and target.dtype is getattr(torch, saved.dtype) and width in VIEWS:
        _read(target.view(VIEWS[width]).numpy().view(raw_dtype(saved.dtype)), saved, box, shards, files, seen)
        return
    pinned = target.device.type == "cuda"
    for band in bands_of(box, max(1, BAND // width)):
        staged = torch.empty(band.numel * width, dtype=torch.uint8, pin_memory=pinned)
        raw = staged.numpy().view(raw_dtype(saved.dtype)).reshape(band.sizes)
        _read(raw, saved, band, shards, files, seen)
        place = tuple(slice(o - p, o - p + n) for o, p, n in zip(band.offsets, box.offsets, band.sizes, strict=True))
        target[place].copy_(staged.view(getattr(torch, saved.dtype)).reshape(band.sizes))


def _read(out: Raw, saved: SavedTensor, box: Box, shards: Sequence[Shard], files: OpenFiles, seen: Seen | None) -> None:
    if saved.fill:
        out.fill(NAN_BITS[saved.dtype] if saved.fill == "nan" else 0)
    fill(out, box, shards, files, seen)


def shards_in(shards: Sequence[Shard], box: Box) -> list[Shard]:
    """The shards that have elements of a box; of a million, few are looked at, because they are sorted by offset."""
    if not box.sizes:
        return list(shards)
    if not isinstance(shards, Extents):
        return [shard for shard in shards if shard.box.intersect(box)]
    offsets, first, end = shards.offsets, 0, len(shards)
    if end and all(map(le, offsets, islice(offsets, 1, None))):
        longest = max(shards.sizes)[0]
        first = bisect_left(offsets, (box.offsets[0] - longest + 1,))
        end = bisect_left(offsets, (box.ends[0],))
    return [shards[n] for n in range(first, end) if Box(offsets[n], shards.sizes[n]).intersect(box)]
