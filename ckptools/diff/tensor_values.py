"""Comparison of tensor values: streamed over both layouts, in bands, by several threads.

Tensors that both sides cut into the same regions are compared region by region; a region whose zip entries state the
same CRC-32 is not read. Others are read in bands of rows, which are consecutive in a shard of rows or of columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptools.diff.record import Measures, Tolerance
from ckptools.dtypes import ITEMSIZE
from ckptools.errors import CkptoolsError
from ckptools.files.opening import OpenFiles
from ckptools.keys.value_digests import once
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Source, Tensor
from ckptools.tensor_io.fetch_ahead import Part, copies_among, in_ranks, parts_of_all
from ckptools.tensor_io.replicas import differing_boxes
from ckptools.tensor_io.slicing import bands_of
from ckptools.tensor_io.threads import Progress, no_progress

REGION = 1 << 24
"""Elements for one thread; a larger tensor is shared among several."""


@dataclass
class Measured:
    """The result of comparing two tensors.

    Attributes:
        measures: of the elements that were read; None if there are none.
        skipped: elements that were not read, since both sides state the same checksum.
        damaged: whether both sides state the same checksum for a region in which they differ.
        by_rank: whether each rank's own copy was compared with the same rank's.
        problem: why it cannot be compared.
        nbytes: bytes read.
        nbytes_skipped: bytes not read.
    """

    measures: Measures | None = None
    skipped: int = 0
    damaged: bool = False
    by_rank: bool = False
    problem: str = ""
    nbytes: int = 0
    nbytes_skipped: int = 0


class _Region(NamedTuple):
    """A region of a pair of tensors that is read and compared in one thread."""

    pair: int
    box: Box
    a: Sequence[Shard]
    b: Sequence[Shard]
    stated_alike: bool


@dataclass
class _Pair:
    """Two tensors, their name, and parts with one shard per region; one part for each rank if copies differ."""

    name: str
    tensors: tuple[Tensor, Tensor]
    parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    found: Measured = field(default_factory=Measured)


def compare_tensors(
    pairs: Sequence[tuple[str, Tensor, Tensor]],
    files: OpenFiles,
    threads: int,
    tolerance: Tolerance | None = None,
    every_byte: bool = False,
    progress: Progress = no_progress,
) -> list[Measured]:
    """Compare the values of pairs of tensors of one shape, whose shards cover them.

    Args:
        pairs: name, tensor of A, tensor of B.
        files: keeps sources open.
        threads: number of threads.
        tolerance: how far values may be apart.
        every_byte: also read regions whose stated checksums are the same on both sides.
        progress: called with bytes read and the tensor they are of.
    """
    made = [_Pair(name, (a, b)) for name, a, b in pairs]

    def copies(pair: _Pair) -> list[Part]:
        return [part for tensor in pair.tensors for part in copies_among(_unsure(tensor, every_byte))]

    unequal = in_ranks(lambda pair: _copies_differ(pair, files, every_byte), made, threads, _nbytes, reads=copies)
    for pair, odd in zip(made, unequal, strict=True):
        _settle_copies(pair, odd)
    regions = [region for n, pair in enumerate(made) for region in _regions(n, pair, every_byte)]

    def work(region: _Region) -> Measures | str:
        return _measured(region, made[region.pair], files, tolerance, progress)

    def reads(region: _Region) -> list[Part]:
        return parts_of_all((*region.a, *region.b))

    results = in_ranks(work, regions, threads, lambda one: one.box.numel, reads=reads)
    for region, result in zip(regions, results, strict=True):
        _note(made[region.pair], region, result)
    return [pair.found for pair in made]


# -- copies ------------------------------------------------------------------------------------------------------


def _nbytes(pair: _Pair) -> int:
    return sum(tensor.nbytes for tensor in pair.tensors)


def _copies_differ(pair: _Pair, files: OpenFiles, every_byte: bool) -> list[bool] | str:
    """Whether ranks have different copies, for each side, or why that is unknown."""
    try:
        return [copies_differ(tensor, files, every_byte) for tensor in pair.tensors]
    except CkptoolsError as error:
        return str(error)


def _settle_copies(pair: _Pair, odd: list[bool] | str) -> None:
    """Keep one copy of each region: any copy if all are equal, else each rank's own."""
    if isinstance(odd, str):
        pair.found.problem = odd
        return
    if not any(odd):
        pair.parts = [(once(pair.tensors[0]), once(pair.tensors[1]))]
        return
    ranks = [_holders(tensor) for tensor in pair.tensors]
    if ranks[0] and ranks[0] == ranks[1]:
        pair.found.by_rank = True
        pair.parts = [(_of_rank(pair.tensors[0], r), _of_rank(pair.tensors[1], r)) for r in ranks[0]]
        return
    where = " and ".join(side for side, one in zip("AB", odd, strict=True) if one)
    pair.found.problem = f"{where}: ranks hold different copies of it (verify names them)"


