"""The text of `tree`: repeated layers in one line, totals for each branch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.contents.record import KeyRow, Keys, KeySection, ShardRow, Shown, ShownKey
from ckptools.contents.tree import totals
from ckptools.display.screen import PIPE, Mark, Screen, painted
from ckptools.display.tables import Column, broken, table, value_text, wrapped
from ckptools.dtypes import short
from ckptools.keys.entries import Branch, fold, label_text, tree_of
from ckptools.keys.random_states import StreamRow
from ckptools.model.records import grouped
from ckptools.model.regions import Box, Ints
from ckptools.text import clip, clip_middle, count, few, named_ranks, number, plural, printable, shape, size, spans

MAX_LABEL = 160
"""Longest label in characters when piped; a name in a file may have any length."""

MAX_VALUE = 400
"""Longest value in characters when piped."""

NARROWEST = 24
"""Narrowest column of names in characters, if a screen has room for it."""

FEWEST = 8
"""Fewest characters of a name, or of a text behind it, in a line."""


class Glyphs(NamedTuple):
    """Lines drawn before a key that has later siblings, before the last one, and before the keys below each."""

    branch: str
    last: str
    through: str
    below: str


BOXES = Glyphs("├─ ", "└─ ", "│  ", "   ")
ASCII = Glyphs("|- ", "`- ", "|  ", "   ")


def glyphs(encoding: str | None) -> Glyphs:
    """Choose the line characters of a tree: box characters, or ASCII if the encoding lacks them."""
    try:
        "".join(BOXES).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BOXES


@dataclass(frozen=True)
class TreeForm:
    """Options of a tree.

    Attributes:
        depth: number of levels, the sections being the first; None for all.
        limit: number of lines; 0 for all, None for as many as fit the terminal.
    """

    expand: bool = False
    depth: int | None = None
    limit: int | None = None
    glyphs: Glyphs = BOXES


class _TreeLine(NamedTuple):
    """A key or branch of the tree: drawn branches and a name, then cells, or a text instead of cells.

    `below` is drawn before the next lines if the name or the text takes several.
    """

    drawn: str
    below: str
    name: str
    cells: tuple[str, ...] = ()
    text: str = ""


def tree_text(keys: Keys, form: TreeForm = TreeForm(), screen: Screen = PIPE) -> str:
    """Render the keys as a tree: a line for the checkpoint, and below it the sections."""
    lines = list(_lines(keys, form))
    limit = screen.rows if form.limit is None else form.limit
    kept = lines[:limit] if limit else lines
    counted = f"{plural(keys.tensors, 'tensor')}, {count(keys.params)} params, {size(keys.bytes)}"
    values = len(keys.rows) - keys.tensors
    others = f"; {plural(values, 'other value')}" if values else ""
    head = f"{printable(clip(keys.name, MAX_LABEL))}   {counted}{others}"
    left = len(lines) - len(kept)
    more = [f"{plural(left, 'more line')}: --limit 0 for all, --depth 2 for fewer"] if left else []
    return "\n".join([*wrapped("", head, screen, mark="heading"), *_laid_out(kept, screen), *more])


def _lines(keys: Keys, form: TreeForm) -> Iterator[_TreeLine]:
    for branch in branches_of(keys, form.expand):
        yield from _branch_lines(branch, "", "", 1, form)


def branches_of(keys: Keys, expand: bool = False) -> Iterator[Branch[KeyRow]]:
    """Yield the tree of each section; repeated layers are folded into one line unless `expand`."""
    rows = grouped(keys.rows, lambda row: row.section)
    for section in keys.sections:
        yield _branch_of(section, rows[section.name], expand)


def _branch_of(section: KeySection, rows: Sequence[KeyRow], expand: bool) -> Branch[KeyRow]:
    here = [row for row in rows if row.name == section.prefix]
    inside = [(_rest(row.name, section.prefix), row) for row in rows if row.name != section.prefix]
    branches = tree_of(inside)
    return Branch((section.name,), here, branches if expand else fold(branches, _alike, _value, _is_tensor))


def _rest(name: str, prefix: str) -> str:
    return name[len(prefix) + 1 :] if prefix and name.startswith(f"{prefix}.") else name


def _alike(row: KeyRow) -> tuple[object, ...]:
    """Return the facts that must be equal for keys to be folded into one line; plain values may differ."""
    known = row.type, row.shape, row.dtype, row.layout, bool(row.tied)
    return (*known, row.note) if _is_tensor(row) else known


def _value(row: KeyRow) -> object:
    return row.note or repr(row.value)


def _is_tensor(row: KeyRow) -> bool:
    return row.type == "tensor"


def _branch_lines(branch: Branch[KeyRow], first: str, rest: str, level: int, form: TreeForm) -> Iterator[_TreeLine]:
    """Yield the lines of a branch: `first` is drawn before its own line, `rest` before the lines below it."""
    name, branch = joined(branch) if level > 1 else (label_text(branch.labels), branch)
    yield _tree_line(first, rest, name, branch)
    if form.depth is not None and level >= form.depth:
        return
    for n, child in enumerate(branch.children):
        last = n == len(branch.children) - 1
        drawn = form.glyphs.last if last else form.glyphs.branch
        below = form.glyphs.below if last else form.glyphs.through
        yield from _branch_lines(child, rest + drawn, rest + below, level + 1, form)


def joined(branch: Branch[KeyRow]) -> tuple[str, Branch[KeyRow]]:
    """Join a branch with its only child, repeatedly, as `a.b.c`; return the name and the last branch."""
    names = [label_text(branch.labels)]
    while not branch.items and len(branch.children) == 1:
        branch = branch.children[0]
        names.append(label_text(branch.labels))
    return ".".join(names), branch


def _tree_line(drawn: str, below: str, name: str, branch: Branch[KeyRow]) -> _TreeLine:
    shown = printable(clip_middle(name, MAX_LABEL))
    if branch.items and _is_tensor(branch.items[0]):
        item = branch.items[0]
        cells = shape(item.shape or ()), count(item.params), size(item.bytes), short(item.dtype), item.layout
        tied = [f"tied to {few(list(dict.fromkeys(row.tied for row in branch.items)), 2)}"] if item.tied else []
        times = [f"x{len(branch.items)}"] if len(branch.items) > 1 else []
        behind = "  ".join([*times, *tied, *([item.note] if item.note else [])])
        return _TreeLine(drawn, below, shown, (*map(printable, cells), printable(clip(behind, MAX_VALUE))))
    if branch.items:
        return _TreeLine(drawn, below, shown, text=values_text(branch.items))
    rows = rows_in(branch)
    total = totals(rows)
    if not total.tensors:
        return _TreeLine(drawn, below, shown, text=plural(len(rows), "value"))
    return _TreeLine(drawn, below, shown, (plural(total.tensors, "tensor"), count(total.params), size(total.bytes)))


def rows_in(branch: Branch[KeyRow]) -> list[KeyRow]:
    """Collect all keys of a branch."""
    rows = list(branch.items)
    for child in branch.children:
        rows += rows_in(child)
    return rows


def values_text(rows: Sequence[KeyRow]) -> str:
    """List the distinct values of some keys, in their order."""
    texts = list(dict.fromkeys(value_text(row.value, MAX_VALUE) if not row.note else row.note for row in rows))
    crcs = [text for text in texts if ", crc " in text]
    if len(rows) > 1 and len(crcs) == len(texts):
        return f"{texts[0].partition(', crc ')[0]}, {len(crcs)} distinct of {len(rows)}"
    times = f"  x{len(rows)}" if len(rows) > 1 else ""
    return printable(clip(few(texts, 4), MAX_VALUE)) + times


RIGHT = (True, True, True, False, False, False)
"""True for each cell that is aligned right, as numbers are."""

PARAMS, LAYOUT = 1, 4
"""Cells on narrow screens: the first is left out, as the shape implies it; the second has a shorter form."""


def _laid_out(lines: Sequence[_TreeLine], screen: Screen) -> Iterator[str]:
    """Align the cells behind the names; on a narrow screen say the usual layout once, and wrap names and texts."""
    name = max((len(line.drawn) + len(line.name) for line in lines), default=0)
    if screen.width is not None and _width(name, _widths(lines)) > screen.width:
        full, lines = lines, [_shorter(line) for line in lines]
        if usual := _usual_layout(full) if _narrow_width(name, lines) > screen.width else "":
            yield from wrapped("", f"layout of a tensor, if its line names no other: {usual}", screen, mark="dim")
            lines = [_shorter(_without_layout(line, usual)) for line in full]
        excess = _narrow_width(name, lines) - screen.width
        name = max(name - max(excess, 0), min(name, NARROWEST, screen.width // 2))
    widths = _widths(lines)
    for line in lines:
        yield from _shown(line, name, widths, screen)


def _usual_layout(lines: Sequence[_TreeLine]) -> str:
    """Return the layout of most tensors; "" if no layout has so many."""
    layouts = Counter(line.cells[LAYOUT] for line in lines if len(line.cells) > LAYOUT)
    usual, times = layouts.most_common(1)[0] if layouts else ("", 0)
    return usual if 2 * times > layouts.total() else ""


def _without_layout(line: _TreeLine, usual: str) -> _TreeLine:
    cells = line.cells
    same = len(cells) > LAYOUT and cells[LAYOUT] == usual
    return line._replace(cells=(*cells[:LAYOUT], "", *cells[LAYOUT + 1 :])) if same else line


def _widths(lines: Sequence[_TreeLine]) -> list[int]:
    """Return the width of each cell after the name; 0 if the cell is empty in all lines."""
    return [max((len(line.cells[n]) for line in lines if len(line.cells) > n), default=0) for n in range(len(RIGHT))]


def _width(name: int, widths: Sequence[int]) -> int:
    return name + sum(width + 2 for width in widths if width)


def _narrow_width(name: int, lines: Sequence[_TreeLine]) -> int:
    """Return the width of lines whose last cells wrap."""
    *widths, last = _widths(lines)
    return _width(name, [*widths, min(last, FEWEST)])


def _shorter(line: _TreeLine) -> _TreeLine:
    """Shorten a line: leave out the number of elements, and write `dim 0 / 4` for `dim 0 over 4 ranks`."""
    cells = list(line.cells)
    if len(cells) > PARAMS:
        cells[PARAMS] = ""
    if len(cells) > LAYOUT:
        cells[LAYOUT] = cells[LAYOUT].removesuffix(" ranks").replace(" over ", " / ")
    return line._replace(cells=tuple(cells))


def _shown(line: _TreeLine, name: int, widths: Sequence[int], screen: Screen) -> Iterator[str]:
    """Render a line of the tree; what does not fit goes on below, behind the branches drawn there.

    A name that is longer than its column has a line of its own, so that it can be copied.
    """
    mark: Mark = "values" if line.text else ""
    filled = [one for one in zip(line.cells, widths, RIGHT, strict=False) if one[1]]
    behind = "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in filled).rstrip()
    names, texts = [line.name], [line.text or behind]
    if screen.width is not None:
        names = broken(line.name, max(screen.width - len(line.drawn), FEWEST))
        texts = broken(texts[0], max(screen.width - max(name, len(line.drawn)) - len("  "), FEWEST))
        if len(line.drawn) + len(line.name) > name:
            texts = [""] * len(names) + texts
    for n, (part, text) in enumerate(zip_longest(names, texts, fillvalue="")):
        drawn = line.below if n else line.drawn
        shown = f"{drawn}{part.ljust(name - len(drawn))}  {text}".rstrip()
        shown = shown if screen.width is None else clip(shown, screen.width)
        at = max(name, len(drawn) + len(part))
        yield painted(drawn, "dim", screen.color) + shown[len(drawn) : at] + painted(shown[at:], mark, screen.color)


# -- the text of `show`: values in full, tensors with their shards and a map of ranks ----------------------------------


VALUE_COLUMNS = (Column("key", "name"), Column("value", "value"))
RANK_COLUMNS = (Column("key", "name"), Column("ranks"), Column("value", "value"))
SHARD_COLUMNS = (
    Column("rank", "number"),
    Column("region"),
    Column("file", "place"),
    Column("record", "place"),
    Column("offset", "number"),
    Column("size", "number"),
    Column("crc"),
)

PART_COLUMNS = (*SHARD_COLUMNS[:2], Column("holds", "place"), *SHARD_COLUMNS[2:])
"""Columns for the tensors in which a subclass, such as a quantized weight, stores a shard."""

FULL = 100_000
"""Longest value in characters that is shown in full."""

DIGITS = {"float64": 17, "float32": 9, "float16": 5, "bfloat16": 4}
"""Significant digits that tell neighbouring elements apart; 4 are enough for elements of 8 bits."""

WIDE, HIGH = 64, 16
"""Most cells per line, and lines per grid, of the map of ranks; a one-dimensional map wraps."""

RANKS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Characters for ranks; a higher rank is `#`, and `.` marks a region that no file contains."""


