"""Runs: which consecutive elements of which parameter a rank's flat tensors hold, and tensors put together of them.

ZeRO cuts flattened parameters over the ranks. Where each piece belongs follows from names, shapes and lengths alone:
for stages 1 and 2 in `deepspeed_flat`, for stage 3 in `deepspeed_stage3`. What they find are `Run`s; here runs and
the flat tensors that hold them become shards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from ckptools.formats import spans
from ckptools.model import Shard, Source, Tensor
from ckptools.regions import Box, Ints, span_boxes

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


def joined(
    shape: Ints, runs: Sequence[Run], flats: Mapping[Where, Source], rank_of: Callable[[Where], int]
) -> tuple[Shard, ...]:
    """The shards of one parameter; those whose flat tensor was not read have no source.

    Runs that several pipeline stages hold of a tied parameter are cut at the same places, so that they are replicas.
    """
    if not prod(shape):
        return tuple(_empty(shape, flats, runs, rank_of))
    shards: list[Shard] = []
    for run in _cut_alike(runs):
        source, rank = flats.get(run.where), rank_of(run.where)
        if source is None:
            shards += (Shard(box, rank, None) for box, _ in span_boxes(shape, run.start, run.length))
        else:
            shards += spans.place(shape, run.start, source.part(Box((run.at,), (run.length,))), rank)
    return tuple(shards)


def _empty(
    shape: Ints, flats: Mapping[Where, Source], runs: Sequence[Run], rank_of: Callable[[Where], int]
) -> Iterator[Shard]:
    """A parameter without elements lies nowhere; any flat tensor says its dtype."""
    where = next((run.where for run in runs if run.where in flats), None)
    where = next(iter(flats), None) if where is None else where
    if where is not None:
        yield Shard(Box.whole(shape), rank_of(where), flats[where].part(Box((0,), (0,))).reshaped(shape))


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
