"""Pictures of a checkpoint: its ranks as cells that show problems of their files, and its bytes as bars by section."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple

from ckptools.display.drawing import (
    CHARACTER,
    TINTS,
    WIDTH,
    Key,
    Picture,
    Rect,
    label,
    legend,
    letter_of,
    mark,
    marks,
    name_text,
    rect,
    svg,
)
from ckptools.dtypes import short
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.records import grouped
from ckptools.model.regions import Ints
from ckptools.model.tree import tensors_in
from ckptools.text import few, plural, size, spans
from ckptools.training_state.sections import measure, sections_of

# -- a cell for each rank that shows problems of its files -------------------------------------------------------------


ACROSS = 32
"""Most cells in a row."""

TALL = 256.0
"""Units for all rows of ranks, as long as cells have room for a letter."""

WIDEST, LOWEST, HIGHEST = 96.0, 12.0, 40.0
"""Widest, lowest and highest cell."""

NUMBERED = 40.0
"""A cell of this width has room for the number of its rank beside its letter: `63 M`."""

NODE = 8
"""Ranks per group if no device mesh is known: most nodes have eight."""

MAX_CELLS = 4096
"""At most this many cells are drawn; the text and the counts cover all."""

State = Literal["fine", "looked at", "other", "odd", "values", "step", "cut", "missing"]
"""From the least to the most severe: a rank with several problems shows the most severe."""

STATES: dict[State, Key] = {
    "fine": Key("sky", "", "here, no problem of its own"),
    "looked at": Key("pale", "?", "here, not looked into"),
    "other": Key("orange", "!", "a warning, or another problem"),
    "odd": Key("yellow", "O", "odd one out"),
    "values": Key("bad", "N", "NaN, infinity or zeros"),
    "step": Key("purple", "S", "other step or save"),
    "cut": Key("bad", "C", "cut, damaged or unreadable"),
    "missing": Key("paper edge dash", "M", "missing"),
}

CODES: dict[State, tuple[Code, ...]] = {
    "missing": (Code.FILE_MISSING,),
    "cut": (
        Code.FILE_CUT, Code.FILE_UNREADABLE, Code.FILE_CONTRADICTS, Code.NEVER_WRITTEN, Code.BAD_CHECKSUM,
        Code.VALUE_LOST,
    ),
    "step": (Code.MIXED_SAVES,),
    "values": (Code.NOT_FINITE, Code.ZEROS),
    "odd": (
        Code.LAYOUT_DISAGREES, Code.COPIES_DIFFER, Code.WORLD_SIZES_DISAGREE, Code.ODD_FILE_SIZE,
        Code.NAME_CONTRADICTS, Code.NAMED_AS_ANOTHER_RANK, Code.STRAY_FILE, Code.METADATA_CONTRADICTS,
    ),
}  # fmt: skip
"""Codes of problems by the state they give to the ranks they name; other or less severe problems give `other`."""


class RankCell(NamedTuple):
    """The state of one rank's files, or of a file without a rank; `words` appear under the pointer."""

    rank: int | None
    state: State
    words: str


def rank_cells(ck: Checkpoint, problems: Iterable[Problem] | None = None) -> tuple[RankCell, ...]:
    """Make a cell for each rank in order, then one for each file without a rank that has a problem.

    If no file belongs to a rank, every file gets a cell. `problems` come from `verify`, which reads every file; None
    for the problems found when the checkpoint was opened.
    """
    ranks = {file.rank for file in ck.files if file.rank is not None}
    known = tuple(ck.problems if problems is None else problems)
    by_file = _problems_by_file(ck, known)
    found = _problems_by_rank(known, len(ranks))
    by_rank: dict[int, list[RankFile]] = {rank: [] for rank in found}
    for file in ck.files:
        if file.rank is not None:
            by_rank.setdefault(file.rank, []).append(file)
    read = ck.structure_read or problems is not None
    cells = [
        _cell(rank, files, [*found.get(rank, ()), *(p for f in files for p in by_file.get(f.path, ()))], read)
        for rank, files in sorted(by_rank.items())
    ]
    others = (_cell(None, [file], by_file.get(file.path, ()), read) for file in ck.files if file.rank is None)
    return (*cells, *(cell for cell in others if not by_rank or cell.state not in ("fine", "looked at")))