def shown_text(shown: Shown, screen: Screen = PIPE) -> str:
    """Render random states as fingerprints, then tensors with their shards, then values: in a table, or one in full."""
    tensors = [row for row in shown.rows if row.type == "tensor" and not _is_brief(row, shown)]
    values = [row for row in shown.rows if row.type != "tensor" or _is_brief(row, shown)]
    streams = [line for text in stream_lines(shown.streams) for line in wrapped("", text, screen)]
    blocks = [streams] if streams else []
    blocks += [list(_tensor_lines(row, screen)) for row in tensors]
    blocks += [_values(values, screen)] if values else []
    return "\n\n".join("\n".join(block) for block in blocks)


def _is_brief(row: ShownKey, shown: Shown) -> bool:
    """Whether a tensor is one of several random states, so that its shards need not be shown."""
    return row.kind == "rng" and len(shown.rows) > 1 and row.values is None


def _values(rows: Sequence[ShownKey], screen: Screen) -> list[str]:
    if len(rows) == 1:
        alone = _alone(rows[0])
        return [ln for name, text in alone for ln in wrapped(f"{name}  ", printable(text), screen, "heading", "values")]
    wide = screen.width or FULL
    if not any(row.ranks for row in rows):
        return table(VALUE_COLUMNS, [(row.name, _brief(row, wide)) for row in rows], screen)
    return table(RANK_COLUMNS, [cells for row in rows for cells in _by_rank(row, wide)], screen)


