"""What a terminal showed over time, as an SVG that plays once, and holds what was shown last.

A terminal emulator makes screens of the characters that a program wrote. Each row of a screen is drawn once for the
time in which it stays the same. CSS shows and hides rows, so that the picture also plays within `<img>`, where no
script runs; a reader who wants no motion sees the last screen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape, unescape
from itertools import groupby
from typing import NamedTuple

import pyte

ADVANCE, LEADING, BASELINE = 8.4, 18, 13.5
"""Units from one character to the next, from one row to the next, and from the top of a row to its baseline."""

MARGIN = 16

STYLE = """\
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}}
.b{{font-weight:700}}.u{{text-decoration:underline}}
{colours}
.w{{animation:w step-end}}@keyframes w{{from{{visibility:hidden}}}}
.v{{visibility:hidden;animation:v step-end}}@keyframes v{{from{{visibility:visible}}}}
@media(prefers-reduced-motion:reduce){{.v,.w{{animation:none}}}}"""

LIGHT = {
    "back": "#f6f8fa", "ink": "#1f2328", "rule": "#d1d9e0", "black": "#1f2328", "red": "#b3261e", "green": "#1b6e33",
    "brown": "#8a5100", "blue": "#0550ae", "magenta": "#6639ba", "cyan": "#136b74", "white": "#59636e",
    "brightblack": "#59636e",
}  # fmt: skip
DARK = {
    "back": "#151b23", "ink": "#e6edf3", "rule": "#3d444d", "black": "#848d97", "red": "#ff8a80", "green": "#81c995",
    "brown": "#ffcc66", "blue": "#79c0ff", "magenta": "#bc8cff", "cyan": "#76e3ea", "white": "#d1d7e0",
    "brightblack": "#9198a1",
}  # fmt: skip
"""Colours by the names that pyte has for them; `brown` is the yellow of a terminal."""

FAINT = re.compile(r"\x1b\[2m")
"""Faint, for which the emulator has no attribute: it is drawn as a grey. Source: ECMA-48, 8.3.117."""

KEYBOARD = re.compile(r"\x1b\[[<>=][\d;]*[a-zA-Z]")
"""Requests for keys of another protocol, which the emulator takes for text."""

LEFT = "\x1b[?1049l"
"""A program that has had the whole screen gives it back."""


class Cells(NamedTuple):
    """Characters of a row from a column on, which look alike."""

    column: int
    text: str
    ink: str
    back: str
    bold: bool
    underlined: bool


Row = tuple[Cells, ...]


def drawn(events: Sequence[tuple[float, str]], title: str, columns: int = 80, lines: int | None = None) -> str:
    """Draw what was written to a terminal.

    Args:
        events: seconds since the beginning, and the characters written then. What follows the end of a program that has
            had the whole screen is left out.
        title: for those who do not see the picture.
        columns: of the terminal.
        lines: of the terminal; as many as were used, if None.
    """
    screens = list(_screens(events, columns, lines or 200))
    height = lines or max(n + 1 for _, rows in screens for n, row in enumerate(rows) if row)
    shown = "".join(_over_time(n, [(at, rows[n]) for at, rows in screens]) for n in range(height))
    wide, high = columns * ADVANCE + 2 * MARGIN, height * LEADING + 2 * MARGIN
    # A program that has the whole screen paints it to its edges: then the frame has its colour too.
    corner = next((row[0].back for _, rows in screens for row in rows[:1] if row), "default")
    fill = 'class="back rule"' if corner == "default" else _fill(corner)
    frame = f'<rect x=".5" y=".5" width="{wide - 1:g}" height="{high - 1:g}" rx="8" {fill}/>'
    size = f'viewBox="0 0 {wide:g} {high:g}" width="{wide:g}" height="{high:g}"'
    colours = f"{_colours(LIGHT)}\n@media(prefers-color-scheme:dark){{{_colours(DARK)}}}"
    style = STYLE.format(colours=colours)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    return f'{head}<style>{style}</style>{frame}<g transform="translate({MARGIN},{MARGIN})">\n{shown}</g></svg>\n'


def last_screen(svg: str) -> str:
    """The text of the screen that a picture holds at its end."""
    rows = re.findall(r'<g class="w"[^>]*translate\(0,(\d+)\)[^>]*>(.*)</g>', svg)
    lines = {int(top) // LEADING: _text_of(row) for top, row in rows}
    return "\n".join(lines.get(n, "") for n in range(max(lines, default=-1) + 1))


def _text_of(row: str) -> str:
    line = ""
    for column, text in re.findall(r'<text data-column="(\d+)"[^>]*>([^<]*)<', row):
        line = line.ljust(int(column)) + unescape(text)
    return line.rstrip()


def _colours(colours: dict[str, str]) -> str:
    rule = colours["rule"]
    named = "".join(f".{name}{{fill:{colour}}}" for name, colour in colours.items() if name != "rule")
    return f".rule{{stroke:{rule}}}{named}"


def _screens(events: Sequence[tuple[float, str]], columns: int, lines: int) -> Iterator[tuple[float, list[Row]]]:
    """Yield the rows of the screen after each event that changed it."""
    screen = pyte.Screen(columns, lines)
    stream, before = pyte.Stream(screen), None
    for at, text in events:
        if LEFT in text:
            return
        stream.feed(KEYBOARD.sub("", FAINT.sub("\x1b[90m", text)))
        rows = [_row(screen, n) for n in range(lines)]
        if rows != before:
            yield at, rows
        before = rows


def _row(screen: pyte.Screen, number: int) -> Row:
    """A row of the screen as runs that look alike, without spaces of the background's colour."""
    cells = [screen.buffer[number][column] for column in range(screen.columns)]
    looks = [(*_colours_of(cell), cell.bold, cell.underscore) for cell in cells]
    runs = []
    for look, group in groupby(range(screen.columns), key=looks.__getitem__):
        at = list(group)
        text = "".join(cells[column].data for column in at)
        if text.strip() or look[1] != "default":
            runs.append(Cells(at[0], text, *look))
    return tuple(runs)


