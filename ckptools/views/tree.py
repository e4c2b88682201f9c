"""The keys of a checkpoint as a tree of text: repeated layers in one line, totals for each branch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptools.contents.folding import Branch, fold, label_text, tree_of
from ckptools.contents.keys import totals
from ckptools.dtypes import short
from ckptools.model.keys import KeyRow, Keys, SectionRow
from ckptools.text import clip, clip_middle, count, few, plural, printable, shape, size
from ckptools.views.tables import PIPE, Screen
from ckptools.views.value_text import value_text

MAX_LABEL = 160
"""Characters of a label in a pipe; a file can make a name as long as it likes."""

MAX_VALUE = 400
"""Characters of a value in a pipe."""

NARROWEST = 24
"""The names are never cut below this; a screen that is narrower loses the end of its lines."""


class Glyphs(NamedTuple):
    """What the tree is drawn with.

    Attributes:
        branch: before a key that others follow.
        last: before the last key of its parent.
        through: below the first, before what is inside.
        below: below the last.
    """

    branch: str
    last: str
    through: str
    below: str


BOXES = Glyphs("├─ ", "└─ ", "│  ", "   ")
ASCII = Glyphs("|- ", "`- ", "|  ", "   ")


def glyphs(encoding: str | None) -> Glyphs:
    """What a tree is drawn with on a stream of an encoding: ASCII where it has no box characters."""
    try:
        "".join(BOXES).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BOXES


@dataclass(frozen=True)
class TreeForm:
    """How a tree is drawn.

    Attributes:
        expand: show each layer, also where many are the same.
        depth: levels that are shown, that of the sections is the first; None for all.
        limit: lines that are shown; 0 for all, None for what fits a terminal.
        glyphs: what it is drawn with.
    """

    expand: bool = False
    depth: int | None = None
    limit: int | None = None
    glyphs: Glyphs = BOXES


class _Line(NamedTuple):
    """A line of the tree: its drawing and name, the cells behind it, or a text in their place."""

    drawn: str
    name: str
    cells: tuple[str, ...] = ()
    text: str = ""


def tree_text(keys: Keys, form: TreeForm = TreeForm(), screen: Screen = PIPE) -> str:
    """The keys as a tree: a line for the checkpoint, and below it those of its sections."""
    lines = list(_lines(keys, form))
    limit = screen.rows if form.limit is None else form.limit
    kept = lines[:limit] if limit else lines
    head = f"{printable(clip(keys.name, MAX_LABEL))}   {_told(keys)}"
    left = len(lines) - len(kept)
    more = [f"{plural(left, 'more line')}: --limit 0 for all, --depth 2 for fewer"] if left else []
    return "\n".join([clip(head, screen.width or len(head)), *_laid_out(kept, screen), *more])


def _told(keys: Keys) -> str:
    counted = f"{plural(keys.tensors, 'tensor')}, {count(keys.params)} params, {size(keys.bytes)}"
    values = len(keys.rows) - keys.tensors
    return counted + (f"; {plural(values, 'other value')}" if values else "")


def _lines(keys: Keys, form: TreeForm) -> Iterator[_Line]:
    of: dict[str, list[KeyRow]] = {section.name: [] for section in keys.sections}
    for row in keys.rows:
        of[row.section].append(row)
    sections = {section.name: section for section in keys.sections}
    for name, rows in of.items():
        yield from _branch_lines(_branch_of(sections[name], rows, form.expand), "", "", 1, form)


def _branch_of(section: SectionRow, rows: Sequence[KeyRow], expand: bool) -> Branch[KeyRow]:
    """A section as the root of a tree."""
    here = [row for row in rows if row.name == section.prefix]
    inside = [(_rest(row.name, section.prefix), row) for row in rows if row.name != section.prefix]
    branches = tree_of(inside)
    return Branch((section.name,), here, branches if expand else fold(branches, _alike, _value, _is_tensor))


def _rest(name: str, prefix: str) -> str:
    return name[len(prefix) + 1 :] if prefix and name.startswith(f"{prefix}.") else name


def _alike(row: KeyRow) -> tuple[object, ...]:
    """What keys have in common that are folded; the values of param groups and the like may differ: each is told."""
    known = row.type, row.shape, row.dtype, row.layout, bool(row.tied)
    return (*known, row.note) if _is_tensor(row) else known


def _value(row: KeyRow) -> object:
    return row.note or repr(row.value)


def _is_tensor(row: KeyRow) -> bool:
    return row.type == "tensor"


def _branch_lines(branch: Branch[KeyRow], first: str, rest: str, level: int, form: TreeForm) -> Iterator[_Line]:
    """The lines of a branch: `first` is drawn before its own, `rest` before those of what is inside."""
    names = [label_text(branch.labels)]
    while level > 1 and not branch.items and len(branch.children) == 1:
        branch = branch.children[0]
        names.append(label_text(branch.labels))
    yield _line(first, ".".join(names), branch)
    if form.depth is not None and level >= form.depth:
        return
    for n, child in enumerate(branch.children):
        last = n == len(branch.children) - 1
        drawn = form.glyphs.last if last else form.glyphs.branch
        below = form.glyphs.below if last else form.glyphs.through
        yield from _branch_lines(child, rest + drawn, rest + below, level + 1, form)


def _line(drawn: str, name: str, branch: Branch[KeyRow]) -> _Line:
    shown = printable(clip_middle(name, MAX_LABEL))
    if branch.items and _is_tensor(branch.items[0]):
        return _Line(drawn, shown, _tensor_cells(branch.items))
    if branch.items:
        return _Line(drawn, shown, text=_values_text(branch.items))
    rows = _rows_in(branch)
    held = totals(rows)
    if not held.tensors:
        return _Line(drawn, shown, text=plural(len(rows), "value"))
    return _Line(drawn, shown, (plural(held.tensors, "tensor"), count(held.params), size(held.bytes)))


def _rows_in(branch: Branch[KeyRow]) -> list[KeyRow]:
    rows = list(branch.items)
    for child in branch.children:
        rows += _rows_in(child)
    return rows


def _tensor_cells(rows: Sequence[KeyRow]) -> tuple[str, ...]:
    """Shape, elements and size of each tensor, its dtype and layout; and how many of them there are."""
    first = rows[0]
    cells = shape(first.shape or ()), count(first.params), size(first.bytes), short(first.dtype), first.layout
    tied = [f"tied to {few(list(dict.fromkeys(row.tied for row in rows)), 2)}"] if first.tied else []
    times = [f"x{len(rows)}"] if len(rows) > 1 else []
    behind = "  ".join([*times, *tied, *([first.note] if first.note else [])])
    return (*map(printable, cells), printable(clip(behind, MAX_VALUE)))


def _values_text(rows: Sequence[KeyRow]) -> str:
    """The values in the order of their keys, each different one once."""
    texts = list(dict.fromkeys(value_text(row.value, MAX_VALUE) if not row.note else row.note for row in rows))
    crcs = [text for text in texts if ", crc " in text]
    if len(rows) > 1 and len(crcs) == len(texts):
        return f"{texts[0].partition(', crc ')[0]}, {len(crcs)} distinct of {len(rows)}"
    times = f"  x{len(rows)}" if len(rows) > 1 else ""
    return printable(clip(few(texts, 4), MAX_VALUE)) + times


RIGHT = (True, True, True, False, False, False)
"""Which of the cells behind a name are numbers."""

PARAMS, LAYOUT = 1, 4
"""The cell that a narrow screen does without, for the shape has it too; and the one that has a shorter form."""


def _laid_out(lines: Sequence[_Line], screen: Screen) -> list[str]:
    """The lines with their cells below each other, cut to the screen."""
    name = max((len(line.drawn) + len(line.name) for line in lines), default=0)
    widths = _widths(lines)
    if screen.width is not None and _width(name, widths) > screen.width:
        lines = [_shorter(line) for line in lines]
        widths = _widths(lines)
        excess = _width(name, widths) - screen.width
        name = max(name - max(excess, 0), min(name, NARROWEST))
    return [_cut(_shown(line, name, widths), screen) for line in lines]


def _widths(lines: Sequence[_Line]) -> list[int]:
    """Width of each cell behind the name; 0 for one that is empty in all lines."""
    return [max((len(line.cells[n]) for line in lines if len(line.cells) > n), default=0) for n in range(len(RIGHT))]


def _width(name: int, widths: Sequence[int]) -> int:
    return name + sum(width + 2 for width in widths if width)


def _shorter(line: _Line) -> _Line:
    """The line without the number of elements, and with `dim 0 / 4` for `dim 0 over 4 ranks`."""
    cells = list(line.cells)
    if len(cells) > PARAMS:
        cells[PARAMS] = ""
    if len(cells) > LAYOUT:
        cells[LAYOUT] = cells[LAYOUT].removesuffix(" ranks").replace(" over ", " / ")
    return line._replace(cells=tuple(cells))


def _shown(line: _Line, name: int, widths: Sequence[int]) -> str:
    label = (line.drawn + clip_middle(line.name, max(name - len(line.drawn), 8))).ljust(name)
    if line.text:
        return f"{label}  {line.text}"
    cells = zip(line.cells, widths, RIGHT, strict=False)
    padded = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells if width]
    return "  ".join([label, *padded]).rstrip()


def _cut(line: str, screen: Screen) -> str:
    return line if screen.width is None else clip(line, screen.width)