def _holders(tensor: Tensor) -> list[int]:
    """The ranks that each have the whole tensor; none if some have parts or a shard's rank is unknown."""
    each = all(s.rank is not None and s.box.sizes == tensor.shape for s in tensor.found)
    return sorted({s.rank for s in tensor.found if s.rank is not None}) if each else []


def _of_rank(tensor: Tensor, rank: int | None) -> Tensor:
    return replace(tensor, shards=tuple(s for s in tensor.found if s.rank == rank))


def copies_differ(tensor: Tensor, files: OpenFiles, every_byte: bool = False) -> bool:
    """Whether ranks have different bytes for one region; equal stated checksums are believed.

    Args:
        tensor: the tensor.
        files: keeps sources open.
        every_byte: read all bytes whatever the checksums.

    Raises:
        ReadError: a file cannot be read.
    """
    return bool(differing_boxes(_unsure(tensor, every_byte), files))


def read_for_digest(tensor: Tensor) -> list[Part]:
    """The parts to read to compare the copies of a tensor and to hash one of each."""
    return [*copies_among(_unsure(tensor, every_byte=False)), *parts_of_all(once(tensor).shards)]


def _unsure(tensor: Tensor, every_byte: bool) -> list[Shard]:
    """The shards of regions whose stated checksums do not prove the copies equal."""
    groups: dict[Box, list[Shard]] = {}
    for shard in tensor.found if tensor.has_copies else ():
        groups.setdefault(shard.box, []).append(shard)
    return [s for g in groups.values() if every_byte or not all(stated_alike(g[0], s) for s in g) for s in g]


def stated_alike(a: Shard, b: Shard) -> bool:
    """Whether two shards are the same part of zip entries of the same length and stated CRC-32."""
    return a.source is not None and b.source is not None and bool(a.source.crc) and _part(a.source) == _part(b.source)


def _part(source: Source) -> tuple[object, ...]:
    """The checksum and the part of its zip entry that identify a source."""
    start, length = source.record_span
    return source.crc, length, source.offset - start, source.dtype, source.shape, source.strides


# -- regions -----------------------------------------------------------------------------------------------------


def _regions(number: int, pair: _Pair, every_byte: bool) -> Iterator[_Region]:
    """The regions of a pair to read; skipped ones are counted."""
    for a, b in pair.parts:
        left, right = ({s.box: s for s in tensor.shards if s.box.numel} for tensor in (a, b))
        if left.keys() != right.keys():
            yield from _of_rows(number, a, b)
            continue
        for box, shard in left.items():
            alike = stated_alike(shard, right[box])
            if alike and not every_byte:
                pair.found.skipped += box.numel
                pair.found.nbytes_skipped += 2 * box.numel * ITEMSIZE[a.dtype]
            else:
                yield from (_Region(number, part, (shard,), (right[box],), alike) for part in bands_of(box, REGION))


def _of_rows(number: int, a: Tensor, b: Tensor) -> Iterator[_Region]:
    for box in bands_of(Box.whole(a.shape), REGION) if a.numel else ():
        yield _Region(number, box, _meeting(a, box), _meeting(b, box), False)


def _meeting(tensor: Tensor, box: Box) -> list[Shard]:
    return [s for s in tensor.shards if not box.sizes or s.box.intersect(box) is not None]


def _measured(
    region: _Region, pair: _Pair, files: OpenFiles, tolerance: Tolerance | None, progress: Progress
) -> Measures | str:
    """Measure a region, or say why it cannot be read."""
    from ckptools.diff.arrays import Comparing
    from ckptools.tensor_io.elements import side_by_side

    dtypes = [tensor.dtype for tensor in pair.tensors]
    comparing = Comparing(dtypes, region.box, tolerance)
    sides = list(zip(dtypes, (region.a, region.b), strict=True))
    try:
        for start, (a, b) in side_by_side(region.box, sides, files):
            comparing.add(a, b, start)
            progress(a.nbytes + b.nbytes, pair.name)
    except CkptoolsError as error:
        return str(error)
    return comparing.found


def _note(pair: _Pair, region: _Region, result: Measures | str) -> None:
    if isinstance(result, str):
        pair.found.problem = pair.found.problem or result
        return
    pair.found.measures = pair.found.measures or Measures()
    pair.found.measures.add(result)
    pair.found.nbytes += region.box.numel * sum(ITEMSIZE[t.dtype] for t in pair.tensors)
    pair.found.damaged |= region.stated_alike and result.differing > 0
