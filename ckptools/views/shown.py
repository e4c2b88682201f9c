"""What is at some keys, as text: values in full, tensors with their shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ckptools.dtypes import short
from ckptools.model.regions import Box
from ckptools.model.shown import RankValue, ShardRow, Shown, ShownKey, StreamRow
from ckptools.text import clip, count, few, number, printable, shape, size, spans
from ckptools.views.shard_map import shard_map
from ckptools.views.tables import PIPE, Column, Screen, table, wrapped
from ckptools.views.value_text import value_text

VALUE_COLUMNS = (Column("key", name=True), Column("value"))
RANK_COLUMNS = (Column("key", name=True), Column("ranks"), Column("value"))
SHARD_COLUMNS = (
    Column("rank", right=True),
    Column("region"),
    Column("file", name=True),
    Column("record", name=True),
    Column("offset", right=True),
    Column("size", right=True),
    Column("crc"),
)

PART_COLUMNS = (*SHARD_COLUMNS[:2], Column("holds", name=True), *SHARD_COLUMNS[2:])
"""Of a piece that is stored in another form than its values, a row for each thing that is stored."""

FULL = 100_000
"""Characters of a value that is shown in full."""

DIGITS = {"float64": 17, "float32": 9, "float16": 5, "bfloat16": 4}
"""Significant digits of an element, which tell it from its neighbours; those of 8 bits have 4 at most."""


def shown_text(shown: Shown, screen: Screen = PIPE) -> str:
    """Random states first, as fingerprints; tensors, each with its shards; the values in a table, one alone in full."""
    tensors = [row for row in shown.rows if row.type == "tensor" and not _is_brief(row, shown)]
    values = [row for row in shown.rows if row.type != "tensor" or _is_brief(row, shown)]
    blocks = [list(stream_lines(shown.streams))] if shown.streams else []
    blocks += [list(_tensor_lines(row, screen)) for row in tensors]
    blocks += [_values(values, screen)] if values else []
    return "\n\n".join("\n".join(block) for block in blocks)


def _is_brief(row: ShownKey, shown: Shown) -> bool:
    """Whether a tensor is one of several random states, of which nobody looks for the shards."""
    return row.kind == "rng" and len(shown.rows) > 1 and row.values is None


def _values(rows: Sequence[ShownKey], screen: Screen) -> list[str]:
    if len(rows) == 1:
        return [line for name, text in _alone(rows[0]) for line in wrapped(f"{name}  ", printable(text), screen)]
    wide = screen.width or FULL
    if not any(row.ranks for row in rows):
        return table(VALUE_COLUMNS, [(row.name, _brief(row, wide)) for row in rows], screen)
    return table(RANK_COLUMNS, [cells for row in rows for cells in _by_rank(row, wide)], screen)


def _alone(row: ShownKey) -> Iterator[tuple[str, str]]:
    """A value in full behind its name; where ranks hold different ones each behind its ranks too."""
    name = printable(clip(row.name, FULL))
    if not row.ranks:
        yield name, _in_full(row.value, row.note, row.type)
    for of in row.ranks:
        yield f"{name}  {_ranks(of)}", _in_full(of.value, of.note, row.type)


def _by_rank(row: ShownKey, wide: int) -> Iterator[tuple[str, str, str]]:
    """The cells of a value under `RANK_COLUMNS`: a row for each of those that ranks hold."""
    if not row.ranks:
        yield row.name, "-", _brief(row, wide)
    for of in row.ranks:
        yield row.name, spans(of.ranks), of.note or value_text(of.value, wide)


def _ranks(of: RankValue) -> str:
    return f"rank {of.ranks[0]}:" if len(of.ranks) == 1 else f"ranks {spans(of.ranks)}:"


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
    """A line for each generator: how many of its states differ, and their checksums by rank."""
    for row in streams:
        whose = (rank if rank.startswith("shard ") else f"rank {rank}" for rank in row.fingerprints)
        prints = [f"{rank} {digits}" for rank, digits in zip(whose, row.fingerprints.values(), strict=True)]
        told = f"{row.distinct} distinct of {row.ranks}" if row.ranks > 1 else "one state"
        known = f"fingerprint {few(prints, 8)}" if prints else ""
        yield printable("; ".join(filter(None, (f"{row.stream}: {told}", known, row.problem))))


def _tensor_lines(row: ShownKey, screen: Screen) -> Iterator[str]:
    yield from wrapped(f"{printable(clip(row.name, FULL))}  ", printable(tensor_facts(row)), screen)
    if row.tied:
        yield printable(f"tied to {row.tied}")
    for told in filter(None, (row.note, holes_line(row), row.problem)):
        yield from wrapped("", printable(told), screen)
    if row.statistics is not None:
        yield from wrapped("", figures_line(row.statistics), screen)
    if row.values is not None:
        yield f"[{printable(row.slice)}]"
        yield from element_lines(row.values, row.dtype)
    else:
        yield from shard_map(row.shape or (), row.shards)
        yield from table(SHARD_COLUMNS, [shard_cells(shard) for shard in row.shards if not shard.parts], screen)
        yield from table(PART_COLUMNS, [cells for shard in row.shards for cells in part_cells(shard)], screen)


def tensor_facts(row: ShownKey) -> str:
    """What is known of a tensor: `fp32 [4, 8], 32 params, 128 B, dim 0 over 4 ranks`."""
    facts = f"{short(row.dtype)} {shape(row.shape or ())}", f"{count(row.params)} params", size(row.bytes), row.layout
    return ", ".join(facts)


def holes_line(row: ShownKey) -> str:
    """What of a tensor no file here holds; "" where nothing is missing."""
    if not row.missing:
        return ""
    ranks = sorted({shard.rank for shard in row.shards if shard.status != "here" and shard.rank is not None})
    of = f" (rank{'s' if len(ranks) > 1 else ''} {few(list(map(str, ranks)))})" if ranks else ""
    return f"MISSING: no file here holds {row.missing} of its {row.params} elements{of}: {few(row.holes, 4)}"


def figures_line(found: Any) -> str:
    """The figures of a small tensor in one line."""
    told = [f"{name} {'-' if found[name] is None else number(found[name])}" for name in ("rms", "min", "max", "mean")]
    zeros = f"{found['zeros']} of {found['elements']} zero"
    return ", ".join([*told, zeros, f"{found['nan']} NaN", f"{found['inf']} infinite"])


def shard_cells(shard: ShardRow, absent: str = "") -> list[str]:
    """The cells of a shard under `SHARD_COLUMNS`.

    Args:
        shard: the shard.
        absent: what stands for its file where none is known; "" for what its status says.
    """
    region = str(Box(shard.offsets, shard.sizes))
    rank = "-" if shard.rank is None else str(shard.rank)
    nbytes = "-" if prod(shard.sizes) and not shard.bytes else size(shard.bytes)
    file = Path(shard.file).name if shard.file else absent or shard.status.upper()
    if shard.status != "here":
        return [rank, region, file, shard.note if shard.file else "-", "-", nbytes, "-"]
    return [rank, region, file, shard.record or "-", str(shard.offset), nbytes, shard.crc or "-"]


def part_cells(shard: ShardRow) -> Iterator[list[str]]:
    """The cells under `PART_COLUMNS` of what a shard is stored as."""
    rank, region, file, *_ = shard_cells(shard)
    for part in shard.parts:
        holds = f"{part.name} {short(part.dtype)} {shape(part.shape)}" + (f", per {part.per}" if part.per else "")
        yield [rank, region, holds, file, part.record or "-", str(part.offset), size(part.bytes), part.crc or "-"]


def element_lines(values: Any, dtype: str) -> Iterator[str]:
    """Elements row by row; of more than two dimensions each matrix with its place before it."""
    if not isinstance(values, list):
        yield _element(values, dtype)
        return
    rows = list(_rows(values, ()))
    cells = [[_element(value, dtype) for value in row] for _, row in rows]
    width = max((len(cell) for row in cells for cell in row), default=0)
    for (place, _), row in zip(rows, cells, strict=True):
        before = f"[{', '.join(map(str, place))}]  " if len(place) > 1 else ""
        yield before + "  ".join(cell.rjust(width) for cell in row)


def _rows(values: list[Any], place: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], list[Any]]]:
    if not values or not isinstance(values[0], list):
        yield place, values
        return
    for n, inside in enumerate(values):
        yield from _rows(inside, (*place, n))


def _element(value: Any, dtype: str) -> str:
    return f"{value:.{DIGITS.get(dtype, 4)}g}" if isinstance(value, float) else str(value)
