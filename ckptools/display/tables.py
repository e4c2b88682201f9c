"""Tables for terminals and pipes: this module escapes, fits and colours the cells, and tabulate aligns them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import compress, islice
from pathlib import Path
from textwrap import TextWrapper
from typing import Any, Literal, NamedTuple

from ckptools.display.screen import HEADLINES, NAMES, PIPE, Mark, Screen, mark_of, painted
from ckptools.dtypes import short
from ckptools.errors import UsageError
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.incidents import Cause, Consequence, Incident, causes_of, consequences_of, incidents_of
from ckptools.model.problems import Problem, Severity
from ckptools.model.records import Rows, record_fields
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Opaque, TorchName, scalar
from ckptools.model.verdict import Verdict
from ckptools.option import spelled
from ckptools.rules.verdict import perhaps_more, verdict_of
from ckptools.text import (
    CUT,
    MAX_BITS,
    clip,
    clip_middle,
    common_prefix,
    few,
    number,
    plural,
    printable,
    shape,
    size,
)
from ckptools.training_state.sections import measure, sections_of

# -- line breaks between words, and inside names longer than a line ----------------------------------------------------


LETTERS = r"(?:\{[^{}]*\}|[^./{]|\{(?![^{}]*\}))"
"""A character of a name other than a dot or slash; folded labels, such as `{0..3}` or `{q,k}`, count as one."""

AT_DOTS = re.compile(rf"{LETTERS}*[./]+|{LETTERS}+")
"""Parts of a name or path, each with the dot or slash that ends it."""

AT_COMMAS = re.compile(r"[^,]*,+|[^,]+")
"""Parts of a list without spaces, each with the comma that ends it."""

IN_WORDS = re.compile(r"[^_-]*[_-]+|[^_-]+")
"""Words of such a part, each with the underscore or hyphen that ends it."""

BREAKS = (AT_DOTS, AT_COMMAS, IN_WORDS)
"""Places at which a long name is broken: the next ones only in parts that are still longer than a line."""

BETWEEN_NAMES = BREAKS[:2]
"""Places at which no word is broken."""


COMMAND = re.compile(rf"(?<=: )(ckptools (?:{'|'.join(NAMES)})\b(?: (?:'[^']*'|[^\s;)'])+)*)")
"""A command that is proposed at the end of a sentence: `the newest whole one: ckptools ls run7`."""


def parts_of(word: str, width: int, breaks: Sequence[re.Pattern[str]] = BREAKS) -> list[str]:
    """Divide a word into parts of at most `width` characters; a part without a place to break it stays longer."""
    if len(word) <= width or not breaks:
        return [word]
    return [part for piece in breaks[0].findall(word) for part in parts_of(piece, width, breaks[1:])]


class LineBreaks(TextWrapper):
    """Breaks lines at spaces; in a word longer than a line, after a dot or slash, else a comma, else `_` or `-`.

    Of text in which commands are `whole`, each stays in one line, of any length, so that it can be copied.
    """

    def __init__(self, width: int, whole: bool = False) -> None:
        super().__init__(width, break_on_hyphens=False, break_long_words=False)
        self._whole = whole

    def _split(self, text: str) -> list[str]:
        # Every second piece is a command.
        pieces = COMMAND.split(text) if self._whole else [text]
        return [word for n, piece in enumerate(pieces) for word in ([piece] if n % 2 else self._words(piece))]

    def _words(self, text: str) -> list[str]:
        width = self.width
        parts = [part for word in super()._split(text) for part in parts_of(word, width)]
        return [part[n : n + width] for part in parts for n in range(0, len(part), width)]


# -- tables ------------------------------------------------------------------------------------------------------------


GAP = 2
"""Spaces between columns in tabulate's `plain` format."""
NARROWEST = 8
"""No column is narrower than this; on a narrower screen, lines wrap."""
NARROW_TEXT = 24
"""Texts are narrowed to this width before any name is cut."""
NARROWEST_BESIDE_NAME = 11
"""Texts and long names are narrowed to this width before a name of at most `NARROW_TEXT` characters is broken."""
NARROWEST_TEXT = 20
BELOW = "    "
"""Indentation of a sentence below its label, if less than `NARROWEST_TEXT` characters fit behind the label."""
MOST_LINES = 12
"""Most lines of a cell."""
WIDEST_TITLE = 40
"""Widest title of a column; it may be the name of a hyperparameter, of any length in the file."""
NAME_ROOM = 40
"""An optional column is left out if names would have fewer characters than this."""
FEWEST_ALIKE = 3
"""From this number of rows on, a text common to all rows is shown once."""
SHORTEST_PREFIX = 6
"""Shortest common prefix of names, in characters, that is shown once on its own line."""


