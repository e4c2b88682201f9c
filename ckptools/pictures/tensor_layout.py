"""Draw the layout of a tensor: the rank that holds each region, to scale, with the gaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptools.contents.record import ShardRow
from ckptools.contents.show import DrawnPiece, DrawnShard, TensorLayout, layout_of, layout_words
from ckptools.display.drawing import (
    WIDTH,
    Key,
    Picture,
    Rect,
    label,
    legend,
    letter_of,
    mark,
    name_text,
    rect,
    svg,
    text_lines,
)
from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Tensor
from ckptools.pictures.rank_map import STATES, State
from ckptools.text import named_ranks, plural

# One sharded dimension makes a strip, two make a grid; further copies of a region are in strips or grids below.


ACROSS = 16
"""Regions in one line of a strip before it continues in the next line."""

MAX_RECTS = 4096
"""At most this many rectangles in a picture; further copies, then further regions, are only counted."""

RUNS_FROM = 128
"""From this number of regions on, a strip merges neighbouring regions, and a grid labels only the first of each row
and missing ones."""

MAX_COPIES = 8
MAX_HOLES = 64
STRIP, GRID = 22.0, 200.0
"""Height of a line of a strip, and of a grid."""

FLAT = "more than two dimensions are cut: pieces in order of their places, as wide as they have elements"


HERE = Key("sky", "", "here")
ODD_RANKS = Key("light", "", "likewise, of odd ranks")
OVERLAP = Key("bad", "X", "two pieces overlap")
ABSENT = Key("paper edge dash", "", "in no file that was read")
"""A region whose file was not read; of a missing rank, it looks as the rank does in the map of ranks."""

States = Mapping[int, State]
"""The state of each rank as the map of ranks shows it; empty if no map was drawn."""


def tensor_layout(
    tensor: Tensor, name: str = "", rows: Iterable[ShardRow] | None = None, states: States | None = None
) -> Picture:
    """Draw which rank holds which region of a tensor, every copy of it, and the gaps in the files that were read.

    `rows` are its shards as `ckptools.contents.show.shard_rows` finds them in the files; if None, the shards that the
    tensor states are drawn, without reading files. `states` colour each region as the map of ranks colours its rank.
    """
    layout = layout_of(tensor, rows)
    title = f"layout of {name_text(name)}" if name else "layout of a tensor"
    text = "\n".join([title, *layout_words(layout)])
    drawn, height = _drawn(layout, states or {})
    return Picture(title, svg(title, text, drawn, height), text)


def strip_cells(start: int, length: int, each: int) -> Iterator[tuple[int, float, float]]:
    """Place a range in a strip with `each` elements per line: yield `(line, x, width)` for each line."""
    while length > 0:
        at, first = divmod(start, each)
        taken = min(length, each - first)
        yield at, first / each * WIDTH, taken / each * WIDTH
        start, length = start + taken, length - taken


def box_rects(box: Box, shape: Ints, cut: Ints, each: int) -> Iterator[Rect]:
    """Yield the rectangles of a box in one strip or grid; boxes that cover a tensor fill it.

    Only the dimensions in `cut` are drawn: none, one or two. A line of a strip has `each` elements of that dimension.
    """
    if not cut:
        yield Rect(0, 0, WIDTH, STRIP)
    elif len(cut) == 1:
        run = box.offsets[cut[0]], box.sizes[cut[0]]
        for at, x, width in strip_cells(*run, each):
            yield Rect(x, at * STRIP, width, STRIP)
    else:
        scales = [(d, shape[d], room) for d, room in zip(cut, (GRID, WIDTH), strict=True)]
        y, x = (box.offsets[d] / whole * room for d, whole, room in scales)
        height, width = (box.sizes[d] / whole * room for d, whole, room in scales)
        yield Rect(x, y, width, height)


class _Panel(NamedTuple):
    """The strip or grid of one copy of a tensor, with the position of each region.

    If one dimension is cut into many regions, neighbouring ones are merged (`runs`). A tensor sharded in many
    dimensions is `flat`: one row of all its elements, region after region.
    """

    shape: Ints
    cut: Ints
    each: int
    places: dict[Box, Box]
    holes: tuple[Box, ...]
    flat: bool
    runs: bool = False

    @property
    def lines(self) -> int:
        """Number of lines of a strip."""
        return -(-self.shape[self.cut[0]] // self.each) if len(self.cut) == 1 else 1

    @property
    def height(self) -> float:
        """Height in the picture."""
        return GRID if len(self.cut) == 2 else self.lines * STRIP

    def rects(self, box: Box, top: float) -> Iterator[Rect]:
        """Yield the rectangles of a region, in a panel that begins at `top`."""
        for at in box_rects(box, self.shape, self.cut, self.each):
            yield at._replace(y=at.y + top)


def _panel(layout: TensorLayout) -> _Panel:
    cut, gaps = layout.cut, layout.cover.gaps[:MAX_HOLES] if layout.cover else ()
    if len(cut) > 2:
        places, at = {}, 0
        for box in dict.fromkeys([*(p.box for p in layout.pieces), *gaps]):
            places[box] = Box((at,), (box.numel,))
            at += box.numel
        pieces = {p.box: places[p.box] for p in layout.pieces}
        holes = tuple(places[gap] for gap in gaps if gap not in pieces)
        return _Panel((at,), (0,), _line_length(at, [box.numel for box in places]), pieces, holes, True)
    shape = layout.tensor.shape
    runs = len(cut) == 1 and len(layout.pieces) >= RUNS_FROM and not (layout.cover and layout.cover.overlaps)
    each = _line_length(shape[cut[0]], [p.box.sizes[cut[0]] for p in layout.pieces]) if len(cut) == 1 else 1
    each = shape[cut[0]] if runs else each
    return _Panel(shape, cut, each, {p.box: p.box for p in layout.pieces}, gaps, False, runs)


def _line_length(whole: int, lengths: Sequence[int]) -> int:
    """Choose the elements per line of a strip, so that lines end where regions end if those are equally long."""
    lines = -(-len(lengths) // ACROSS)
    if lines < 2:
        return whole
    each = max(lengths) * ACROSS
    return each if -(-whole // each) <= lines else -(-whole // lines)


def _drawn(layout: TensorLayout, states: States) -> tuple[list[str], float]:
    facts = [line for line in layout_words(layout) if not line.startswith("  ")]
    parts, y = text_lines(facts)
    if not layout.tensor.numel or not (layout.pieces or (layout.cover and layout.cover.gaps)):
        parts.append(rect(Rect(0, y, WIDTH, STRIP), "edge dash"))
        return parts, y + STRIP
    panel = _panel(layout)
    if panel.cut:
        parts.append(label(0, y + 10, _axis(layout, panel), "faint"))
        y += 16
    most = MAX_COPIES if panel.lines == 1 and len(panel.cut) < 2 else 4
    drawn = max(1, min(layout.copies, most, MAX_RECTS // max(1, len(layout.pieces))))
    for copy in range(drawn):
        parts += _panel_parts(layout, panel, copy, y, states)
        y += panel.height + (6 if len(panel.cut) == 2 or panel.lines > 1 else 0)
    if len(layout.pieces) > MAX_RECTS:
        parts.append(label(0, y + 14, f"{len(layout.pieces) - MAX_RECTS} more pieces are not drawn", "ink"))
        y += 20
    if layout.copies > drawn:
        parts.append(label(0, y + 14, f"{plural(layout.copies - drawn, 'more copy', 'more copies')} of each", "ink"))
        y += 20
    keys, bottom = legend(_keys(layout, panel, states), y + 8)
    return [*parts, keys], bottom


def _axis(layout: TensorLayout, panel: _Panel) -> str:
    if panel.flat:
        return FLAT
    dims = [f"dim {d} (0:{layout.tensor.shape[d]})" for d in panel.cut]
    if len(dims) == 2:
        return f"{dims[0]} down, {dims[1]} across"
    return f"{dims[0]} from left to right" + (f", in {panel.lines} lines" if panel.lines > 1 else "")


def _panel_parts(layout: TensorLayout, panel: _Panel, copy: int, top: float, states: States) -> Iterator[str]:
    """Draw the holes (in the first panel), one copy of every region, and the overlaps."""
    for gap in panel.holes if copy == 0 else ():
        for at in panel.rects(gap, top):
            yield rect(at.inset(1), ABSENT.kind, f"{'a hole' if panel.flat else gap}: {ABSENT.means}")
    if panel.runs:
        yield from _run_parts(layout, panel, copy, top, states)
        return
    for piece in layout.pieces[:MAX_RECTS]:
        if copy < len(piece.copies):
            shard = piece.copies[copy]
            first = not piece.box.offsets[panel.cut[-1]] if panel.cut else True
            named = len(layout.pieces) < RUNS_FROM or first or not shard.here
            places = panel.rects(panel.places[piece.box], top)
            yield from _shard_parts(shard, _key(layout, shard, states), places, named)
    for a, b in layout.cover.overlaps if layout.cover and not copy and not panel.flat else ():
        both = a.intersect(b)
        for at in panel.rects(both, top) if both else ():
            yield rect(at, OVERLAP.kind, f"{both}: {a} and {b} overlap") + mark(at, OVERLAP.letter)


def _run_parts(layout: TensorLayout, panel: _Panel, copy: int, top: float, states: States) -> Iterator[str]:
    """Draw neighbouring regions of one dimension as one rectangle, if their ranks are in one state."""
    runs: list[tuple[Key, list[DrawnPiece]]] = []
    dim = panel.cut[0]
    for piece in (piece for piece in layout.pieces if copy < len(piece.copies)):
        key = _key(layout, piece.copies[copy], states)
        before = runs[-1][1][-1].box if runs else None
        adjoins = before is not None and before.offsets[dim] + before.sizes[dim] == piece.box.offsets[dim]
        if not adjoins or runs[-1][0] != key:
            runs.append((key, []))
        runs[-1][1].append(piece)
    for key, run in runs:
        first, last = run[0].box, run[-1].box
        end = last.offsets[dim] + last.sizes[dim]
        ranks = {rank for piece in run if (rank := piece.copies[copy].rank) is not None}
        whose = named_ranks(ranks) if ranks else "ranks unknown"
        hover = f"{whose}: {plural(len(run), 'piece')}, {first.offsets[dim]} to {end} of dim {dim}"
        if not run[0].copies[copy].here:
            hover += f", {ABSENT.means}"
        sizes = (*first.sizes[:dim], end - first.offsets[dim], *first.sizes[dim + 1 :])
        for place in panel.rects(Box(first.offsets, sizes), top):
            at = place.inset(1)
            yield rect(at, key.kind, hover)
            behind = " missing" if key is ABSENT else f" {key.letter}".rstrip()
            yield mark(at, f"{whose}{behind}", letter_of(key)) or mark(at, key.letter, letter_of(key))


def _shard_parts(shard: DrawnShard, key: Key, places: Iterable[Rect], named: bool) -> Iterator[str]:
    whose = "rank unknown" if shard.rank is None else f"rank {shard.rank}"
    hover = f"{whose}: {shard.box}" + ("" if shard.here else f", {shard.note}")
    rank = "?" if shard.rank is None else str(shard.rank)
    for place in places:
        at = place.inset(1)
        yield rect(at, key.kind, hover)
        if named:
            yield mark(at, f"{rank} {key.letter}".rstrip(), letter_of(key)) or mark(at, rank, letter_of(key))


def _key(layout: TensorLayout, shard: DrawnShard, states: States) -> Key:
    """Return the entry of the legend for a shard: that of its rank in the map of ranks, if the whole file is to blame.

    What the map shows of values, such as NaN, may be about other tensors of the rank.
    """
    state = None if shard.rank is None else states.get(shard.rank)
    if not shard.here:
        return STATES[state] if state in ("missing", "cut") else ABSENT
    if state == "step":
        return STATES[state]
    return ODD_RANKS if layout.in_fragments and (shard.rank or 0) % 2 else HERE


def _keys(layout: TensorLayout, panel: _Panel, states: States) -> Iterator[Key]:
    """Yield the entries of the legend: the states of the ranks, as in the map of ranks, then gaps and overlaps."""
    found = {_key(layout, shard, states) for shard in layout.shards if shard.box.numel}
    lost = found & {STATES["missing"], STATES["cut"]}
    found |= {ABSENT} if panel.holes and not lost else set()
    overlaps = {OVERLAP} if layout.cover and layout.cover.overlaps else set()
    yield from (key for key in (HERE, *STATES.values(), ODD_RANKS, ABSENT, OVERLAP) if key in found | overlaps)