def _alone(row: ShownKey) -> Iterator[tuple[str, str]]:
    """Yield the value in full after its name; if ranks differ, each value after its ranks."""
    name = printable(clip(row.name, FULL))
    if not row.ranks:
        yield name, _in_full(row.value, row.note, row.type)
    for of in row.ranks:
        yield f"{name}  {named_ranks(of.ranks)}:", _in_full(of.value, of.note, row.type)


def _by_rank(row: ShownKey, wide: int) -> Iterator[tuple[str, str, str]]:
    if not row.ranks:
        yield row.name, "-", _brief(row, wide)
    for of in row.ranks:
        yield row.name, spans(of.ranks), of.note or _words(of.value, row.type, wide)


def _brief(row: ShownKey, wide: int) -> str:
    if row.type != "tensor":
        return row.note or _words(row.value, row.type, wide)
    crcs = dict.fromkeys(shard.crc for shard in row.shards if shard.crc)
    return f"{short(row.dtype)} {shape(row.shape or ())}" + (f", crc {', '.join(crcs)}" if crcs else "")


def _in_full(value: Any, note: str, kind: str) -> str:
    if value is None:
        return note or "None"
    if isinstance(value, list):
        inside = ", ".join(value_text(item, FULL) for item in value)
        return f"{note}: [{inside}]" if note else f"[{inside}]"
    return f"{note}: {value}" if kind == "bytes" else _words(value, kind, FULL)


