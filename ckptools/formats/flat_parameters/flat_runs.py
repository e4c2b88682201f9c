"""Runs of consecutive elements of a flattened tensor: as boxes of it, or as parameters in an FSDP1 flat parameter.

FSDP1, DeepSpeed and Megatron's optimizer have such runs. One that begins or ends inside a row is several boxes, at most
2 * ndim - 1 of them. torch's rules for parameters in a flat parameter are in `parameters.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.model.regions import Box, Ints, contiguous_strides, span_boxes
from ckptools.model.shard import Shard, in_rank_order
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor

ALIGNMENTS = (2, 4, 8, 16)
"""Elements in 16 bytes, by size of dtype."""


class FlatRun(NamedTuple):
    """Consecutive elements of a flattened tensor that one rank holds.

    Attributes:
        start: index of the first element in the flattened tensor.
        source: a flat tensor that holds them, 1-D and contiguous; None when it is in a file that was not read.
        at: index of the first element in `source`.
    """

    start: int
    length: int
    source: Source | None
    rank: int | None
    at: int = 0


class RunBox(NamedTuple):
    """A box of a tensor whose elements follow each other in a flat tensor.

    Attributes:
        unread: the box as a shard of the tensor, without a source.
        at: index of its first element in the flat tensor.
        strides: of the box, packed, in elements.
    """

    unread: Shard
    at: int
    strides: Ints

    def shard_in(self, flat: Source | None) -> Shard:
        """The shard whose bytes are in a flat tensor; without a source where that was not read."""
        if flat is None:
            return self.unread
        # Made at once and not changed twice: ZeRO-3 has a hundred thousand of them.
        offset, box = flat.offset + self.at * ITEMSIZE[flat.dtype], self.unread.box
        source = Source(flat.path, offset, flat.dtype, box.sizes, self.strides, flat.record, flat.record_span, flat.crc)
        return Shard(box, self.unread.rank, source)


def boxes_of(shape: Ints, start: int, length: int, rank: int | None, at: int = 0) -> Iterator[RunBox]:
    """The boxes of a run in a flattened tensor of `shape`, which begins at element `at` of a rank's flat tensor."""
    for box, offset in span_boxes(shape, start, length):
        yield RunBox(Shard(box, rank, None), at + offset, contiguous_strides(box.sizes))


def shards_of(shape: Ints, run: FlatRun) -> list[Shard]:
    """The shards of a run of a flattened tensor of `shape`."""
    return [box.shard_in(run.source) for box in boxes_of(shape, run.start, run.length, run.rank, run.at)]


def shards_in(piece: Box, run: FlatRun) -> list[Shard]:
    """The shards of a run of a flattened piece, in the tensor that `piece` is a box of."""
    shards = shards_of(piece.sizes, run)
    return [s._replace(box=Box(tuple(map(add, piece.offsets, s.box.offsets)), s.box.sizes)) for s in shards]


def joined(shape: Ints, runs: Iterable[FlatRun]) -> tuple[Shard, ...]:
    """The shards of a tensor of `shape` whose flattened runs the ranks hold, in rank order."""
    return in_rank_order(shard for run in runs for shard in shards_of(shape, run))


def flat_source(value: Any) -> Source | None:
    """The source of a flat tensor; None for anything that is not one row of consecutive elements."""
    if not isinstance(value, Tensor) or value.kind != "plain" or len(value.shape) != 1 or len(value.shards) != 1:
        return None
    source = value.shards[0].source
    return source if source is not None and source.contiguous else None


def is_ragged(tensor: Tensor) -> bool:
    """Whether ranks hold different lengths under one key, so that it cannot be one replicated value."""
    return len({s.box for s in tensor.shards}) > 1


@dataclass(frozen=True)
class Member:
    """A parameter in a flat parameter.

    Attributes:
        shape: None when unknown.
        start: index of its first element in the flat parameter.
        runs: each rank's run under the parameter's own name; empty without `use_orig_params`.
    """

    key: str
    numel: int
    shape: Ints | None
    start: int = 0
    runs: tuple[Shard, ...] = ()


def filled(tensor: Tensor) -> list[Shard]:
    """The shards with a source and at least one element."""
    return [s for s in tensor.found if s.box.numel]


def storage_of(shard: Shard) -> Any:
    """The file and record that a shard lies in; None without a source."""
    return shard.source and (shard.source.path, shard.source.record)


def count(tensor: Tensor, flat: Tensor) -> int:
    """Elements of a parameter, from its runs: each region of the flat parameter counts once (HSDP repeats them)."""
    lengths = {s.rank: s.box.numel for s in tensor.found}
    by_region = {s.box: lengths.get(s.rank, 0) for s in flat.found}
    return sum(by_region.values())


def layouts(members: Sequence[Member], flat: Tensor, original: bool) -> Iterator[tuple[Member, ...]]:
    """The layouts, by each of torch's rules, that end where the flat parameter ends."""
    layout, total = end_to_end(members)
    if total == flat.numel:
        yield layout
    for alignment in ALIGNMENTS if original else ():
        layout, total = end_to_end(members, alignment)
        ranks = len({s.box for s in flat.shards}) or 1
        if -(-total // ranks) * ranks == flat.numel:
            yield layout


def end_to_end(members: Sequence[Member], alignment: int = 1) -> tuple[tuple[Member, ...], int]:
    """Lay parameters behind each other, each at a multiple of so many elements; return where they end, too."""
    at, layout = 0, []
    for member in members:
        at = -(-at // alignment) * alignment
        layout.append(replace(member, start=at))
        at += member.numel
    return tuple(layout), at


def run_of(shard: Shard) -> FlatRun:
    """A shard of a flat parameter as a run of it."""
    return FlatRun(shard.box.offsets[0], shard.box.sizes[0], shard.source, shard.rank)


def overlap(member: Member, run: FlatRun) -> tuple[int, int]:
    """The common range of the flat parameter: first index and one past the last; equal when empty."""
    low, high = max(member.start, run.start), min(member.start + member.numel, run.start + run.length)
    return low, max(low, high)


def runs_agree(member: Member, flat: Tensor) -> bool:
    """Whether each rank's run is the one that the member's place demands."""
    if not member.runs:
        return True
    runs = {s.rank: s for s in member.runs}
    regions = {s.rank: s for s in flat.found}
    for rank in runs.keys() | regions.keys():
        low, high = overlap(member, run_of(regions[rank])) if rank in regions else (0, 0)
        run = runs.get(rank)
        numel = run.box.numel if run else 0
        if numel != high - low or (run and numel and not _at(run, regions[rank], low)):
            return False
    return True


def _at(run: Shard, region: Shard, start: int) -> bool:
    """Whether a run begins at an index of the flat parameter; true where it has a storage of its own."""
    if run.source is None or region.source is None or storage_of(run) != storage_of(region):
        return True
    at = region.source.offset + (start - region.box.offsets[0]) * ITEMSIZE[region.source.dtype]
    return run.source.offset == at