def _problems_by_file(ck: Checkpoint, problems: Iterable[Problem]) -> dict[Path, list[Problem]]:
    """The problems of each file that blame no rank."""
    named = grouped(ck.files, lambda file: file.path.name)
    found: dict[Path, list[Problem]] = {}
    for problem in problems:
        for name in problem.files if _blames_files(problem) else ():
            for file in named.get(Path(name).name, ()):
                if file.is_called(name):
                    found.setdefault(file.path, []).append(problem)
    return found


def _blames_files(problem: Problem) -> bool:
    return problem.severity != "note" and not problem.all_ranks and bool(problem.files)


def _problems_by_rank(problems: Iterable[Problem], ranks: int) -> dict[int, list[Problem]]:
    found: dict[int, list[Problem]] = {}
    for problem in problems:
        for rank in problem.all_ranks if _marks(problem, ranks) else ():
            found.setdefault(rank, []).append(problem)
    return found


def _marks(problem: Problem, ranks: int) -> bool:
    """Whether a problem is drawn at the ranks that it names; a note, or a problem of most ranks, is not."""
    named = len(problem.all_ranks)
    return problem.severity != "note" and (named == 1 or 0 < 2 * named <= ranks)


def _cell(rank: int | None, files: Sequence[RankFile], problems: Sequence[Problem], read: bool) -> RankCell:
    states = [*map(_state_of, problems), *(_state(file, read) for file in files)]
    worst = max(states, key=list(STATES).index)
    whose = f"rank {rank}" if rank is not None else name_text(files[0].path.name)
    here = [file for file in files if file.status != "missing"]
    files_here = f"{plural(len(here), 'file')}, {size(sum(file.nbytes for file in here))}" if here else "no file"
    codes = dict.fromkeys(problem.code for problem in problems)
    words = "; ".join(filter(None, (f"{whose}: {STATES[worst].means}", files_here, ", ".join(codes))))
    return RankCell(rank, worst, words)


def _state_of(problem: Problem) -> State:
    # A less severe problem, such as copies that may differ, does not make a rank the odd one out.
    severe = problem.severity == problem.kind.severity
    return next((state for state, codes in CODES.items() if severe and problem.kind in codes), "other")


def _state(file: RankFile, read: bool) -> State:
    if file.status in ("cut", "bad"):
        return "cut"
    if file.status == "missing":
        return "missing"
    return "fine" if read or file.status == "read" else "looked at"


def rank_map(ck: Checkpoint, problems: Iterable[Problem] | None = None) -> Picture:
    """Draw a cell for each rank of a checkpoint: whole, missing, cut, odd one out, of another step.

    `problems` come from `verify`, which reads every file; None for the problems found when the checkpoint was opened.
    """
    known = tuple(ck.problems if problems is None else problems)
    cells = rank_cells(ck, problems if problems is None else known)
    ranks = sum(cell.rank is not None for cell in cells)
    title = f"{plural(ranks, 'rank') if ranks else plural(len(cells), 'file')} of {name_text(ck.name)}"
    how = grouping(ck, ranks)
    text = "\n".join([title, *([how.words] if how.words else []), *_words(cells, known, ranks)])
    drawn, height = _drawn(cells, how)
    return Picture(title, svg(title, text, drawn, height), text)


