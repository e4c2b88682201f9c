"""Runs: which consecutive elements of which parameter a rank's flat tensors hold, and tensors put together of them.

ZeRO cuts flattened parameters over the ranks. Where each piece belongs follows from names, shapes and lengths alone:
for stages 1 and 2 in `deepspeed.flat`, for stage 3 in `deepspeed.stage3`. What they find are `Run`s; here runs and
the flat tensors that hold them become shards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.model.regions import Box, Ints, contiguous_strides, span_boxes
from ckptools.model.tensor import Shard, Source, Tensor

Where = tuple[int, int, int]
"""`(mp, dp, group)`: whose flat tensor, and which of them."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of one parameter in one rank's flat tensor.

    Attributes:
        fqn: the parameter.
        start: index of the first element in the flattened parameter.
        length: how many.
        where: the flat tensor.
        at: index of the first element in it.
    """

    fqn: str
    start: int
    length: int
    where: Where
    at: int


def flat_source(value: Any) -> Source | None:
    """Where a flat tensor's elements are; None for anything that is not one row of consecutive elements."""
    if not isinstance(value, Tensor) or value.kind != "plain" or len(value.shape) != 1 or len(value.shards) != 1:
        return None
    source = value.shards[0].source
    return source if source is not None and source.contiguous else None


@dataclass(frozen=True, slots=True)
class Place:
    """A box of a parameter, and where its elements follow each other in a flat tensor.

    Attributes:
        where: the flat tensor.
        at: index of the box's first element in it.
        strides: of the box, packed.
        unread: the shard as long as nobody has read the flat tensor.
    """

    where: Where
    at: int
    strides: Ints
    unread: Shard


def places(shape: Ints, runs: Sequence[Run], rank_of: Callable[[Where], int]) -> list[Place]:
    """The boxes of all runs of a parameter.

    Runs that several pipeline stages hold of a tied parameter are cut at the same places, so that they are replicas.
    A parameter without elements lies nowhere; it is placed in the first flat tensor, whose dtype it has.
    """
    if not prod(shape):
        first = runs[0].where if runs else (0, 0, 0)
        return [Place(first, 0, contiguous_strides(shape), Shard(Box.whole(shape), rank_of(first), None))]
    found = []
    for run in _cut_alike(runs):
        rank = rank_of(run.where)
        for box, at in span_boxes(shape, run.start, run.length):
            found.append(Place(run.where, run.at + at, contiguous_strides(box.sizes), Shard(box, rank, None)))
    return found


def joined(placed: Iterable[Place], flats: Mapping[Where, Source]) -> tuple[Shard, ...]:
    """The shards of a parameter, or of one slot of its state; without a source where the flat tensor was not read."""
    shards = []
    for place in placed:
        flat = flats.get(place.where)
        shards.append(place.unread if flat is None else _found(place, flat))
    return tuple(shards)


def _found(place: Place, flat: Source) -> Shard:
    # Made without dataclasses.replace: ZeRO-3 has a hundred thousand of them.
    offset, box = flat.offset + place.at * ITEMSIZE[flat.dtype], place.unread.box
    source = Source(flat.path, offset, flat.dtype, box.sizes, place.strides, flat.record, flat.record_span, flat.crc)
    return Shard(box, place.unread.rank, source)


def _cut_alike(runs: Sequence[Run]) -> Iterable[Run]:
    if len({run.where[0] for run in runs}) < 2:
        return runs
    cuts = sorted({at for run in runs for at in (run.start, run.start + run.length)})
    return [piece for run in runs for piece in _pieces(run, cuts)]


def _pieces(run: Run, cuts: list[int]) -> Iterator[Run]:
    end = run.start + run.length
    inner = [run.start, *cuts[bisect_right(cuts, run.start) : bisect_right(cuts, end - 1)], end]
    for a, b in pairwise(inner):
        yield replace(run, start=a, length=b - a, at=run.at + a - run.start)
