"""Copies that several ranks hold of one region: are they equal, byte for byte?"""

from __future__ import annotations

from collections.abc import Iterable

from ckptools.dtypes import ITEMSIZE
from ckptools.files.opening import OpenFiles
from ckptools.model.rank_vote import minority_ranks
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Source

CHUNK = 4 << 20
"""Bytes compared at a time."""


def differing_boxes(shards: Iterable[Shard], files: OpenFiles) -> dict[Box, tuple[int, int]]:
    """The regions whose copies differ, each with a rank that has what most have, and one that has other bytes.

    Raises:
        ReadError: a file cannot be read.
    """
    groups: dict[Box, list[Shard]] = {}
    for shard in shards:
        groups.setdefault(shard.box, []).append(shard)
    found: dict[Box, tuple[int, int]] = {}
    for box, copies in groups.items():
        if not all(_equal(copies[0], other, files) for other in copies[1:]):
            odd = minority_ranks(list(enumerate(copies)), lambda a, b: _equal(a, b, files))
            usual = next(i for i in range(len(copies)) if i not in odd)
            found[box] = (copies[usual].rank or 0, copies[odd[0]].rank or 0)
    return found


def _equal(a: Shard, b: Shard, files: OpenFiles) -> bool:
    if a.source is None or b.source is None or a.source == b.source:
        return True
    if a.source.contiguous and b.source.contiguous:
        return _equal_bytes(a.source, b.source, a.box.numel * ITEMSIZE[a.source.dtype], files)
    from ckptools.tensor_io.read import read_shard

    return read_shard(a, files).tobytes() == read_shard(b, files).tobytes()


def _equal_bytes(a: Source, b: Source, nbytes: int, files: OpenFiles) -> bool:
    with files.open(a.path) as left, files.open(b.path) as right:
        for at in range(0, nbytes, CHUNK):
            n = min(CHUNK, nbytes - at)
            if left.read(a.offset + at, n) != right.read(b.offset + at, n):
                return False
    return True