def _words(value: Any, kind: str, width: int) -> str:
    """Render a value in at most `width` characters: dates and complex numbers unquoted, a timedelta as `1:02:03`."""
    if kind == "timedelta" and isinstance(value, (int, float)):
        return str(timedelta(seconds=value))
    return clip(value, width) if isinstance(value, str) and kind != "str" else value_text(value, width)


def stream_lines(streams: Sequence[StreamRow]) -> Iterator[str]:
    """Yield a line for each random generator: the number of distinct states, and their checksums by rank."""
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
    if row.value is not None:
        yield painted(f"value {row.value}", "values", screen.color)
    elif row.statistics is not None:
        yield from wrapped("", figures_line(row.statistics), screen, mark="values")
    if row.values is not None:
        yield f"[{printable(row.slice)}]"
        lines = list(element_lines(row.values, row.dtype))
        if screen.width is not None and max(map(len, lines), default=0) > screen.width:
            lines = list(element_lines(row.values, row.dtype, placed=True))  # the index shows where a row begins
        for line in lines:
            place, bracket, cells = line.rpartition("]  ")
            yield from wrapped(place + bracket, cells, screen, mark="values")
    else:
        yield from shard_map(row.shape or (), row.shards)
        yield from table(SHARD_COLUMNS, [shard_cells(shard) for shard in row.shards if not shard.parts], screen)
        yield from table(PART_COLUMNS, [cells for shard in row.shards for cells in part_cells(shard)], screen)


