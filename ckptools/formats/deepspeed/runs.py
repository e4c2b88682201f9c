"""Runs of consecutive elements of parameters in the ranks' flat tensors, and tensors put together from them.

ZeRO cuts flattened parameters over the ranks. Where each piece belongs follows from names, shapes and lengths alone:
for every stage in `deepspeed.zero_stages`, which returns `PartitionRun`s; this module makes shards of them and the flat
tensors, by `flat_parameters.flat_runs`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ckptools.formats.flat_parameters.flat_runs import RunBox, boxes_of
from ckptools.model.regions import Box, Ints, contiguous_strides
from ckptools.model.tensor import Shard, Source

Where = tuple[int, int, int]
"""`(mp, dp, group)`: the rank of a flat tensor, and its number."""


class PartitionRun(NamedTuple):
    """Consecutive elements of one parameter in one rank's flat tensor.

    Attributes:
        fqn: the parameter.
        start: index of the first element in the flattened parameter.
        length: number of elements.
        where: the flat tensor.
        at: index of the first element in it.
    """

    fqn: str
    start: int
    length: int
    where: Where
    at: int


class PlacedBox(NamedTuple):
    """A box of a parameter, and which flat tensor has its elements.

    Attributes:
        where: the flat tensor.
        box: the box, and where it begins there.
    """

    where: Where
    box: RunBox


def places(shape: Ints, runs: Sequence[PartitionRun], rank_of: Callable[[Where], int]) -> list[PlacedBox]:
    """The boxes of all runs of a parameter.

    Runs of a tied parameter in several pipeline stages are cut at the same places, so that they are replicas. A
    parameter without elements is placed in the first flat tensor, whose dtype it has.
    """
    if not prod(shape):
        first = runs[0].where if runs else (0, 0, 0)
        return [PlacedBox(first, RunBox(Shard(Box.whole(shape), rank_of(first), None), 0, contiguous_strides(shape)))]
    found = []
    for run in _cut_alike(runs):
        rank = rank_of(run.where)
        found += [PlacedBox(run.where, box) for box in boxes_of(shape, run.start, run.length, rank, run.at)]
    return found


def shards_at(placed: Iterable[PlacedBox], flats: Mapping[Where, Source]) -> tuple[Shard, ...]:
    """The shards of a parameter, or of one slot of its state; without a source where the flat tensor was not read."""
    return tuple(place.box.shard_in(flats.get(place.where)) for place in placed)


def _cut_alike(runs: Sequence[PartitionRun]) -> Iterable[PartitionRun]:
    if len({run.where[0] for run in runs}) < 2:
        return runs
    cuts = sorted({at for run in runs for at in (run.start, run.start + run.length)})
    return [piece for run in runs for piece in _pieces(run, cuts)]


def _pieces(run: PartitionRun, cuts: list[int]) -> Iterator[PartitionRun]:
    end = run.start + run.length
    inner = [run.start, *cuts[bisect_right(cuts, run.start) : bisect_right(cuts, end - 1)], end]
    for a, b in pairwise(inner):
        yield run._replace(start=a, length=b - a, at=run.at + a - run.start)
