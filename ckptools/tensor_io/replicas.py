"""Copies that several ranks hold of one region: are they equal, byte for byte?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.files.opening import OpenFiles
from ckptools.model.rank_vote import vote
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Source
from ckptools.text import clip_middle, shape

CHUNK = 4 << 20
"""Bytes compared at a time."""


class Unequal(NamedTuple):
    """Copies of one region that differ.

    Attributes:
        usual: the copy that most have; where no more than half have one, the first.
        other: a copy with other bytes.
        odd: ranks that more than half of the copies contradict.
    """

    usual: Shard
    other: Shard
    odd: tuple[int, ...]

    @property
    def rank(self) -> int | None:
        """The first rank whose copy more than half contradict."""
        return self.odd[0] if self.odd else None

    def text(self, files: OpenFiles) -> str:
        """Which region it is, who holds which value, and where.

        Raises:
            ReadError: a file cannot be read.
        """
        where = _first_difference(self.other, self.usual, files)
        return f"{self.other.box}: {_whose(self.other)} holds other bytes than {_whose(self.usual)}{where}"


def differing_boxes(shards: Iterable[Shard], files: OpenFiles) -> dict[Box, Unequal]:
    """The regions whose copies differ.

    Raises:
        ReadError: a file cannot be read.
    """
    groups: dict[Box, list[Shard]] = {}
    for shard in shards:
        groups.setdefault(shard.box, []).append(shard)
    unequal = (copies for copies in groups.values() if not _all_equal(copies, files))
    return {copies[0].box: _voted(copies, files) for copies in unequal}


def _voted(copies: Sequence[Shard], files: OpenFiles) -> Unequal:
    found = vote(list(enumerate(copies)), lambda a, b: _equal(a, b, files))
    usual = found.majority or found.groups[0]
    other = next(value for value, places in found.groups if places != usual[1])
    ranks = [copies[place].rank for place in found.odd]
    return Unequal(usual[0], other, tuple(rank for rank in ranks if rank is not None))


def _whose(copy: Shard) -> str:
    if copy.rank is not None:
        return f"rank {copy.rank}"
    return clip_middle(copy.file.path.name, 60) if copy.file else "one copy"


def _first_difference(a: Shard, b: Shard, files: OpenFiles) -> str:
    """Where the first element lies that differs, and what it is in both copies."""
    from ckptools.tensor_io.numbers import digits

    if a.source is None or b.source is None:
        return ""
    width, dtype = ITEMSIZE[a.source.dtype], a.source.dtype
    for start, x, y in _side_by_side(a, b, files):
        if x != y:
            place = next(i for i in range(0, len(x), width) if x[i : i + width] != y[i : i + width])
            values = [digits(data[place : place + width], dtype) for data in (x, y)]
            return f" (first at {shape(a.box.index_of((start + place) // width))}: {' and '.join(values)})"
    return ""


def _all_equal(copies: Sequence[Shard], files: OpenFiles) -> bool:
    """Whether copies of one region are; those that lie in one run are read together, and each of them once."""
    sources = list(dict.fromkeys(shard.source for shard in copies if shard.source is not None))
    encoded = any(shard.encoded is not None for shard in copies)
    if encoded or not all(source.contiguous for source in sources):
        return all(_equal(copies[0], other, files) for other in copies[1:])
    return len(sources) < 2 or _equal_bytes(sources, copies[0].box.numel * ITEMSIZE[sources[0].dtype], files)


def _read(source: Source, at: int, nbytes: int, files: OpenFiles) -> bytes:
    with files.open(source.path) as file:
        return file.read(source.offset + at, nbytes)


def _equal(a: Shard, b: Shard, files: OpenFiles) -> bool:
    if a.encoded is not None or b.encoded is not None:
        return _equal_parts(a, b, files)
    if a.source is None or b.source is None or a.source == b.source:
        return True
    return all(x == y for _, x, y in _side_by_side(a, b, files))


def _side_by_side(a: Shard, b: Shard, files: OpenFiles) -> Iterator[tuple[int, bytes, bytes]]:
    """The bytes of two copies in row-major order, some at a time, each with where they start."""
    assert a.source is not None
    assert b.source is not None
    if not (a.source.contiguous and b.source.contiguous):
        from ckptools.tensor_io.read import read_shard

        yield 0, read_shard(a, files).tobytes(), read_shard(b, files).tobytes()
        return
    nbytes = a.box.numel * ITEMSIZE[a.source.dtype]
    for at in range(0, nbytes, CHUNK):
        n = min(CHUNK, nbytes - at)
        yield at, _read(a.source, at, n, files), _read(b.source, at, n, files)


def _equal_parts(a: Shard, b: Shard, files: OpenFiles) -> bool:
    """Whether two pieces store the same in the place of values: the same class, and equal parts."""
    if a.encoded is None or b.encoded is None or a.encoded.name != b.encoded.name:
        return False
    one, other = (dict(shard.encoded.parts) for shard in (a, b) if shard.encoded is not None)
    forms = [{name: (source.dtype, source.shape) for name, source in parts.items()} for parts in (one, other)]
    alike = forms[0] == forms[1]
    return alike and all(_equal(_whole(one[name]), _whole(other[name]), files) for name in one)


def _whole(source: Source) -> Shard:
    return Shard(Box.whole(source.shape), None, source)


def _equal_bytes(sources: Sequence[Source], nbytes: int, files: OpenFiles) -> bool:
    for at in range(0, nbytes, CHUNK):
        n = min(CHUNK, nbytes - at)
        first = _read(sources[0], at, n, files)
        if any(_read(other, at, n, files) != first for other in sources[1:]):
            return False
    return True