def tensor_facts(row: ShownKey) -> str:
    """State dtype, shape, size and layout of a tensor: `fp32 [4, 8], 32 params, 128 B, dim 0 over 4 ranks`."""
    known = f"{short(row.dtype)} {shape(row.shape or ())}, {count(row.params)} params"
    return f"{known}, {size(row.bytes)}, {row.layout}"


def holes_line(row: ShownKey) -> str:
    """List the regions of a tensor that no file contains; "" if nothing is missing."""
    if not row.missing:
        return ""
    ranks = sorted({shard.rank for shard in row.shards if shard.status != "here" and shard.rank is not None})
    of = f" (rank{'s' if len(ranks) > 1 else ''} {few(list(map(str, ranks)))})" if ranks else ""
    return f"MISSING: no file here holds {row.missing} of its {row.params} elements{of}: {few(row.holes, 4)}"


def figures_line(found: Any) -> str:
    """Render the statistics of a small tensor in one line."""
    figures = [
        f"{name} {'-' if found[name] is None else number(found[name])}" for name in ("rms", "min", "max", "mean")
    ]
    zeros = f"{found['zeros']} of {found['elements']} zero"
    return ", ".join([*figures, zeros, f"{found['nan']} NaN", f"{found['inf']} infinite"])


def shard_cells(shard: ShardRow, absent: str = "") -> list[str]:
    """Make the cells of a shard for `SHARD_COLUMNS`; an unknown file becomes `absent` or the shard's status."""
    region = str(Box(shard.offsets, shard.sizes))
    rank = "-" if shard.rank is None else str(shard.rank)
    nbytes = "-" if prod(shard.sizes) and not shard.bytes else size(shard.bytes)
    file = Path(shard.file).name if shard.file else absent or shard.status.upper()
    if shard.status != "here":
        return [rank, region, file, shard.note if shard.file else "-", "-", nbytes, "-"]
    offset = "-" if shard.offset is None else str(shard.offset)
    return [rank, region, file, shard.record or "-", offset, nbytes, shard.crc or "-"]


def part_cells(shard: ShardRow) -> Iterator[list[str]]:
    """Make a row for each tensor that encodes a shard, such as `codes` and `scale`, for `PART_COLUMNS`."""
    rank, region, file, *_ = shard_cells(shard)
    for part in shard.parts:
        holds = f"{part.name} {short(part.dtype)} {shape(part.shape)}" + (f", per {part.per}" if part.per else "")
        yield [rank, region, holds, file, part.record or "-", str(part.offset), size(part.bytes), part.crc or "-"]


def element_lines(values: Any, dtype: str, placed: bool = False) -> Iterator[str]:
    """Render elements row by row, with the index of the row if `placed` or beyond two dimensions."""
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


# -- map of ranks ------------------------------------------------------------------------------------------------------


def shard_map(shape: Ints, shards: Iterable[ShardRow]) -> list[str]:
    """Draw which rank holds which cell of a tensor; no lines if it is sharded in no or more than two dimensions."""
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
    """Divide a dimension into at most `most` cells, each `(first, one past the last)`."""
    count = min(n, most)
    return [(i * n // count, (i + 1) * n // count) for i in range(count)]


def _line(shards: Sequence[ShardRow], cut: Sequence[int], row: tuple[int, int], columns: list[tuple[int, int]]) -> str:
    spans = [(row, column) if len(cut) == 2 else (column,) for column in columns]
    return "[" + "".join(_cell(shards, cut, span) for span in spans) + "]"


def _cell(shards: Sequence[ShardRow], cut: Sequence[int], span: Sequence[tuple[int, int]]) -> str:
    """The character of a cell: the first rank that holds some of it, or `.` if any of it is in no file."""
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
