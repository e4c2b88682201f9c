"""Copies that several ranks hold of one region: are they equal, byte for byte?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        if not _all_equal(copies, files):
            odd = minority_ranks(list(enumerate(copies)), lambda a, b: _equal(a, b, files))
            usual = next(i for i in range(len(copies)) if i not in odd)
            found[box] = (copies[usual].rank or 0, copies[odd[0]].rank or 0)
    return found


def _all_equal(copies: Sequence[Shard], files: OpenFiles) -> bool:
    """Whether copies of one region are; those that lie in one run are read together, and each of them once."""
    sources = list(dict.fromkeys(shard.source for shard in copies if shard.source is not None))
    if not all(source.contiguous for source in sources):
        return all(_equal(copies[0], other, files) for other in copies[1:])
    return len(sources) < 2 or _equal_bytes(sources, copies[0].box.numel * ITEMSIZE[sources[0].dtype], files)


def _read(source: Source, at: int, nbytes: int, files: OpenFiles) -> bytes:
    with files.open(source.path) as file:
        return file.read(source.offset + at, nbytes)


def _equal(a: Shard, b: Shard, files: OpenFiles) -> bool:
    if a.source is None or b.source is None or a.source == b.source:
        return True
    if a.source.contiguous and b.source.contiguous:
        return _equal_bytes([a.source, b.source], a.box.numel * ITEMSIZE[a.source.dtype], files)
    from ckptools.tensor_io.read import read_shard

    return read_shard(a, files).tobytes() == read_shard(b, files).tobytes()


def _equal_bytes(sources: Sequence[Source], nbytes: int, files: OpenFiles) -> bool:
    for at in range(0, nbytes, CHUNK):
        n = min(CHUNK, nbytes - at)
        first = _read(sources[0], at, n, files)
        if any(_read(other, at, n, files) != first for other in sources[1:]):
            return False
    return True
