"""The rank map: a cell for each rank, whose letter and colour show what is wrong with the rank's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from ckptools.display.drawing import (
    CHARACTER,
    Key,
    Picture,
    Rect,
    label,
    legend,
    letter_of,
    marks,
    name_text,
    rect,
    svg,
)
from ckptools.model.checkpoint import Checkpoint, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.text import few, plural, size, spans

ACROSS = 32
"""Cells of a row."""

MAX_CELLS = 4096
"""At most this many cells are drawn; the text and the counts cover all."""

State = Literal["fine", "looked at", "other", "odd", "step", "cut", "missing"]
"""From the least to the most severe: a rank with several problems shows the most severe."""

STATES: dict[State, Key] = {
    "fine": Key("sky", "", "here, no problem of its own"),
    "looked at": Key("pale", "?", "here, not looked into"),
    "other": Key("orange", "!", "a warning, or another problem"),
    "odd": Key("yellow", "O", "odd one out"),
    "step": Key("purple", "S", "other step or save"),
    "cut": Key("bad", "C", "cut, damaged or unreadable"),
    "missing": Key("paper edge dash", "M", "missing"),
}

OF_CODE: dict[Code, State] = {
    Code.FILE_MISSING: "missing",
    Code.FILE_CUT: "cut",
    Code.FILE_UNREADABLE: "cut",
    Code.BAD_CHECKSUM: "cut",
    Code.VALUE_LOST: "cut",
    Code.MIXED_SAVES: "step",
    Code.LAYOUT_DISAGREES: "odd",
    Code.COPIES_DIFFER: "odd",
    Code.WORLD_SIZES_DISAGREE: "odd",
    Code.ODD_FILE_SIZE: "odd",
    Code.NAME_CONTRADICTS: "odd",
    Code.STRAY_FILE: "odd",
    Code.METADATA_CONTRADICTS: "odd",
}
"""State of the ranks that a problem names, by its code; other or less severe problems give `other`."""


class RankCell(NamedTuple):
    """The state of the files of one rank.

    Attributes:
        rank: the rank; None for a file without a rank.
        state: its most severe problem.
        words: text shown when the pointer is over its cell.
    """

    rank: int | None
    state: State
    words: str


def rank_cells(ck: Checkpoint, problems: Iterable[Problem] | None = None) -> tuple[RankCell, ...]:
    """A cell for each rank in order, then one for each file without a rank that has a problem.

    If no file belongs to a rank, every file has a cell.

    Args:
        ck: the checkpoint.
        problems: its problems, as found by `verify` in every file; None for those found while opening it.
    """
    ranks = {file.rank for file in ck.files if file.rank is not None}
    found = _problems_by_rank(ck.problems if problems is None else problems, len(ranks))
    by_rank: dict[int, list[RankFile]] = {rank: [] for rank in found}
    for file in ck.files:
        if file.rank is not None:
            by_rank.setdefault(file.rank, []).append(file)
    read = ck.structure_read or problems is not None
    cells = [_cell(rank, by_rank[rank], found.get(rank, ()), read) for rank in sorted(by_rank)]
    others = (_cell(None, [file], (), read) for file in ck.files if file.rank is None)
    return (*cells, *(cell for cell in others if not by_rank or cell.state not in ("fine", "looked at")))


def _problems_by_rank(problems: Iterable[Problem], ranks: int) -> dict[int, list[Problem]]:
    found: dict[int, list[Problem]] = {}
    for problem in problems:
        for rank in problem.all_ranks if _marks(problem, ranks) else ():
            found.setdefault(rank, []).append(problem)
    return found


def _marks(problem: Problem, ranks: int) -> bool:
    """Whether a problem marks the ranks that it names; a note, or a problem of most ranks, does not."""
    named = len(problem.all_ranks)
    return problem.severity != "note" and (named == 1 or 0 < 2 * named <= ranks)


def _cell(rank: int | None, files: Sequence[RankFile], problems: Sequence[Problem], read: bool) -> RankCell:
    states: list[State] = [_state_of(problem) for problem in problems]
    states += [_state(file, read) for file in files]
    worst = max(states, key=list(STATES).index)
    whose = f"rank {rank}" if rank is not None else name_text(files[0].path.name)
    here = [file for file in files if file.status != "missing"]
    files_here = f"{plural(len(here), 'file')}, {size(sum(file.nbytes for file in here))}" if here else "no file"
    codes = dict.fromkeys(problem.code for problem in problems)
    words = "; ".join(filter(None, (f"{whose}: {STATES[worst].means}", files_here, ", ".join(codes))))
    return RankCell(rank, worst, words)


def _state_of(problem: Problem) -> State:
    # For instance, copies that may differ do not make a rank the odd one out.
    return OF_CODE.get(problem.kind, "other") if problem.severity == problem.kind.severity else "other"


def _state(file: RankFile, read: bool) -> State:
    if file.status in ("cut", "bad"):
        return "cut"
    if file.status == "missing":
        return "missing"
    return "fine" if read or file.status == "read" else "looked at"


def rank_map(ck: Checkpoint, problems: Iterable[Problem] | None = None) -> Picture:
    """Draw a cell for each rank of a checkpoint: whole, missing, cut, odd one out, of another step.

    Args:
        ck: the checkpoint.
        problems: its problems, as found by `verify` in every file; None for those found while opening it.
    """
    known = tuple(ck.problems if problems is None else problems)
    cells = rank_cells(ck, problems if problems is None else known)
    title = f"{_whose(cells)} of {name_text(ck.name)}"
    text = "\n".join(_words(title, cells, known))
    drawn, height = _drawn(cells)
    return Picture(title, svg(title, text, drawn, height), text)


def _whose(cells: Sequence[RankCell]) -> str:
    ranks = sum(cell.rank is not None for cell in cells)
    return plural(ranks, "rank") if ranks else plural(len(cells), "file")


# -- in words ----------------------------------------------------------------------------------------------------


def _words(title: str, cells: Sequence[RankCell], problems: Iterable[Problem]) -> Iterator[str]:
    """A line for each state of a rank, the most severe last, and the number of problems without a cell."""
    yield title
    for state, key in STATES.items():
        ranks = [cell.rank for cell in cells if cell.state == state and cell.rank is not None]
        names = [cell.words.partition(":")[0] for cell in cells if cell.state == state and cell.rank is None]
        if ranks:
            yield f"{key.means}: {plural(len(ranks), 'rank')}: {spans(ranks)}"
        if names:
            yield f"{key.means}: {plural(len(names), 'file')} of no rank: {few(names)}"
    count = sum(cell.rank is not None for cell in cells)
    loose = [p.code for p in problems if p.severity != "note" and not _marks(p, count)]
    if loose:
        what = f"{plural(len(loose), 'problem')} of no rank, or of most at once"
        yield f"no cell shows {what}: {few(list(dict.fromkeys(loose)))}"


# -- drawn -------------------------------------------------------------------------------------------------------

ROW_LABEL = 36.0
CELL = Rect(0, 0, 20, 20)


def places(count: int) -> list[Rect]:
    """The places of `count` cells: `ACROSS` in a row, side by side without gaps."""
    return [CELL._replace(x=ROW_LABEL + n % ACROSS * CELL.width, y=n // ACROSS * CELL.height) for n in range(count)]


def _drawn(cells: Sequence[RankCell]) -> tuple[list[str], float]:
    """The parts of the drawing, and their height."""
    ranked = [cell for cell in cells if cell.rank is not None][:MAX_CELLS]
    others = [cell for cell in cells if cell.rank is None][: MAX_CELLS - len(ranked)]
    parts, y = [], 0.0
    for block, name in ((ranked, ""), (others, "files of no rank")):
        if block and name:
            parts.append(label(0, y + 14, name, "faint"))
            y += 22
        parts += _block(block, y)
        y += -(-len(block) // ACROSS) * CELL.height + (10 if block else 0)
    left = len(cells) - len(ranked) - len(others)
    if left:
        parts.append(label(0, y + 11, f"{left} more are not drawn; the text lists all", "ink"))
        y += 20
    states = {cell.state for cell in cells}
    keys, bottom = legend([key for state, key in STATES.items() if state in states], y + 4)
    return [*parts, keys], bottom


def _block(cells: Sequence[RankCell], top: float) -> Iterator[str]:
    """The rows of some cells; the letters of a row are one element, for thousands would double the size."""
    placed = [(cell, at._replace(y=at.y + top).inset(2)) for cell, at in zip(cells, places(len(cells)), strict=True)]
    for start in range(0, len(placed), ACROSS):
        row = placed[start : start + ACROSS]
        (first, at), shown = row[0], [(at, STATES[cell.state]) for cell, at in row]
        yield _row_label(first.rank, at.y)
        yield from (rect(at, STATES[cell.state].kind, cell.words) for cell, at in row)
        for kind in ("on", "ink"):
            yield marks(((at, key.letter) for at, key in shown if letter_of(key) == kind), kind)


def _row_label(rank: int | None, y: float) -> str:
    text = "" if rank is None else str(rank)
    return label(ROW_LABEL - 6, y + 13, text, "faint", "end") if len(text) * CHARACTER < ROW_LABEL else ""
