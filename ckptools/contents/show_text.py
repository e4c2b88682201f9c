"""The record of `show` as text: values in full, tensors with their shards and a map of their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ckptools.contents.record import ShardRow, Shown, ShownKey
from ckptools.display.lines import value_text
from ckptools.display.palette import Mark
from ckptools.display.tables import PIPE, Column, Screen, table, wrapped
from ckptools.dtypes import short
from ckptools.keys.random_states import StreamRow
from ckptools.model.regions import Box, Ints
from ckptools.text import clip, count, few, named_ranks, number, printable, shape, size, spans

VALUE_COLUMNS = (Column("key", "name"), Column("value"))
RANK_COLUMNS = (Column("key", "name"), Column("ranks"), Column("value"))
SHARD_COLUMNS = (
    Column("rank", "number"),
    Column("region"),
    Column("file", "name"),
    Column("record", "name"),
    Column("offset", "number"),
    Column("size", "number"),
    Column("crc"),
)

PART_COLUMNS = (*SHARD_COLUMNS[:2], Column("holds", "name"), *SHARD_COLUMNS[2:])
"""Columns of the tensors that are stored in place of a shard's values."""

FULL = 100_000
"""Characters of a value that is shown in full."""

DIGITS = {"float64": 17, "float32": 9, "float16": 5, "bfloat16": 4}
"""Significant digits that distinguish an element from its neighbours; elements of 8 bits need at most 4."""

WIDE, HIGH = 64, 16
"""Cells of a line, and lines of a grid; a strip of more shards goes on in more lines."""

