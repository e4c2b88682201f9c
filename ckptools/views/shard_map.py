"""Which rank holds which part of a tensor, as characters: a strip for one cut dimension, a grid for two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from ckptools.model.regions import Box, Ints
from ckptools.model.shown import ShardRow

WIDE, HIGH = 64, 16
"""Cells of a line, and lines of a grid; a strip of more shards goes on in more lines."""

RANKS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""What stands for a rank; one that is greater is `#`, and what no file here holds is `.`."""


def shard_map(shape: Ints, shards: Iterable[ShardRow]) -> list[str]:
    """The lines of the map; none where the tensor is not cut, or in more than two dimensions."""
    held = [row for row in shards if prod(row.sizes)]
    cut = [d for d, n in enumerate(shape) if any(row.sizes[d] != n for row in held)]
    if not 1 <= len(cut) <= 2 or not prod(shape):
        return []
    if len(cut) == 1 and len({row.offsets for row in held}) > WIDE:
        return [f"dim {cut[0]}, a cell for each shard", *_one_cell_each(held, cut[0])]
    columns = _cells(shape[cut[-1]], WIDE)
    if len(cut) == 1:
        return [f"dim {cut[0]}  {_line(held, cut, (0, 1), columns)}"]
    lines = [_line(held, cut, row, columns) for row in _cells(shape[cut[0]], HIGH)]
    return [f"dim {cut[0]} down, dim {cut[1]} across", *lines]


def _cells(n: int, most: int) -> list[tuple[int, int]]:
    """A dimension cut into at most so many cells: `(first, one past the last)` of each."""
    count = min(n, most)
    return [(i * n // count, (i + 1) * n // count) for i in range(count)]


def _line(held: Sequence[ShardRow], cut: Sequence[int], row: tuple[int, int], columns: list[tuple[int, int]]) -> str:
    spans = [(row, column) if len(cut) == 2 else (column,) for column in columns]
    return "[" + "".join(_cell(held, cut, span) for span in spans) + "]"


def _cell(held: Sequence[ShardRow], cut: Sequence[int], span: Sequence[tuple[int, int]]) -> str:
    """What stands for a cell: the first rank that holds some of it; a hole where any of it is nowhere."""
    box = Box(tuple(low for low, _ in span), tuple(high - low for low, high in span))
    found: dict[Box, ShardRow] = {}
    for row in held:
        common = Box(tuple(row.offsets[d] for d in cut), tuple(row.sizes[d] for d in cut)).intersect(box)
        if common is not None and (common not in found or found[common].status != "here"):
            found[common] = row
    here = [row for row in found.values() if row.status == "here"]
    covered = sum(common.numel for common, row in found.items() if row.status == "here")
    return _name(here[0].rank) if here and covered >= box.numel else "."


def _one_cell_each(held: Sequence[ShardRow], dim: int) -> Iterator[str]:
    """A cell for each of many shards, in the order of their places."""
    cells: dict[int, str] = {}
    for row in sorted(held, key=lambda row: (row.offsets[dim], row.status != "here")):
        cells.setdefault(row.offsets[dim], _name(row.rank) if row.status == "here" else ".")
    marks = "".join(cells.values())
    return (f"[{marks[at : at + WIDE]}]" for at in range(0, len(marks), WIDE))


def _name(rank: int | None) -> str:
    return "?" if rank is None else RANKS[rank] if rank < len(RANKS) else "#"