Role = Literal["text", "name", "place", "value", "number", "faults", "verdict", "provenance"]
"""Kind of a column. Names wrap at dots, and a prefix common to all is shown once; places, such as files, are names that
rows may share. Numbers and counts of faults are aligned right and never cut. In values and numbers, what is not finite
is red, and so is a count of faults that is not zero; verdicts and statuses are coloured by their words; provenance,
such as a time, is dimmed and never cut."""

ON_THE_RIGHT = ("number", "faults")
"""Roles of columns that are aligned right."""

NO_FAULTS = ("0", "-", "")
"""Cells of a column of faults that count none."""


class Column(NamedTuple):
    """A column of a table: its heading, and its kind.

    On a narrow screen, columns with the lowest `keep` are left out first; those with 9 are never left out.
    """

    title: str
    role: Role = "text"
    keep: int = 9


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], screen: Screen = PIPE) -> list[str]:
    """Render a table: titles, dashes, rows. No lines without rows.

    A screen shows texts common to all rows only once: the prefix of names, and a column of equal texts. On a narrow
    screen, texts wrap between words, and names after dots. Numbers are never cut.
    """
    if not rows:
        return []
    cells = [[printable(cell) for cell in row] for row in rows]
    common = ""
    if screen.width is not None:
        columns, cells, common = _condensed(columns, cells, screen.width)
        columns, cells = _with_room(columns, cells, screen.width)
    kept = cells if screen.rows is None else cells[: screen.rows]
    titles = [clip_middle(printable(c.title), WIDEST_TITLE) for c in columns]
    widths = _widths(columns, [titles, *kept], screen.width)
    by_column = [
        _painted(column, _laid_out(column, width, texts), screen.color)
        for column, width, *texts in zip(columns, widths, titles, *kept, strict=True)
    ]
    laid_out = list(zip(*by_column, strict=True))
    dashes = [[painted("-" * width, "dim", screen.color)] for width in widths]
    lines = [line for row in (laid_out[0], dashes, *laid_out[1:]) for line in _lines_of(row)]
    shown = tabulated(columns, lines, "plain").split("\n")
    left = len(rows) - len(kept)
    every = "--limit 0 shows all" if screen.limited else "all of them when piped, as in | less"
    more = [f"{left} more; {every}"] if left else []
    return [*wrapped("", common, screen, mark="dim"), *shown, *more] if common else [*shown, *more]


def _condensed(
    columns: Sequence[Column], cells: list[list[str]], width: int
) -> tuple[Sequence[Column], list[list[str]], str]:
    """Remove texts common to all rows from columns and cells, and return them as a sentence; keep the first column."""
    alike = [n > 0 and len({row[n] for row in cells}) == 1 for n in range(len(columns))]
    said = [False] * len(columns)
    if len(cells) >= FEWEST_ALIKE:
        said = [alike[n] and _is_said_once(column, cells[0][n]) for n, column in enumerate(columns)]
    else:
        places = [n for n, column in enumerate(columns) if alike[n] and column.role == "place"]
        while places and _full_width(columns, cells, said) > width:
            widest = max(places, key=lambda n: len(cells[0][n]))
            said[widest] = True
            places.remove(widest)
    texts = ", ".join(f"{c.title} {text}" for c, text in compress(zip(columns, cells[0], strict=True), said) if text)
    words = [f"in every row: {texts}" if len(cells) > 1 else texts] if texts else []
    for n, column in enumerate(columns):
        named = column.role in ("name", "place") and not said[n] and len(cells) >= FEWEST_ALIKE
        if prefix := _common_prefix([row[n] for row in cells]) if named else "":
            cells = [[*row[:n], row[n][len(prefix) :], *row[n + 1 :]] for row in cells]
            words.insert(0, f"each {column.title} begins with {prefix}")
    shown = [not one for one in said]
    return list(compress(columns, shown)), [list(compress(row, shown)) for row in cells], "; ".join(words)


