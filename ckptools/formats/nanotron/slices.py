"""Slices of a parameter on tensor-parallel ranks, as the headers of Nanotron's files place them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ckptools.formats.flat_parameters.flat_runs import boxes_of
from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard
from ckptools.model.source import Source

MAX_PIECES = 1 << 12


class SlicePair(NamedTuple):
    """A box of a slice, and the box of the whole parameter that it is."""

    local: Box
    whole: Box


@dataclass(frozen=True)
class Slice:
    """One file of a parameter: the tensor in it, and its pieces of the whole.

    Attributes:
        place: pipeline and tensor-parallel rank; None for a parameter that is written once.
        shape: of the whole parameter.
    """

    place: tuple[int, int] | None
    source: Source
    shape: Ints
    pieces: tuple[SlicePair, ...]

    def shards(self, source: Source, rank: int | None) -> Iterator[Shard]:
        """The shards of a tensor that is cut as this one is."""
        for local, whole in self.pieces:
            yield Shard(whole, rank, source.part(local))

    def shards_of_run(self, source: Source, start: int, rank: int | None) -> Iterator[Shard]:
        """The shards of a run of this slice, flattened, which begins at element `start`."""
        for run in boxes_of(self.source.shape, start, source.shape[0], rank):
            in_run = run.shard_in(source)
            for local, whole in self.pieces:
                common = in_run.box.intersect(local)
                if common is not None and in_run.source is not None:
                    inside = common.seen_from(local)
                    offsets = tuple(a + b for a, b in zip(inside.offsets, whole.offsets, strict=True))
                    yield Shard(Box(offsets, common.sizes), rank, in_run.source.part(common.seen_from(in_run.box)))


def pieces_of(text: str, local: Ints, whole: Ints) -> tuple[SlicePair, ...]:
    """The pieces in `local_global_slices_pairs`.

    Raises:
        ValueError: they are no boxes, or do not fill the slice.
    """
    pairs = text.split(";")
    if len(pairs) > MAX_PIECES:
        raise ValueError("too many pieces")
    found = tuple(
        SlicePair(*(_box(p, s) for p, s in zip(pair.split("#"), (local, whole), strict=True))) for pair in pairs
    )
    if any(a.sizes != b.sizes for a, b in found) or sum(p.local.numel for p in found) != prod(local):
        raise ValueError("pieces that do not fill the slice")
    return found


def _box(text: str, shape: Ints) -> Box:
    """The box that `start,stop,step|…` says of a tensor."""
    offsets, sizes = [], []
    for part, n in zip(text.split("|"), shape, strict=True):
        start, stop, step = (None if word == "None" else int(word) for word in part.split(","))
        low, high = start or 0, n if stop is None else stop
        if step not in (None, 1) or not 0 <= low <= high <= n:
            raise ValueError(f"a slice {part} of {n}")
        offsets.append(low)
        sizes.append(high - low)
    return Box(tuple(offsets), tuple(sizes))


def shape_of(text: str) -> Ints:
    """The shape in `unsharded_shape`, such as `torch.Size([4, 3])` or `(4, 3)`.

    Raises:
        ValueError: it is none.
    """
    words = [word for word in text.strip("()[] ").replace("torch.Size(", "").split(",") if word.strip()]
    return tuple(int(word) for word in words)
