"""The record of `tree` as text: repeated layers in one line, totals for each branch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptools.contents.record import KeyRow, Keys, KeySection
from ckptools.contents.tree import totals
from ckptools.display.lines import value_text
from ckptools.display.palette import painted
from ckptools.display.tables import PIPE, Screen
from ckptools.dtypes import short
from ckptools.keys.folding import Branch, fold, label_text, tree_of
from ckptools.text import clip, clip_middle, count, few, plural, printable, shape, size

MAX_LABEL = 160
"""Characters of a label in a pipe; a file can make a name as long as it likes."""

MAX_VALUE = 400
"""Characters of a value in a pipe."""

NARROWEST = 24
"""Names are never cut below this; on a narrower screen the ends of lines are cut."""


class Glyphs(NamedTuple):
    """Characters before a key: one that others follow, the last of its parent; and before what is inside of each."""

    branch: str
    last: str
    through: str
    below: str


BOXES = Glyphs("├─ ", "└─ ", "│  ", "   ")
ASCII = Glyphs("|- ", "`- ", "|  ", "   ")


def glyphs(encoding: str | None) -> Glyphs:
    """The characters of a tree for a stream of an encoding: ASCII if it has no box characters."""
    try:
        "".join(BOXES).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BOXES


@dataclass(frozen=True)
class TreeForm:
    """Options of a tree.

    Attributes:
        depth: number of levels, sections being the first; None for all.
        limit: number of lines; 0 for all, None for as many as fit a terminal.
    """

    expand: bool = False
    depth: int | None = None
    limit: int | None = None
    glyphs: Glyphs = BOXES


class _TreeLine(NamedTuple):
    """A line of the tree: its drawing and name, then cells, or a text in their place."""

    drawn: str
    name: str
    cells: tuple[str, ...] = ()
    text: str = ""


def tree_text(keys: Keys, form: TreeForm = TreeForm(), screen: Screen = PIPE) -> str:
    """Render the keys as a tree: a line for the checkpoint, and below it those of its sections."""
    lines = list(_lines(keys, form))
    limit = screen.rows if form.limit is None else form.limit
    kept = lines[:limit] if limit else lines
    counted = f"{plural(keys.tensors, 'tensor')}, {count(keys.params)} params, {size(keys.bytes)}"
    values = len(keys.rows) - keys.tensors
    others = f"; {plural(values, 'other value')}" if values else ""
    head = f"{printable(clip(keys.name, MAX_LABEL))}   {counted}{others}"
    left = len(lines) - len(kept)
    more = [f"{plural(left, 'more line')}: --limit 0 for all, --depth 2 for fewer"] if left else []
    title = painted(clip(head, screen.width or len(head)), "heading", screen.color)
    return "\n".join([title, *_laid_out(kept, screen), *more])


def _lines(keys: Keys, form: TreeForm) -> Iterator[_TreeLine]:
    for branch in branches_of(keys, form.expand):
        yield from _branch_lines(branch, "", "", 1, form)


def branches_of(keys: Keys, expand: bool = False) -> Iterator[Branch[KeyRow]]:
    """The tree of each section, with repeated layers folded unless it is to `expand` them."""
    rows: dict[str, list[KeyRow]] = {}
    for row in keys.rows:
        rows.setdefault(row.section, []).append(row)
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
    """The facts that folded keys share; values of param groups and the like may differ, and each is shown."""
    known = row.type, row.shape, row.dtype, row.layout, bool(row.tied)
    return (*known, row.note) if _is_tensor(row) else known


def _value(row: KeyRow) -> object:
    return row.note or repr(row.value)


def _is_tensor(row: KeyRow) -> bool:
    return row.type == "tensor"


def _branch_lines(branch: Branch[KeyRow], first: str, rest: str, level: int, form: TreeForm) -> Iterator[_TreeLine]:
    """The lines of a branch: `first` is drawn before its own, `rest` before those inside it."""
    name, branch = joined(branch) if level > 1 else (label_text(branch.labels), branch)
    yield _line(first, name, branch)
    if form.depth is not None and level >= form.depth:
        return
    for n, child in enumerate(branch.children):
        last = n == len(branch.children) - 1
        drawn = form.glyphs.last if last else form.glyphs.branch
        below = form.glyphs.below if last else form.glyphs.through
        yield from _branch_lines(child, rest + drawn, rest + below, level + 1, form)


def joined(branch: Branch[KeyRow]) -> tuple[str, Branch[KeyRow]]:
    """The name of a branch and where it leads: with those below it that alone go on in the same way."""
    names = [label_text(branch.labels)]
    while not branch.items and len(branch.children) == 1:
        branch = branch.children[0]
        names.append(label_text(branch.labels))
    return ".".join(names), branch


def _line(drawn: str, name: str, branch: Branch[KeyRow]) -> _TreeLine:
    shown = printable(clip_middle(name, MAX_LABEL))
    if branch.items and _is_tensor(branch.items[0]):
        return _TreeLine(drawn, shown, _tensor_cells(branch.items))
    if branch.items:
        return _TreeLine(drawn, shown, text=values_text(branch.items))
    rows = rows_in(branch)
    total = totals(rows)
    if not total.tensors:
        return _TreeLine(drawn, shown, text=plural(len(rows), "value"))
    return _TreeLine(drawn, shown, (plural(total.tensors, "tensor"), count(total.params), size(total.bytes)))


def rows_in(branch: Branch[KeyRow]) -> list[KeyRow]:
    """Every key of a branch."""
    rows = list(branch.items)
    for child in branch.children:
        rows += rows_in(child)
    return rows


def _tensor_cells(rows: Sequence[KeyRow]) -> tuple[str, ...]:
    first = rows[0]
    cells = shape(first.shape or ()), count(first.params), size(first.bytes), short(first.dtype), first.layout
    tied = [f"tied to {few(list(dict.fromkeys(row.tied for row in rows)), 2)}"] if first.tied else []
    times = [f"x{len(rows)}"] if len(rows) > 1 else []
    behind = "  ".join([*times, *tied, *([first.note] if first.note else [])])
    return (*map(printable, cells), printable(clip(behind, MAX_VALUE)))


def values_text(rows: Sequence[KeyRow]) -> str:
    """The distinct values of some keys, in their order."""
    texts = list(dict.fromkeys(value_text(row.value, MAX_VALUE) if not row.note else row.note for row in rows))
    crcs = [text for text in texts if ", crc " in text]
    if len(rows) > 1 and len(crcs) == len(texts):
        return f"{texts[0].partition(', crc ')[0]}, {len(crcs)} distinct of {len(rows)}"
    times = f"  x{len(rows)}" if len(rows) > 1 else ""
    return printable(clip(few(texts, 4), MAX_VALUE)) + times


RIGHT = (True, True, True, False, False, False)
"""Indices of the cells that are numbers."""

PARAMS, LAYOUT = 1, 4
"""The cell that a narrow screen leaves out, since the shape implies it, and the one with a shorter form."""


def _laid_out(lines: Sequence[_TreeLine], screen: Screen) -> list[str]:
    name = max((len(line.drawn) + len(line.name) for line in lines), default=0)
    widths = _widths(lines)
    if screen.width is not None and _width(name, widths) > screen.width:
        lines = [_shorter(line) for line in lines]
        widths = _widths(lines)
        excess = _width(name, widths) - screen.width
        name = max(name - max(excess, 0), min(name, NARROWEST))
    shown = [(_shown(line, name, widths), len(line.drawn)) for line in lines]
    cut = [(line if screen.width is None else clip(line, screen.width), drawn) for line, drawn in shown]
    return [painted(line[:drawn], "dim", screen.color) + line[drawn:] for line, drawn in cut]


def _widths(lines: Sequence[_TreeLine]) -> list[int]:
    """Width of each cell after the name; 0 for one that is empty in all lines."""
    return [max((len(line.cells[n]) for line in lines if len(line.cells) > n), default=0) for n in range(len(RIGHT))]


def _width(name: int, widths: Sequence[int]) -> int:
    return name + sum(width + 2 for width in widths if width)


def _shorter(line: _TreeLine) -> _TreeLine:
    """Shorten a line: no number of elements, and `dim 0 / 4` for `dim 0 over 4 ranks`."""
    cells = list(line.cells)
    if len(cells) > PARAMS:
        cells[PARAMS] = ""
    if len(cells) > LAYOUT:
        cells[LAYOUT] = cells[LAYOUT].removesuffix(" ranks").replace(" over ", " / ")
    return line._replace(cells=tuple(cells))


def _shown(line: _TreeLine, name: int, widths: Sequence[int]) -> str:
    label = (line.drawn + clip_middle(line.name, max(name - len(line.drawn), 8))).ljust(name)
    if line.text:
        return f"{label}  {line.text}"
    cells = zip(line.cells, widths, RIGHT, strict=False)
    padded = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells if width]
    return "  ".join([label, *padded]).rstrip()