def _is_said_once(column: Column, text: str) -> bool:
    """Whether a text that is the same in all rows is shown once above them; verdicts and faults stay in their rows."""
    return column.role in ("text", "place", "value", "number") or (column.role == "faults" and text in NO_FAULTS)


def _full_width(columns: Sequence[Column], cells: Sequence[Sequence[str]], left_out: Sequence[bool]) -> int:
    """Return the width of a table without some columns, if no cell wraps."""
    needed = [max(len(column.title), *map(len, texts)) for column, *texts in zip(columns, *cells, strict=True)]
    kept = [width for width, out in zip(needed, left_out, strict=True) if not out]
    return sum(kept) + GAP * (len(kept) - 1)


def _with_room(
    columns: Sequence[Column], cells: list[list[str]], width: int
) -> tuple[Sequence[Column], list[list[str]]]:
    """Remove columns for which the screen has no room."""
    needed = [max(len(column.title), *map(len, texts)) for column, *texts in zip(columns, *cells, strict=True)]
    needed = [min(n, NAME_ROOM) if c.role in ("name", "place") else n for n, c in zip(needed, columns, strict=True)]
    kept = list(range(len(columns)))
    while sum(needed[n] + GAP for n in kept) - GAP > width:
        least = min(kept, key=lambda n: columns[n].keep)
        if columns[least].keep == Column("").keep:
            break
        kept.remove(least)
    return [columns[n] for n in kept], [[row[n] for n in kept] for row in cells]


