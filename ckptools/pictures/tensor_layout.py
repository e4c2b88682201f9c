"""Draw the layout of a tensor: the rank that holds each region, to scale, with the gaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptools.contents.record import ShardRow
from ckptools.contents.show import DrawnPiece, DrawnShard, TensorLayout, layout_of, layout_words
from ckptools.display.drawing import (
    CHARACTER,
    WIDTH,
    Key,
    Picture,
    Rect,
    hatched,
    label,
    legend,
    mark,
    name_text,
    rect,
    svg,
)
from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Tensor
from ckptools.text import named_ranks, plural

# One sharded dimension makes a strip, two make a grid; further copies of a region are in strips or grids below.


ACROSS = 32
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


def tensor_layout(tensor: Tensor, name: str = "", rows: Iterable[ShardRow] | None = None) -> Picture:
    """Draw which rank holds which region of a tensor, every copy of it, and the gaps in the files that were read.

    `rows` are its shards as `ckptools.contents.show.shard_rows` finds them in the files; if None, the shards that the
    tensor states are drawn, without reading files.
    """
    layout = layout_of(tensor, rows)
    title = f"layout of {name_text(name)}" if name else "layout of a tensor"
    text = "\n".join([title, *layout_words(layout)])
    drawn, height = _drawn(layout)
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


def _drawn(layout: TensorLayout) -> tuple[list[str], float]:
    facts = [line for line in layout_words(layout) if not line.startswith("  ")]
    lines = [part for fact in facts for part in _lines(fact)]
    parts = [label(0, 12 + 16 * n, line, "ink" if line[:5].isupper() else "faint") for n, line in enumerate(lines)]
    y = 16.0 * len(lines) + 8
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
        parts += _panel_parts(layout, panel, copy, y)
        y += panel.height + (6 if len(panel.cut) == 2 or panel.lines > 1 else 0)
    if len(layout.pieces) > MAX_RECTS:
        parts.append(label(0, y + 14, f"{len(layout.pieces) - MAX_RECTS} more pieces are not drawn", "ink"))
        y += 20
    if layout.copies > drawn:
        parts.append(label(0, y + 14, f"{plural(layout.copies - drawn, 'more copy', 'more copies')} of each", "ink"))
        y += 20
    keys, bottom = legend(_keys(layout, panel), y + 8)
    return [*parts, keys], bottom


def _lines(text: str) -> list[str]:
    """Split a fact into at most two lines of the picture."""
    room = int(WIDTH / CHARACTER)
    if len(text) <= room:
        return [text]
    blank = text.rfind(" ", room // 2, room + 1)
    end = room if blank < 0 else blank
    return [text[:end], name_text(text[end:].lstrip(), room)]


def _axis(layout: TensorLayout, panel: _Panel) -> str:
    if panel.flat:
        return FLAT
    dims = [f"dim {d} (0:{layout.tensor.shape[d]})" for d in panel.cut]
    if len(dims) == 2:
        return f"{dims[0]} down, {dims[1]} across"
    return f"{dims[0]} from left to right" + (f", in {panel.lines} lines" if panel.lines > 1 else "")


def _panel_parts(layout: TensorLayout, panel: _Panel, copy: int, top: float) -> Iterator[str]:
    """Draw the holes (in the first panel), one copy of every region, and the overlaps."""
    for gap in panel.holes if copy == 0 else ():
        for at in panel.rects(gap, top):
            yield hatched(at.inset(1), f"{'a hole' if panel.flat else gap}: in no file that was read")
    if panel.runs:
        yield from _run_parts(layout, panel, copy, top)
        return
    tones = ("sky", "light") if layout.in_fragments else ("sky", "sky")
    for piece in layout.pieces[:MAX_RECTS]:
        if copy < len(piece.copies):
            shard = piece.copies[copy]
            first = not piece.box.offsets[panel.cut[-1]] if panel.cut else True
            named = len(layout.pieces) < RUNS_FROM or first or not shard.here
            places = panel.rects(panel.places[piece.box], top)
            yield from _shard_parts(shard, tones[(shard.rank or 0) % 2], places, named)
    for a, b in layout.cover.overlaps if layout.cover and not copy and not panel.flat else ():
        both = a.intersect(b)
        for at in panel.rects(both, top) if both else ():
            yield rect(at, "bad", f"{both}: {a} and {b} overlap") + mark(at, "X")


def _run_parts(layout: TensorLayout, panel: _Panel, copy: int, top: float) -> Iterator[str]:
    """Draw neighbouring regions of one dimension as one rectangle, if all or none are in files that were read."""
    runs: list[list[DrawnPiece]] = []
    dim = panel.cut[0]
    for piece in (piece for piece in layout.pieces if copy < len(piece.copies)):
        before = runs[-1][-1] if runs else None
        alike = before is not None and before.copies[copy].here == piece.copies[copy].here
        if before is None or not alike or before.box.offsets[dim] + before.box.sizes[dim] != piece.box.offsets[dim]:
            runs.append([])
        runs[-1].append(piece)
    for run in runs:
        first, last = run[0].box, run[-1].box
        end = last.offsets[dim] + last.sizes[dim]
        ranks = [p.copies[copy].rank for p in run if p.copies[copy].rank is not None]
        whose = named_ranks({rank for rank in ranks if rank is not None}) if ranks else "ranks unknown"
        here = run[0].copies[copy].here
        hover = f"{whose}: {plural(len(run), 'piece')}, {first.offsets[dim]} to {end} of dim {dim}"
        sizes = (*first.sizes[:dim], end - first.offsets[dim], *first.sizes[dim + 1 :])
        for place in panel.rects(Box(first.offsets, sizes), top):
            at = place.inset(1)
            yield rect(at, "sky", hover) if here else hatched(at, f"{hover}, in no file that was read")
            yield mark(at, whose if here else f"{whose} missing", "on" if here else "ink halo")


def _shard_parts(shard: DrawnShard, tone: str, places: Iterable[Rect], named: bool) -> Iterator[str]:
    whose = "rank unknown" if shard.rank is None else f"rank {shard.rank}"
    hover = f"{whose}: {shard.box}" + ("" if shard.here else f", {shard.note}")
    for place in places:
        at = place.inset(1)
        yield rect(at, tone, hover) if shard.here else hatched(at, hover)
        if named:
            yield mark(at, "?" if shard.rank is None else str(shard.rank), "on" if shard.here else "ink halo")


def _keys(layout: TensorLayout, panel: _Panel) -> Iterator[Key]:
    yield Key("sky", "0", "kept by this rank")
    if layout.in_fragments:
        yield Key("light", "1", "likewise, of odd ranks")
    if panel.holes or any(one.box.numel and not one.here for one in layout.shards):
        yield Key("hatched", "", "in no file that was read")
    if layout.cover and layout.cover.overlaps:
        yield Key("bad", "X", "two pieces overlap")