def _colours_of(cell: pyte.screens.Char) -> tuple[str, str]:
    """The colours of a character and of what is behind it, by name."""
    if not cell.reverse:
        return cell.fg, cell.bg
    return ("back" if cell.bg == "default" else cell.bg), ("ink" if cell.fg == "default" else cell.fg)


def _over_time(number: int, states: Sequence[tuple[float, Row]]) -> str:
    """A row of the screen, drawn for each time in which it stays the same."""
    changes = [next(group) for _, group in groupby(states, key=lambda state: state[1])]
    until = [at for at, _ in changes[1:]]
    parts = []
    for n, (at, row) in enumerate(changes):
        if not row:
            continue
        if n < len(until):
            times = f'class="v" style="animation-duration:{until[n] - at:.2f}s;animation-delay:{at:.2f}s"'
        else:
            times = f'class="w" style="animation-duration:{at:.2f}s"'
        parts.append(f'<g {times} transform="translate(0,{number * LEADING})">{"".join(map(_cells, row))}</g>\n')
    return "".join(parts)


def _cells(run: Cells) -> str:
    x, width = run.column * ADVANCE, len(run.text) * ADVANCE
    back = ""
    if run.back != "default":
        back = f'<rect x="{x:g}" width="{width:.1f}" height="{LEADING}" {_fill(run.back)}/>'
    return back + "".join(_words(run))


def _words(run: Cells) -> Iterator[str]:
    """The words of a run; what stands behind two spaces is placed anew, so that columns stay in line in every font."""
    weight = f"{' b' if run.bold else ''}{' u' if run.underlined else ''}"
    for word in re.finditer(r"\S+(?: \S+)*", run.text):
        column, length = run.column + word.start(), len(word[0])
        where = f'x="{column * ADVANCE:g}" y="{BASELINE}" textLength="{length * ADVANCE:.1f}"'
        yield f'<text data-column="{column}" {where} {_fill(run.ink, weight)}>{escape(word[0])}</text>'


def _fill(colour: str, more: str = "") -> str:
    """The classes, or the style, of a colour by its name, or by its red, green and blue."""
    if re.fullmatch("[0-9a-f]{6}", colour):
        return f'style="fill:#{colour}"' + (f' class="{more.strip()}"' if more else "")
    return f'class="{colour.replace("default", "ink")}{more}"'