def _common_prefix(names: Sequence[str]) -> str:
    """Return the common prefix of all names, up to a dot: `model.layers.`; "" if it is short or a whole name."""
    first, last = min(names), max(names)
    shared = common_prefix(first, last)
    prefix = first[: first.rfind(".", 0, min(shared, len(first) - 1)) + 1]
    return prefix if len(prefix) >= SHORTEST_PREFIX else ""


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Choose the width of each column: narrow texts, which wrap, and then names, until the table fits.

    Words and parts of names are broken only if the table does not fit otherwise.
    """
    by_column = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in by_column]
    if width is None:
        return widths
    excess = sum(widths) + GAP * (len(widths) - 1) - width
    if excess <= 0:
        return widths
    texts = [n for n, column in enumerate(columns) if column.role in ("text", "value", "verdict")]
    names = [n for n, column in enumerate(columns) if column.role in ("name", "place")]
    long = [n for n in names if widths[n] > NARROW_TEXT]
    passes: tuple[tuple[list[int], int, Sequence[re.Pattern[str]] | None], ...] = (
        (texts, NARROW_TEXT, BETWEEN_NAMES),
        ([*texts, *long], NARROWEST_BESIDE_NAME, BETWEEN_NAMES),
        (long, NARROW_TEXT, BREAKS),
        ([*texts, *names], NARROWEST, BETWEEN_NAMES),
        ([*texts, *names], NARROWEST, BREAKS),
        ([*texts, *names], NARROWEST, None),
    )
    for soft, least, breaks in passes:
        floors = {n: least if breaks is None else max(least, _longest_part(by_column[n], breaks)) for n in soft}
        while excess > 0 and (wide := [n for n in soft if widths[n] > floors[n]]):
            widest = max(wide, key=lambda n: widths[n])
            others = [widths[n] for n in wide if n != widest]
            step = min(excess, widths[widest] - floors[widest], max(widths[widest] - max(others, default=0), 1))
            widths[widest] -= step
            excess -= step
    return widths


def _longest_part(texts: Iterable[str], breaks: Sequence[re.Pattern[str]]) -> int:
    """Return the length of the longest part of a word that cannot be broken at the given places."""
    return max((len(part) for text in texts for word in text.split() for part in parts_of(word, 0, breaks)), default=0)


def _laid_out(column: Column, width: int, cells: Sequence[str]) -> list[list[str]]:
    """Break the cells of a column, its title first, into lines."""
    if column.role in ON_THE_RIGHT:
        return [[cell] for cell in cells]
    return [broken(clip_middle(cell, MOST_LINES * width), width) for cell in cells]


def _painted(column: Column, cells: list[list[str]], color: bool) -> list[list[str]]:
    """Colour the cells of a column, its title first."""
    if not color:
        return cells
    marks = [_mark(column.role, " ".join(cell)) for cell in cells[1:]]
    return [[painted(line, mark) for line in cell] for cell, mark in zip(cells, ["heading", *marks], strict=True)]


def _mark(role: Role, text: str) -> Mark:
    """Return the mark of a cell by the role of its column."""
    if role == "verdict":
        return mark_of(text)
    if role == "faults":
        return "" if text in NO_FAULTS else "bad"
    return "values" if role in ("value", "number") else "dim" if role == "provenance" else ""


def _lines_of(row: Sequence[Sequence[str]]) -> list[list[str]]:
    height = max(map(len, row))
    return [[cell[n] if n < len(cell) else "" for cell in row] for n in range(height)]


def tabulated(
    columns: Sequence[Column], lines: Sequence[Sequence[str]], table_format: str, titles: Sequence[str] = ()
) -> str:
    """Align cells, already escaped and cut, in one of tabulate's formats; no cell is taken for a number."""
    from tabulate import tabulate  # type: ignore[import-untyped]

    how = {"tablefmt": table_format, "disable_numparse": True, "preserve_whitespace": True}
    if table_format == "tsv":  # for programs, without padding
        return str(tabulate(lines, titles, **how, stralign=None, numalign=None))
    aligned = ["right" if c.role in ON_THE_RIGHT else "left" for c in columns]
    return str(tabulate(lines, titles, **how, colalign=aligned))


def wrapped(first: str, text: str, screen: Screen, label: Mark = "", mark: Mark = "") -> list[str]:
    """Render a label and a sentence; text that does not fit the line continues below, indented.

    `label` and `mark` colour the label and the sentence.
    """
    room = (screen.width or 0) - len(first)
    if screen.width is None or len(text) <= room:
        return [f"{painted(first, label, screen.color)}{painted(text, mark, screen.color)}".rstrip()]
    if room < NARROWEST_TEXT:  # put the label on lines of its own
        inside = screen.width - len(BELOW)
        below = [f"{BELOW}{painted(piece, mark, screen.color)}" for piece in broken(text, inside, commands=True)]
        return [*(painted(line, label, screen.color) for line in broken(first.rstrip(), screen.width)), *below]
    pieces = broken(text, room, commands=True)
    starts = [painted(first, label, screen.color), *[" " * len(first)] * (len(pieces) - 1)]
    # Breaking inside a word leaves the space before it at the end of a line: strip it.
    return [
        f"{start}{painted(piece, mark, screen.color)}".rstrip() for start, piece in zip(starts, pieces, strict=True)
    ]


def broken(text: str, width: int, commands: bool = False) -> list[str]:
    """Break a text into lines of at most `width` characters; a longer name is broken after a dot.

    If it may have `commands`, each stays in one line, however long.
    """
    return [text] if len(text) <= width else LineBreaks(width, commands).wrap(text) or [""]


# -- checkpoints, problems and values in one line each, of limited length and safe to print ----------------------------


MAX_LINE = 500
"""Longest message in characters; names in a file may have any length."""

MAX_ITEMS = 6
"""Most items of a list or dict that are shown in a line."""


