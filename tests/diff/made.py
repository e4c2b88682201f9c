"""Tensors whose bytes lie in files of raw elements, cut as a test wants them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor


def cut(
    folder: Path,
    name: str,
    array: npt.NDArray[np.generic],
    boxes: Sequence[Box],
    dtype: str = "float32",
    crc: bool = True,
) -> Tensor:
    """A tensor of an array's values, each box in a file of its own, with the CRC-32 of it where `crc`."""
    shards = []
    for rank, box in enumerate(boxes):
        place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        data = np.ascontiguousarray(array[place]).tobytes()
        path = folder / f"{name}-{rank}.bin"
        path.write_bytes(data)
        stated = zlib.crc32(data) if crc else 0
        source = Source(path, 0, dtype, box.sizes, contiguous_strides(box.sizes), path.name, (0, len(data)), stated)
        shards.append(Shard(box, rank, source))
    return Tensor(array.shape, dtype, tuple(shards), "sharded_tensor" if len(boxes) > 1 else "plain")


def rows(n: int, width: int, parts: int) -> list[Box]:
    """Boxes of `n` rows cut into `parts`."""
    edges = [n * k // parts for k in range(parts + 1)]
    return [Box((a, 0), (b - a, width)) for a, b in pairwise(edges)]


def columns(n: int, width: int, parts: int) -> list[Box]:
    """Boxes of columns."""
    return [Box(box.offsets[::-1], box.sizes[::-1]) for box in rows(width, n, parts)]