RANKS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""The characters for ranks; a greater rank is `#`, and a part that is in no file here is `.`."""


def shown_text(shown: Shown, screen: Screen = PIPE) -> str:
    """Random states first, as fingerprints; tensors, each with its shards; the values in a table, one alone in full."""
    tensors = [row for row in shown.rows if row.type == "tensor" and not _is_brief(row, shown)]
    values = [row for row in shown.rows if row.type != "tensor" or _is_brief(row, shown)]
    streams = [line for text in stream_lines(shown.streams) for line in wrapped("", text, screen)]
    blocks = [streams] if streams else []
    blocks += [list(_tensor_lines(row, screen)) for row in tensors]
    blocks += [_values(values, screen)] if values else []
    return "\n\n".join("\n".join(block) for block in blocks)


def _is_brief(row: ShownKey, shown: Shown) -> bool:
    """Whether a tensor is one of several random states, whose shards are of no interest."""
    return row.kind == "rng" and len(shown.rows) > 1 and row.values is None


def _values(rows: Sequence[ShownKey], screen: Screen) -> list[str]:
    if len(rows) == 1:
        alone = _alone(rows[0])
        return [ln for name, text in alone for ln in wrapped(f"{name}  ", printable(text), screen, label="heading")]
    wide = screen.width or FULL
    if not any(row.ranks for row in rows):
        return table(VALUE_COLUMNS, [(row.name, _brief(row, wide)) for row in rows], screen)
    return table(RANK_COLUMNS, [cells for row in rows for cells in _by_rank(row, wide)], screen)


def _alone(row: ShownKey) -> Iterator[tuple[str, str]]:
    """A value in full after its name; if ranks have different ones, each after its ranks."""
    name = printable(clip(row.name, FULL))
    if not row.ranks:
        yield name, _in_full(row.value, row.note, row.type)
    for of in row.ranks:
        yield f"{name}  {named_ranks(of.ranks)}:", _in_full(of.value, of.note, row.type)


def _by_rank(row: ShownKey, wide: int) -> Iterator[tuple[str, str, str]]:
    if not row.ranks:
        yield row.name, "-", _brief(row, wide)
    for of in row.ranks:
        yield row.name, spans(of.ranks), of.note or value_text(of.value, wide)


def _brief(row: ShownKey, wide: int) -> str:
    if row.type != "tensor":
        return row.note or value_text(row.value, wide)
    crcs = dict.fromkeys(shard.crc for shard in row.shards if shard.crc)
    return f"{short(row.dtype)} {shape(row.shape or ())}" + (f", crc {', '.join(crcs)}" if crcs else "")


def _in_full(value: Any, note: str, kind: str) -> str:
    if value is None:
        return note or "None"
    if isinstance(value, list):
        inside = ", ".join(value_text(item, FULL) for item in value)
        return f"{note}: [{inside}]" if note else f"[{inside}]"
    return f"{note}: {value}" if kind == "bytes" else value_text(value, FULL)


def stream_lines(streams: Sequence[StreamRow]) -> Iterator[str]:
    """A line for each generator: the number of distinct states, and their checksums by rank."""
    for row in streams:
        whose = (rank if rank.startswith("shard ") else f"rank {rank}" for rank in row.fingerprints)
        prints = [f"{rank} {digits}" for rank, digits in zip(whose, row.fingerprints.values(), strict=True)]
        states = f"{row.distinct} distinct of {row.ranks}" if row.ranks > 1 else "one state"
        known = f"fingerprint {few(prints, 8)}" if prints else ""
        yield printable("; ".join(filter(None, (f"{row.stream}: {states}", known, row.problem))))


def _tensor_lines(row: ShownKey, screen: Screen) -> Iterator[str]:
    yield from wrapped(f"{printable(clip(row.name, FULL))}  ", printable(tensor_facts(row)), screen, label="heading")
    if row.tied:
        yield from wrapped("", printable(f"tied to {row.tied}"), screen)
    marked: tuple[tuple[str, Mark], ...] = ((row.note, ""), (holes_line(row), "bad"), (row.problem, "bad"))
    for line, mark in marked:
        yield from wrapped("", printable(line), screen, mark=mark) if line else ()
    if row.statistics is not None:
        yield from wrapped("", figures_line(row.statistics), screen)
    if row.values is not None:
        yield f"[{printable(row.slice)}]"
        lines = list(element_lines(row.values, row.dtype))
        if screen.width is not None and max(map(len, lines), default=0) > screen.width:
            lines = list(element_lines(row.values, row.dtype, placed=True))  # else nobody sees where a row begins
        for line in lines:
            place, bracket, cells = line.rpartition("]  ")
            yield from wrapped(place + bracket, cells, screen)
    else:
        yield from shard_map(row.shape or (), row.shards)
        yield from table(SHARD_COLUMNS, [shard_cells(shard) for shard in row.shards if not shard.parts], screen)
        yield from table(PART_COLUMNS, [cells for shard in row.shards for cells in part_cells(shard)], screen)


def tensor_facts(row: ShownKey) -> str:
    """The facts of a tensor: `fp32 [4, 8], 32 params, 128 B, dim 0 over 4 ranks`."""
    known = f"{short(row.dtype)} {shape(row.shape or ())}, {count(row.params)} params"
    return f"{known}, {size(row.bytes)}, {row.layout}"


def holes_line(row: ShownKey) -> str:
    """The parts of a tensor that are in no file here; "" if nothing is missing."""
    if not row.missing:
        return ""
    ranks = sorted({shard.rank for shard in row.shards if shard.status != "here" and shard.rank is not None})
    of = f" (rank{'s' if len(ranks) > 1 else ''} {few(list(map(str, ranks)))})" if ranks else ""
    return f"MISSING: no file here holds {row.missing} of its {row.params} elements{of}: {few(row.holes, 4)}"


def figures_line(found: Any) -> str:
    """The figures of a small tensor in one line."""
    figures = [
        f"{name} {'-' if found[name] is None else number(found[name])}" for name in ("rms", "min", "max", "mean")
    ]
    zeros = f"{found['zeros']} of {found['elements']} zero"
    return ", ".join([*figures, zeros, f"{found['nan']} NaN", f"{found['inf']} infinite"])


def shard_cells(shard: ShardRow, absent: str = "") -> list[str]:
    """The cells of a shard under `SHARD_COLUMNS`, with `absent` or its status in place of an unknown file."""
    region = str(Box(shard.offsets, shard.sizes))
    rank = "-" if shard.rank is None else str(shard.rank)
    nbytes = "-" if prod(shard.sizes) and not shard.bytes else size(shard.bytes)
    file = Path(shard.file).name if shard.file else absent or shard.status.upper()
    if shard.status != "here":
        return [rank, region, file, shard.note if shard.file else "-", "-", nbytes, "-"]
    offset = "-" if shard.offset is None else str(shard.offset)
    return [rank, region, file, shard.record or "-", offset, nbytes, shard.crc or "-"]


def part_cells(shard: ShardRow) -> Iterator[list[str]]:
    """The cells under `PART_COLUMNS` of the tensors that a shard is stored as."""
    rank, region, file, *_ = shard_cells(shard)
    for part in shard.parts:
        holds = f"{part.name} {short(part.dtype)} {shape(part.shape)}" + (f", per {part.per}" if part.per else "")
        yield [rank, region, holds, file, part.record or "-", str(part.offset), size(part.bytes), part.crc or "-"]


def element_lines(values: Any, dtype: str, placed: bool = False) -> Iterator[str]:
    """Elements row by row; beyond two dimensions, or where it is asked for, the index of a row stands before it."""
    if not isinstance(values, list):
        yield _element(values, dtype)
        return
    rows = list(_rows(values, ()))
    cells = [[_element(value, dtype) for value in row] for _, row in rows]
    width = max((len(cell) for row in cells for cell in row), default=0)
    for (place, _), row in zip(rows, cells, strict=True):
        before = f"[{', '.join(map(str, place))}]  " if len(place) > 1 or (placed and place) else ""
        yield before + "  ".join(cell.rjust(width) for cell in row)


def _rows(values: list[Any], place: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], list[Any]]]:
    if not values or not isinstance(values[0], list):
        yield place, values
        return
    for n, inside in enumerate(values):
        yield from _rows(inside, (*place, n))


def _element(value: Any, dtype: str) -> str:
    return f"{value:.{DIGITS.get(dtype, 4)}g}" if isinstance(value, float) else str(value)


# -- map of ranks -------------------------------------------------------------------------------------------------


def shard_map(shape: Ints, shards: Iterable[ShardRow]) -> list[str]:
    """The lines of the map; none if the tensor is sharded in no dimension or in more than two."""
    shards = [row for row in shards if prod(row.sizes)]
    cut = [d for d, n in enumerate(shape) if any(row.sizes[d] != n for row in shards)]
    if not 1 <= len(cut) <= 2 or not prod(shape):
        return []
    if len(cut) == 1 and len({row.offsets for row in shards}) > WIDE:
        return [f"dim {cut[0]}, a cell for each shard", *_one_cell_each(shards, cut[0])]
    columns = _cells(shape[cut[-1]], WIDE)
    if len(cut) == 1:
        return [f"dim {cut[0]}  {_line(shards, cut, (0, 1), columns)}"]
    lines = [_line(shards, cut, row, columns) for row in _cells(shape[cut[0]], HIGH)]
    return [f"dim {cut[0]} down, dim {cut[1]} across", *lines]


def _cells(n: int, most: int) -> list[tuple[int, int]]:
    """Divide a dimension into at most `most` cells: `(first, one past the last)` of each."""
    count = min(n, most)
    return [(i * n // count, (i + 1) * n // count) for i in range(count)]


def _line(shards: Sequence[ShardRow], cut: Sequence[int], row: tuple[int, int], columns: list[tuple[int, int]]) -> str:
    spans = [(row, column) if len(cut) == 2 else (column,) for column in columns]
    return "[" + "".join(_cell(shards, cut, span) for span in spans) + "]"


def _cell(shards: Sequence[ShardRow], cut: Sequence[int], span: Sequence[tuple[int, int]]) -> str:
    """The character of a cell: the first rank that has some of it, or a hole if any of it is in no file."""
    box = Box(tuple(low for low, _ in span), tuple(high - low for low, high in span))
    found: dict[Box, ShardRow] = {}
    for row in shards:
        common = Box(tuple(row.offsets[d] for d in cut), tuple(row.sizes[d] for d in cut)).intersect(box)
        if common is not None and (common not in found or found[common].status != "here"):
            found[common] = row
    here = [row for row in found.values() if row.status == "here"]
    covered = sum(common.numel for common, row in found.items() if row.status == "here")
    return _name(here[0].rank) if here and covered >= box.numel else "."


def _one_cell_each(shards: Sequence[ShardRow], dim: int) -> Iterator[str]:
    cells: dict[int, str] = {}
    for row in sorted(shards, key=lambda row: (row.offsets[dim], row.status != "here")):
        cells.setdefault(row.offsets[dim], _name(row.rank) if row.status == "here" else ".")
    marks = "".join(cells.values())
    return (f"[{marks[at : at + WIDE]}]" for at in range(0, len(marks), WIDE))


def _name(rank: int | None) -> str:
    return "?" if rank is None else RANKS[rank] if rank < len(RANKS) else "#"