def checkpoint_line(ck: Checkpoint) -> str:
    """Describe a checkpoint in one line: name, step, ranks, tensors and size.

    Such as `<Checkpoint ep0-ba11500: step 11500, 256 ranks (whole), 1164 tensors, 75.3 GiB>`.
    """
    tensors = sum(measure(s.value).tensors for s in sections_of(ck))
    step = [] if ck.step.value is None else [f"step {ck.step.value}"]
    found = size(sum(f.nbytes for f in ck.files))
    facts = [*step, ranks_line(ck), plural(tensors, "tensor"), found]
    return f"<Checkpoint {printable(clip_middle(ck.name, 60))}: {', '.join(facts)}>"


def ranks_line(ck: Checkpoint) -> str:
    """Count the ranks, and say whether all of them have files: `4 ranks (whole)`, `1 of 256 ranks`, `one file`."""
    world, here = ck.world_size.value, len(ck.ranks)
    verdict = verdict_of(ck)
    if len(ck.files) == 1 and verdict.whole:
        return "one file"
    if not isinstance(world, int) or here >= world or not any(f.status == "missing" for f in ck.files):
        parts = plural(here, "rank") if here else plural(len(ck.files), "file")
        unproven = "perhaps not all" if perhaps_more(ck.problems) else "not compared"
        return f"{parts} ({unproven if verdict.whole is None else 'whole' if verdict.whole else 'NOT WHOLE'})"
    return f"{here} of {world} ranks"


def verdict_lines(verdict: Verdict, screen: Screen = PIPE) -> list[str]:
    """Render the headline of a verdict, and its remark below."""
    lines = wrapped("", printable(verdict.headline), screen, mark=HEADLINES[verdict.level])
    return lines + (wrapped("  -> ", printable(verdict.remark), screen) if verdict.remark else [])


WAYS_OUT = "         "
"""Indentation of a remedy below the code of a problem."""

CULPRIT = 16
"""Widest culprit, in characters, that stands on the line of its first cause; a wider one has a line of its own."""


def incident_lines(
    causes: Sequence[Cause], consequences: Iterable[Consequence] = (), screen: Screen = PIPE, most: int | None = None
) -> list[str]:
    """Render at most `most` incidents: culprit, evidence by code, remedy; then the consequences of lost files.

    Texts are made printable before they are coloured, so that a name from a file cannot contain colours.
    """
    incidents, following = incidents_of(causes), list(consequences)
    shown = incidents[:most]
    lost = following[0].causes if following else ()
    last = max((n for n, one in enumerate(shown) if any(cause.code in lost for cause in one.causes)), default=-1)
    widest = max((len(one.culprit) for one in shown if len(one.culprit) <= CULPRIT), default=0)
    lines: list[str] = []
    for n, one in enumerate(shown):
        lines += _incident(one, widest, screen)
        lines += wrapped("  -> ", printable(_following(following)), screen) if n == last else []
    left = len(incidents) - len(shown)
    return [*lines, *([f"  {plural(left, 'more problem')}; all of them when piped, as in | less"] if left else [])]


def _incident(one: Incident, width: int, screen: Screen) -> Iterator[str]:
    """Render an incident: `rank 2  CK001  no file rank2.pt`, more evidence below it, then the remedy."""
    gap = first = f"  {'':{width}}  " if one.culprit else "  "
    if len(one.culprit) > width:
        yield from wrapped("  ", printable(one.culprit), screen, mark="heading")
    elif one.culprit:
        first = f"  {one.culprit:{width}}  "
    worst, *others = one.causes
    brief = screen.rows is not None
    yield from _evidence(first, worst, 2 if brief else None, screen)
    if brief and len(others) > 1:
        yield f"{gap}{few([_code(cause, screen.color) for cause in others])} too"
    else:
        for cause in others:
            yield from _evidence(gap, cause, 1 if brief else None, screen)
    if one.remedy:
        yield from wrapped(f"{gap}{'':5}  ", printable(one.remedy), screen, mark="dim")


CODES: Mapping[Severity, Mark] = {"error": "bad", "warning": "warn", "note": "heading"}
"""Mark of a problem's code by its severity."""


def _code(cause: Cause, color: bool) -> str:
    return painted(cause.code, CODES[cause.severity], color)