def _words(cells: Sequence[RankCell], problems: Iterable[Problem], count: int) -> Iterator[str]:
    """Yield a line for each state of ranks, the most severe last, and the number of problems without a cell."""
    for state, key in STATES.items():
        ranks = [cell.rank for cell in cells if cell.state == state and cell.rank is not None]
        names = [cell.words.partition(":")[0] for cell in cells if cell.state == state and cell.rank is None]
        if ranks:
            yield f"{key.means}: {plural(len(ranks), 'rank')}: {spans(ranks)}"
        if names:
            yield f"{key.means}: {plural(len(names), 'file')} of no rank: {few(names)}"
    loose = [p.code for p in problems if p.severity != "note" and not _marks(p, count) and not _blames_files(p)]
    if loose:
        what = f"{plural(len(loose), 'problem')} not of single ranks or files"
        yield f"{what}: {few(list(dict.fromkeys(loose)))}"


ROW_LABEL = 34.0
GROUP, BLOCK = 5.0, 8.0
"""Gaps between groups of cells in a row, and between blocks of rows."""


class Grouping(NamedTuple):
    """How cells are arranged.

    Attributes:
        across: cells in a row.
        group: cells between two gaps of a row.
        block: cells between two gaps of rows.
        words: meaning of the groups; "" if unknown.
    """

    across: int
    group: int
    block: int
    words: str = ""


