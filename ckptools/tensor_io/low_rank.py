"""The values of a weight with its LoRA adapter, W + scaling · B A, computed band by band from their files.

All is computed in float32, and rounded to W's dtype once. PEFT rounds B A to the adapter's dtype first where that is
half precision, and to W's for an embedding, so that its result may differ by one rounding there.

Source: peft 0.21.2, tuners/lora/layer.py (`get_delta_weight` of `Linear` and `Embedding`), dora.py (`get_weight_norm`),
variants.py (`DoraLinearVariant.merge_unsafe`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Encoded, LowRank, Shard
from ckptools.tensor_io.numbers import Raw, raw_dtype
from ckptools.tensor_io.slicing import bands_of

if TYPE_CHECKING:
    import torch

BAND = 1 << 20
"""Elements of W that a thread computes at once."""

Fill = Callable[[Raw, Box, Sequence[Shard]], None]
"""Copies the parts of shards in a box into an array of the box's shape."""


def add_adapter(out: Raw, piece: Encoded, how: LowRank, fill: Fill) -> None:
    """Compute the values of a box of a weight with its adapter into `out`, which has the box's shape."""
    import torch

    if how.magnitude and not how.lengths:
        how.lengths.append(_lengths(piece.shape, how, fill))
    for band in bands_of(Box.whole(piece.box.sizes), BAND):
        box = piece.part(band).box
        found = _sum(box, how, fill)
        if how.magnitude:
            first, count = (sizes[1 if how.transposed else 0] for sizes in (box.offsets, box.sizes))
            factor = _read(how.magnitude, Box((first,), (count,)), fill) / how.lengths[0][first : first + count]
            found *= factor.view(1, -1) if how.transposed else factor.view(-1, 1)
        rounded = found.to(getattr(torch, how.dtype)).contiguous().view(torch.uint8).numpy()
        place = tuple(slice(start, start + size) for start, size in zip(band.offsets, band.sizes, strict=True))
        out[place] = rounded.view(out.dtype).reshape(band.sizes)


def _sum(box: Box, how: LowRank, fill: Fill) -> torch.Tensor:
    """W + scaling · B A in a box of W."""
    (first, second), (rows, columns) = box.offsets, box.sizes
    if how.transposed:
        first, second, rows, columns = second, first, columns, rows
    a = _read(how.a, Box((0, second), (how.rank, columns)), fill)
    b = _read(how.b, Box((first, 0), (rows, how.rank)), fill)
    product = (b @ a) * how.scaling
    return _read(how.base, box, fill) + (product.T if how.transposed else product)


def _lengths(shape: Ints, how: LowRank, fill: Fill) -> torch.Tensor:
    """The length of each row of W + scaling · B A; of each column, where W is transposed."""
    import torch

    inner, rows = (0, shape[1]) if how.transposed else (1, shape[0])
    squares = torch.zeros(rows, dtype=torch.float64)
    for box in bands_of(Box.whole(shape), BAND):
        start, size = box.offsets[1 - inner], box.sizes[1 - inner]
        squares[start : start + size] += _sum(box, how, fill).double().square().sum(inner)
    return squares.sqrt().float()


def _read(shards: Sequence[Shard], box: Box, fill: Fill) -> torch.Tensor:
    """The values of a box of a tensor, in float32 (float64 ones in float64)."""
    import torch

    dtype = next((source.dtype for shard in shards for source in shard.sources), "float32")
    raw: Any = np.zeros(box.sizes, raw_dtype(dtype))
    fill(raw, box, shards)
    values = torch.from_numpy(raw.reshape(-1).view("u1")).view(getattr(torch, dtype)).reshape(box.sizes)
    return values if dtype == "float64" else values.float()