def _evidence(before: str, cause: Cause, most: int | None, screen: Screen) -> list[str]:
    """Render the code and the evidence of a cause in at most `most` lines; `before` is what begins the first line."""
    start, text = f"{before}{cause.code}  ", printable(cause.evidence)
    width = max((screen.width or 0) - len(start), NARROWEST_TEXT)
    pieces = [text] if screen.width is None else broken(text, width)
    if most is not None and len(pieces) > most:
        # The last line ends between two words; in a name longer than a line, at a dot.
        pieces[most - 1] = f"{broken(pieces[most - 1], width - len(CUT) - 1)[0]} {CUT}"
        text = " ".join(pieces[:most])
    first, *rest = wrapped(start, text, screen)
    behind = first.removeprefix(f"{before}{cause.code}")
    return [f"{painted(before, 'heading', screen.color)}{_code(cause, screen.color)}{behind}", *rest]


def _following(consequences: Sequence[Consequence]) -> str:
    """Render the consequences of missing files, with their causes if there are several: `9 tensors have gaps`."""
    codes = consequences[0].causes
    return ", ".join(one.text for one in consequences) + (f" ({' and '.join(codes)})" if len(codes) > 1 else "")


def error_lines(problems: Sequence[Problem], said: str, screen: Screen = PIPE) -> list[str]:
    """Render the incidents behind an error; if the error's line `said` the only cause, just its remedy."""
    causes = causes_of(problems, ("error", "warning", "note"))
    alone = len(causes) == 1 and printable(causes[0].words) in printable(said)
    if not alone:
        return incident_lines(causes, consequences_of(problems), screen, screen.rows)
    return wrapped(WAYS_OUT, printable(causes[0].remedy), screen) if causes[0].remedy else []


def described(value: Any) -> str | None:
    """Describe a value that has no text of its own: a tensor, an array, bytes, a class; None for other values."""
    if isinstance(value, Tensor):
        return f"{short(value.dtype)} tensor {shape(value.shape)}"
    if isinstance(value, (NumpyArray, NumpyScalar)):
        dims = shape(value.shape) if isinstance(value, NumpyArray) else ""
        return f"numpy {value.dtype} {dims}".strip()
    if isinstance(value, (bytes, bytearray)):
        return plural(len(value), "byte")
    if isinstance(value, Opaque):
        return f"<{object_text(value)}>"
    if isinstance(value, Global):
        return f"<{value.dotted}>"
    if isinstance(value, (TorchName, Device, NumpyDtype)):
        return str(value)
    if type(value) is int and value.bit_length() > MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    return None


MAX_PATH = 160
"""Longest path, or other single argument, in characters."""


def object_text(value: Opaque) -> str:
    """Render an object by its class, with few plain arguments: `run.Phase('train')`; a path as one text."""
    from ckptools.keys.entries import brief_args

    args = brief_args(value)
    words = ", ".join(value_text(a, 40 if len(args) > 1 else MAX_PATH) for a in args)
    return f"{value.name}({words})" if args else value.name


def value_text(value: Any, width: int = 80, depth: int = 2) -> str:
    """Render a value in one line of at most `width` characters, safe to print."""
    return clip(printable(_shown(scalar(value), width, depth)), width)


def _shown(value: Any, width: int, depth: int) -> str:
    description = described(value)
    if description is not None:
        return description
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return repr(clip(value, width))
    if isinstance(value, Mapping):
        if not depth:
            return "{" + plural(len(value), "value") + "}"
        some = islice(value.items(), MAX_ITEMS)
        return "{" + _joined([f"{key_name(k)}: {value_text(v, width, depth - 1)}" for k, v in some], len(value)) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        first, last = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
        value = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        if not depth:
            return first + plural(len(value), "value") + last
        return first + _joined([value_text(v, width, depth - 1) for v in islice(value, MAX_ITEMS)], len(value)) + last
    return str(value)


def _joined(texts: list[str], total: int) -> str:
    return ", ".join(texts + ([f"{total - len(texts)} more"] if total > len(texts) else []))