def grouping(ck: Checkpoint, ranks: int) -> Grouping:
    """Arrange ranks by the device mesh of their tensors or by Megatron's arguments, else in groups of eight."""
    mesh = _mesh(ck, ranks) or _megatron_mesh(ck, ranks)
    if mesh is None:
        return Grouping(ACROSS, NODE, ACROSS * ranks + 1)
    sizes, names = mesh
    group = sizes[-1] if sizes[-1] <= ACROSS else ACROSS
    middle = prod(sizes[1:]) if len(sizes) > 2 else group
    fitting = [n * group for n in range(1, ACROSS // group + 1) if middle % (n * group) == 0]
    across = max(fitting, default=group)
    block = prod(sizes[1:]) if len(sizes) > 2 else across * ranks + 1
    axes = " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    return Grouping(across, group, block, f"mesh {axes}")


def _mesh(ck: Checkpoint, ranks: int) -> tuple[Ints, list[str]] | None:
    """Find the sizes of the device mesh that most tensors state for all ranks, and name its axes by placements."""
    known = [t for _, t in tensors_in(ck.tree) if t.mesh and t.placements and len(t.mesh) > 1 and prod(t.mesh) == ranks]
    if not known:
        return None
    sizes = Counter(t.mesh for t in known).most_common(1)[0][0]
    placed = [t.placements for t in known if t.mesh == sizes and t.placements and len(t.placements) == len(sizes or ())]
    return (sizes, [_axis_name({p[n] for p in placed}) for n in range(len(sizes))]) if sizes and placed else None


def _megatron_mesh(ck: Checkpoint, ranks: int) -> tuple[Ints, list[str]] | None:
    """Find sizes and names of the axes in Megatron's arguments, the slowest first; None without arguments.

    Source: megatron/core/parallel_state.py, `initialize_model_parallel` (order `tp-cp-ep-dp-pp`).
    """
    from ckptools.formats.megatron.folders import arguments, setting

    args = arguments(ck.tree)
    tp = setting(args, "tensor_model_parallel_size", "model_parallel_size")
    if tp is None:
        return None
    sizes = {
        "tp": tp,
        "cp": setting(args, "context_parallel_size") or 1,
        "pp": setting(args, "pipeline_model_parallel_size") or 1,
    }
    sizes["dp"], rest = divmod(ranks, prod(sizes.values()))
    order = ("dp", "pp", "cp", "tp") if args.get("use_tp_pp_dp_mapping") else ("pp", "dp", "cp", "tp")
    axes = [name for name in order if sizes[name] > 1]
    return (tuple(sizes[name] for name in axes), axes) if axes and not rest else None


def _axis_name(placements: set[str]) -> str:
    """Name an axis `replicate` if no tensor is sharded along it, `shard` if all are in dimension 0, else `tp`."""
    sharded = {placement for placement in placements if "Shard" in placement}
    if not sharded:
        return "replicate"
    return "shard" if all("(0" in placement or "dim=0" in placement for placement in sharded) else "tp"


def shaped(count: int, how: Grouping) -> Grouping:
    """Shorten rows until there are about as many rows as cells in a row; groups and blocks stay whole."""
    lengths = [n for n in range(how.group, how.across + 1, how.group) if how.across % n == 0]
    across = next((n for n in lengths if -(-count // n) <= n), how.across)
    return how._replace(across=max(1, min(across, count)))


def places(count: int, how: Grouping) -> list[Rect]:
    """Return the positions of `count` cells: `across` in a row, with gaps between groups and blocks.

    The fewer cells, the larger they are; rows of cells without room for a number begin behind a label.
    """
    room = WIDTH - GROUP * ((how.across - 1) // how.group)
    left = 0.0 if room / how.across >= NUMBERED else ROW_LABEL
    width = min((room - left) / how.across, WIDEST)
    height = max(LOWEST, min(width, HIGHEST, TALL / max(1, -(-count // how.across))))
    found = []
    for n in range(count):
        row, column = divmod(n, how.across)
        x = left + column * width + column // how.group * GROUP
        found.append(Rect(x, row * height + n // how.block * BLOCK, width, height))
    return found


def _drawn(cells: Sequence[RankCell], how: Grouping) -> tuple[list[str], float]:
    ranked = [cell for cell in cells if cell.rank is not None][:MAX_CELLS]
    others = [cell for cell in cells if cell.rank is None][: MAX_CELLS - len(ranked)]
    parts, y = [], 0.0
    if how.words:
        parts.append(label(0, y + 11, how.words, "faint"))
        y += 20
    for block, name in ((ranked, ""), (others, "files of no rank")):
        if block and name:
            parts.append(label(0, y + 14, name, "faint"))
            y += 22
        arranged = shaped(len(block), how)
        at = places(len(block), arranged)
        parts += _block(block, at, y, arranged.across)
        y += at[-1].y + at[-1].height + 10 if block else 0
    left = len(cells) - len(ranked) - len(others)
    if left:
        parts.append(label(0, y + 11, f"{left} more are not drawn; the text lists all", "ink"))
        y += 20
    states = {cell.state for cell in cells}
    keys, bottom = legend([key for state, key in STATES.items() if state in states], y + 4)
    return [*parts, keys], bottom


def _block(cells: Sequence[RankCell], where: Sequence[Rect], top: float, across: int) -> Iterator[str]:
    """Draw rows of cells; the letters of a row are one element, as one for each cell would double the size."""
    gap = 2 if where and where[0].width > NUMBERED else 1
    placed = [(cell, at._replace(y=at.y + top).inset(gap)) for cell, at in zip(cells, where, strict=True)]
    for start in range(0, len(placed), across):
        row = placed[start : start + across]
        (first, at), shown = row[0], [(at, STATES[cell.state]) for cell, at in row]
        text = "" if first.rank is None else str(first.rank)
        if at.x and len(text) * CHARACTER < ROW_LABEL:
            yield label(ROW_LABEL - 6, at.y + at.height / 2 + 4, text, "faint", "end")
        yield from (rect(at, STATES[cell.state].kind, cell.words) for cell, at in row)
        if at.width >= NUMBERED - gap and first.rank is not None:
            for cell, place in row:
                key = STATES[cell.state]
                yield mark(place, f"{cell.rank} {key.letter}".rstrip(), letter_of(key))
            continue
        for kind in ("on", "ink"):
            yield marks(((at, key.letter) for at, key in shown if letter_of(key) == kind), kind)


# -- bars of the bytes of each section by dtype ------------------------------------------------------------------------


MAX_BARS = 40
"""At most this many sections, the largest, get a bar."""

_KINDS = tuple(f"tint{n}" for n in range(len(TINTS)))

BAR = 22.0
NAMES, SIZES = 130.0, 70.0
"""Widths of the columns for the names of sections, and for their sizes."""


class ByteBar(NamedTuple):
    """The bytes of one section by dtype, the most first."""

    section: str
    dtypes: tuple[tuple[str, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all dtypes together."""
        return sum(nbytes for _, nbytes in self.dtypes)


def byte_bars(ck: Checkpoint) -> tuple[ByteBar, ...]:
    """Count the bytes of tensors by section, the largest first; a tied weight counts once."""
    made = []
    for section in sections_of(ck):
        parts = sorted(measure(section.value).bytes_of.items(), key=lambda item: (-item[1], item[0]))
        made.append(ByteBar(section.name, tuple((dtype, nbytes) for dtype, nbytes in parts if nbytes)))
    return tuple(sorted((bar for bar in made if bar.nbytes), key=lambda bar: -bar.nbytes))


def bytes_by_section(ck: Checkpoint) -> Picture:
    """Draw the bytes of the global tensors of each section by dtype."""
    bars = byte_bars(ck)
    title = f"bytes of {name_text(ck.name)} by section and dtype"
    lines = [f"{title}: {size(sum(bar.nbytes for bar in bars))} in {plural(len(bars), 'section')} with tensors"]
    lines += [f"{name_text(bar.section)}: {_dtype_sizes(bar)}" for bar in bars]
    text = "\n".join(lines)
    drawn, height = _bars_drawn(bars)
    return Picture(title, svg(title, text, drawn, height), text)


def _dtype_sizes(bar: ByteBar) -> str:
    parts = ", ".join(f"{short(dtype)} {size(nbytes)}" for dtype, nbytes in bar.dtypes)
    return f"{size(bar.nbytes)} ({parts})" if len(bar.dtypes) > 1 else parts


def _bars_drawn(bars: Sequence[ByteBar]) -> tuple[list[str], float]:
    dtypes = list(dict.fromkeys(dtype for bar in bars for dtype, _ in bar.dtypes))
    kinds = {dtype: _KINDS[n % len(_KINDS)] for n, dtype in enumerate(dtypes)}
    most = max((bar.nbytes for bar in bars), default=1)
    parts = [part for n, bar in enumerate(bars[:MAX_BARS]) for part in _bar(bar, n * BAR, most, kinds)]
    y = BAR * min(len(bars), MAX_BARS)
    if len(bars) > MAX_BARS:
        parts.append(label(0, y + 13, f"{len(bars) - MAX_BARS} smaller ones are not drawn", "ink"))
        y += 20
    keys, bottom = legend([Key(kinds[dtype], "", short(dtype)) for dtype in dtypes], y + 8)
    return [*parts, keys], bottom


def part_widths(bar: ByteBar, most: int) -> Iterator[tuple[float, float]]:
    """Yield start and width of each part of a bar; a section of `most` bytes fills the width."""
    room, before = WIDTH - NAMES - SIZES, 0
    for _, nbytes in bar.dtypes:
        yield NAMES + before / most * room, nbytes / most * room
        before += nbytes


def _bar(bar: ByteBar, y: float, most: int, kinds: dict[str, str]) -> Iterator[str]:
    yield label(NAMES - 8, y + 14, name_text(bar.section, int((NAMES - 8) / CHARACTER)), "ink", "end")
    end = NAMES
    for (dtype, nbytes), (x, width) in zip(bar.dtypes, part_widths(bar, most), strict=True):
        at = Rect(x, y + 2, width, BAR - 4).inset(0.5)
        yield rect(at, kinds[dtype], f"{name_text(bar.section)}: {short(dtype)} {size(nbytes)}") + mark(
            at, short(dtype)
        )
        end = x + width
    yield label(end + 6, y + 14, size(bar.nbytes), "faint")
