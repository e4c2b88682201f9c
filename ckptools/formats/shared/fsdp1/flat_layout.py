"""Where the parameters of an FSDP1 flat parameter lie in it: torch's rules, and what the ranks' runs say of them.

The rules are in `fsdp1.flat_parameters`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.formats.shared.flat_runs import FlatRun
from ckptools.model.regions import Ints
from ckptools.model.tensor import Shard, Tensor

ALIGNMENTS = (2, 4, 8, 16)
"""Elements that 16 bytes may hold."""


@dataclass(frozen=True)
class Member:
    """A parameter in a flat parameter.

    Attributes:
        key: its name in the model.
        numel: its elements.
        shape: its sizes; None when nothing tells them.
        start: index of its first element in the flat parameter.
        runs: what each rank holds of it under its own name; empty without `use_orig_params`.
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
    """The layouts, by each rule that torch has had, that end where the flat parameter ends."""
    layout, total = _one_behind_the_other(members, 1)
    if total == flat.numel:
        yield layout
    for alignment in ALIGNMENTS if original else ():
        layout, total = _one_behind_the_other(members, alignment)
        ranks = len({s.box for s in flat.shards}) or 1
        if -(-total // ranks) * ranks == flat.numel:
            yield layout


def _one_behind_the_other(members: Sequence[Member], alignment: int) -> tuple[tuple[Member, ...], int]:
    at = 0
    layout = []
    for member in members:
        at = -(-at // alignment) * alignment
        layout.append(replace(member, start=at))
        at += member.numel
    return tuple(layout), at


def run_of(shard: Shard) -> FlatRun:
    """A shard of a flat parameter as a run of it."""
    return FlatRun(shard.box.offsets[0], shard.box.sizes[0], shard.source, shard.rank)


def overlap(member: Member, run: FlatRun) -> tuple[int, int]:
    """First and one past the last index of the flat parameter that both hold; equal when nothing is."""
    low, high = max(member.start, run.start), min(member.start + member.numel, run.start + run.length)
    return low, max(low, high)


def runs_agree(member: Member, flat: Tensor) -> bool:
    """Whether the run that each rank holds is the one that the member's place demands."""
    if not member.runs:
        return True
    held = {s.rank: s for s in member.runs}
    regions = {s.rank: s for s in flat.found}
    for rank in held.keys() | regions.keys():
        low, high = overlap(member, run_of(regions[rank])) if rank in regions else (0, 0)
        run = held.get(rank)
        if (run.box.numel if run else 0) != high - low:
            return False
        if run and high > low and not _at(run, regions[rank], low):
            return False
    return True


def _at(run: Shard, region: Shard, start: int) -> bool:
    """Whether a run begins at an index of the flat parameter; true where it has a storage of its own."""
    if run.source is None or region.source is None or storage_of(run) != storage_of(region):
        return True
    at = region.source.offset + (start - region.box.offsets[0]) * ITEMSIZE[region.source.dtype]
    return run.source.offset == at