def key_name(key: Any) -> str:
    """Render a dict key: a string unquoted, anything else as a value."""
    return key if isinstance(key, str) else value_text(key)


# -- tables of any records: a column for each field that is nonempty in some record ------------------------------------


MAX_TEXT = 600
"""Longest text of one value in characters."""
SIZES = ("bytes", "nbytes")
"""Fields with a number of bytes."""
VERDICTS = ("result", "severity", "status", "verdict")
"""Fields with a verdict."""
UNSAFE = ("unsafehtml", "latex_raw")
"""Formats of tabulate in which a name from a file could be markup."""


def check_table_format(name: str) -> None:
    """Refuse an unknown table format.

    Raises:
        UsageError: listing the known formats.
    """
    from tabulate import tabulate_formats

    known = [one for one in tabulate_formats if one not in UNSAFE]
    if name not in known:
        raise UsageError(None, f"{spelled('table-format')} {name}: choose one of {', '.join(known)}")


def rows_text(rows: Rows[Any], table_format: str) -> str:
    """Render rows as a table for a document or program: the fields of `to_dicts`, with values as on a screen."""
    known = [fields_of(row) for row in rows]
    columns = columns_of(known)
    cells = [[_cell(c.title, fields.get(c.title), table_format) for c in columns] for fields in known]
    return table_text(columns, cells, table_format)


def table_text(columns: Sequence[Column], cells: Sequence[Sequence[str]], table_format: str) -> str:
    """Render the cells of a table in one of tabulate's formats; nothing without columns."""
    check_table_format(table_format)
    if not columns:
        return ""
    lines = [[_safe(text, table_format) for text in row] for row in cells]
    return tabulated(columns, lines, table_format, [column.title for column in columns])


def _cell(name: str, value: Any, table_format: str) -> str:
    """Render a field of a record; a plain number if the table is for programs."""
    plain = table_format == "tsv" and isinstance(value, (int, float))
    return str(value) if plain else cell_text(name, value)


def _safe(text: str, table_format: str) -> str:
    """Make control characters in a cell visible, and escape bars in Markdown."""
    return printable(text).replace("|", "\\|") if table_format in ("github", "pipe") else printable(text)


def columns_of(known: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Make a column for each field that is nonempty in some record, given as mappings; numbers on the right."""
    every = dict.fromkeys(name for row in known for name in row)
    names = [name for name in every if any(not _is_empty(row.get(name)) for row in known)]
    numeric = [_is_numeric(row.get(name) for row in known) for name in names]
    return [Column(name, _role(name, right)) for name, right in zip(names, numeric, strict=True)]


def _role(name: str, numeric: bool) -> Role:
    return "number" if numeric else "name" if name == "name" else "verdict" if name in VERDICTS else "text"


def fields_of(record: Any) -> Mapping[str, Any]:
    """Return the fields of a record, named as by `to_dict`."""
    if hasattr(record, "_record"):
        found: Mapping[str, Any] = record._record()
        return found
    return {name: getattr(record, name) for name in record_fields(record) or ()}


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", (), False) or (isinstance(value, (Mapping, list)) and not value)


def _is_numeric(values: Iterable[Any]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values if value is not None)


def cell_text(name: str, value: Any) -> str:
    """Render a field in a few words: `-` if empty, bytes with a unit, a record by its summary line."""
    if value == () and "shape" in name:
        return shape(())  # for a scalar
    if value is None or (isinstance(value, (str, tuple)) and not value):
        return "-"
    if name in SIZES and isinstance(value, int):
        return size(value)
    if isinstance(value, Enum):
        return f"{value.name} ({value.value[0]})" if isinstance(value.value, tuple) else str(value.value)
    if isinstance(value, (str, Path)):
        return str(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, tuple) and all(type(item) is int for item in value):
        return shape(value)
    if record_fields(value) is not None:
        return repr(value)
    if isinstance(value, tuple) and all(type(item) is str for item in value):
        return few(value)
    if isinstance(value, tuple) and record_fields(value[0]) is not None:
        return repr(Rows(value))
    return value_text(value, MAX_TEXT)
