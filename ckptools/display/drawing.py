"""SVG pictures: the elements to draw them, their stylesheet, and the class `Picture` that users get.

Every text is made printable and escaped here, also texts of ckptools. Colours are CSS classes, so that a picture
follows the reader's light or dark theme; a letter, a pattern or a number always repeats the meaning of a colour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

from ckptools.errors import UsageError
from ckptools.files.partial_files import write_text
from ckptools.text import clip, clip_middle, printable, size

WIDTH = 440
"""Width of every picture in units, of which its text has 11; a screen of 500 pixels shows it without scaling down."""

CHARACTER = 6.7
"""Width of a character of the monospaced 11-unit font in units, rounded up so that nothing is cut."""

MAX_NAME = 160
"""Longest name in a picture, in characters; longer ones are cut in the middle."""

MAX_LINE = 120
"""Longest text in characters that appears under the pointer."""


@dataclass(frozen=True, repr=False)
class Picture:
    """A picture of a checkpoint, of a tensor or of a run.

    Attributes:
        title: subject, in a line.
        svg: the picture: one self-contained `<svg>` element, in light and dark, without a script.
        text: the same facts in words, a few lines.
    """

    title: str
    svg: str = field(repr=False)
    text: str

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the picture into an `.svg` file, which appears whole or not at all.

        `force` overwrites an existing file.

        Raises:
            UsageError: the name does not end with `.svg`, or its folder does not exist.
            OutputExistsError: the file exists.
            WriteError: the file cannot be written.
        """
        out = Path(path)
        if out.suffix.lower() != ".svg":
            raise UsageError(out, "a picture is written as .svg; give it that suffix")
        write_text(out, self.svg + "\n", force)
        return out

    def __repr__(self) -> str:
        tail = f", {size(len(self.svg.encode()))} of SVG>"
        return f"<Picture: {clip(printable(self.title), MAX_LINE - len(tail) - len('<Picture: '))}{tail}"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The picture and its text for a notebook; the text is there since code hosts strip SVG from HTML."""
        return {"image/svg+xml": self.svg, "text/plain": self.text}

    def html(self) -> str:
        """Return the picture for a page, with its text folded below."""
        words = f"<details><summary>in words</summary><pre>{escaped(self.text)}</pre></details>"
        return f'<div class="ckpt-picture" style="font:12px/1.45 ui-monospace,monospace">{self.svg}{words}</div>'


class Rect(NamedTuple):
    """A rectangle, in units of the picture; `y` grows downwards."""

    x: float
    y: float
    width: float
    height: float

    def inset(self, by: float) -> Rect:
        """Shrink the rectangle at its right and lower edge, by at most half its size."""
        return self._replace(width=self.width - min(by, self.width / 2), height=self.height - min(by, self.height / 2))


# Okabe and Ito, "Color Universal Design", 2008 (https://jfly.uni-koeln.de/color/): distinct with every kind of colour
# blindness; their brightness differs, so that most are also distinct in grey.
FILLS = {
    "sky": "#56b4e9",
    "light": "#a9d8f5",
    "orange": "#e69f00",
    "green": "#009e73",
    "yellow": "#f0e442",
    "blue": "#0072b2",
    "bad": "#d55e00",
    "purple": "#cc79a7",
}
"""Colours of states: `sky` is sound, and others are faults, wherever a picture has them."""

VIRIDIS = ("#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725")
"""Ten steps of matplotlib's viridis (CC0), with evenly rising brightness, so that they stay ordered in grey."""

DIVERGING = ("#08306b", "#0b559f", "#2b7bba", "#63a8d3", "#a9d8f5", "#fdd0a2", "#fd8d3c", "#d94801", "#7f2704")
"""Nine steps from dark blue through `light` to brown, distinct with every kind of colour blindness.

Usual values are in the middle, whose colour is visible on paper, so that a healthy model is no empty grid.
"""

DIVERGING_ON_DARK = (
    "#d2e8f7", "#a5d0ec", "#74b4dd", "#4a94c8", "#2c6288", "#7a5228", "#b86a22", "#f39a4d", "#ffd9b5"
)  # fmt: skip
"""The same for a dark background."""

TINTS = ("#b5b0de", "#8ccfb5", "#c9b79c", "#8f9bb8", "#dfa9b4", "#a8c66c")
"""Colours of what is neither sound nor broken, such as dtypes: none of them is a colour of `FILLS`."""

_THEMED = (
    ("paper", "fill", "#ffffff", "#15181d"),
    ("ink", "fill", "#1f2328", "#dfe3e8"),
    ("faint", "fill", "#59636e", "#9aa4af"),
    ("pale", "fill", "#e7ebf0", "#2e353d"),
    ("edge", "stroke", "#59636e", "#9aa4af"),
    ("grid", "stroke", "#c4ccd4", "#4a535e"),
    ("rim", "stroke", "#8a939c", "#7b8590"),
    ("halo", "stroke", "#ffffff", "#15181d"),
)
"""Classes whose colour follows the reader's theme: name, property, colour in light, colour in dark."""


def _themed(within: str, dark: bool) -> str:
    return "".join(f"{within}.ckptsvg .{name}{{{what}:{(a, b)[dark]}}}" for name, what, a, b in _THEMED)


def _ramped(within: str, dark: bool) -> str:
    colors = zip(DIVERGING, DIVERGING_ON_DARK if dark else DIVERGING, strict=True)
    return "".join(f'{within}.ckptsvg [fill="{color}"]{{fill:{shown}}}' for color, shown in colors)


def _by_scheme(rules: Callable[[str, bool], str]) -> str:
    """Repeat CSS rules for dark: for a dark colour scheme of the browser, and for JupyterLab's own dark theme."""
    light, dark = rules("[data-jp-theme-light=true] ", False), rules("[data-jp-theme-light=false] ", True)
    return f"@media screen and (prefers-color-scheme:dark){{{rules('', True)}{light}}}@media screen{{{dark}}}"


STYLE = "".join(
    [
        ".ckptsvg text{font:11px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}",
        ".ckptsvg .on{fill:#000}.ckptsvg .big{font-size:13px;font-weight:bold}",
        ".ckptsvg .halo{paint-order:stroke;stroke-width:4px}",
        ".ckptsvg .edge,.ckptsvg .grid{fill:none}.ckptsvg .dash{stroke-dasharray:3 2}",
        *(f".ckptsvg .{name}{{fill:{color}}}" for name, color in FILLS.items()),
        *(f".ckptsvg .tint{n}{{fill:{color}}}" for n, color in enumerate(TINTS)),
        _themed("", dark=False),
        _by_scheme(_themed),
    ]
)
"""Stylesheet at the beginning of every picture; its classes apply only within pictures, so a page can have many."""

RAMP_STYLE = _by_scheme(_ramped)
"""Further styles of a picture with colours of `DIVERGING`."""


def escaped(text: str) -> str:
    """Escape markup in a text, and spell out invisible characters."""
    return "\n".join(escape(printable(line)) for line in text.split("\n"))


def name_text(name: str, most: int = MAX_NAME) -> str:
    """Make a name of the file printable, and clip it."""
    return clip_middle(printable(name), most)


def number(value: float) -> str:
    """Render a coordinate with at most two digits after the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def rect(at: Rect, kind: str, hover: str = "") -> str:
    """Draw a rectangle of a class, with a text that appears under the pointer."""
    x, y, width, height = map(number, at)
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" class="{kind}"'
    return f"{shape}><title>{escaped(hover)}</title></rect>" if hover else f"{shape}/>"


def colored(at: Rect, fill: str, hover: str = "") -> str:
    """Draw a rectangle in a colour of a scale, with an outline that stands out on light and dark."""
    return rect(at, "rim", hover).replace('class="rim"', f'fill="{fill}" class="rim"', 1)


def label(x: float, y: float, text: str, kind: str = "ink", anchor: str = "start") -> str:
    """Draw a line of text with its baseline at `y`; `anchor` says which part of it is at `x`: start, middle or end."""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{number(x)}" y="{number(y)}" class="{kind}"{where}>{escaped(text)}</text>'


def mark(at: Rect, text: str, kind: str = "on") -> str:
    """Draw a text in the middle of a rectangle, black unless a class is given; "" if there is no room for it."""
    if len(text) * CHARACTER > at.width or at.height < 11:
        return ""
    # The pointer must find the rectangle under the letter.
    made = label(at.x + at.width / 2, at.y + at.height / 2 + 4, text, kind, "middle")
    return made.replace("<text", '<text pointer-events="none"', 1)


def marks(found: Iterable[tuple[Rect, str]], kind: str) -> str:
    """Draw a letter in the middle of each of several rectangles of one row, as one text element."""
    placed = [(at, letter) for at, letter in found if letter]
    if not placed:
        return ""
    xs = " ".join(number(at.x + at.width / 2) for at, _ in placed)
    first, letters = placed[0][0], "".join(letter for _, letter in placed)
    y = number(first.y + first.height / 2 + 4)
    return f'<text pointer-events="none" x="{xs}" y="{y}" class="{kind}" text-anchor="middle">{escaped(letters)}</text>'


def line(points: Sequence[tuple[float, float]], kind: str) -> str:
    """Draw a line through several points."""
    steps = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polyline points="{steps}" class="{kind}"/>'


HATCH = 6
"""Units between two lines of a hatching."""


def hatched(at: Rect, hover: str) -> str:
    """Draw a hatched rectangle for a missing part, with lines: an SVG pattern would need a unique id on the page."""
    path = "".join(f"M{number(a)},{number(b)}L{number(c)},{number(d)}" for a, b, c, d in hatch_lines(at))
    edges = rect(at, "paper", hover) + rect(at, "edge").replace("<rect", '<rect pointer-events="none"', 1)
    return f'{edges}<path d="{path}" class="grid" pointer-events="none"/>' if path else edges


def hatch_lines(at: Rect) -> Iterator[tuple[float, float, float, float]]:
    """Yield the slanted lines of a rectangle as `(x1, y1, x2, y2)`, cut at its edges."""
    steps = int((at.width + at.height) / HATCH)
    for step in range(1, steps + 1):
        along = step * HATCH  # the line x + y = along, seen from the upper left corner
        low, high = max(0.0, along - at.height), min(along, at.width)
        if high > low:
            yield at.x + low, at.y + along - low, at.x + high, at.y + along - high


class Key(NamedTuple):
    """An entry of the legend.

    Attributes:
        kind: class of its colour; `hatched`, or `dash` for an outline.
        letter: letter in such cells; "" for none.
        means: meaning of colour and letter.
    """

    kind: str
    letter: str
    means: str


def letter_of(key: Key) -> str:
    """Return the class of letters on such cells: black on colours, the theme's text colour on others."""
    return "on" if key.kind in FILLS or key.kind.startswith("tint") else "ink"


def legend(keys: Iterable[Key], y: float) -> tuple[str, float]:
    """Draw the entries one after the other, in as many lines as needed; return them and the `y` below."""
    made, x = [], 0.0
    for key in keys:
        room = 20 + len(key.means) * CHARACTER + 16
        if x and x + room > WIDTH:
            x, y = 0.0, y + 20
        box = Rect(x, y, 14, 14)
        cell = hatched(box, "") if key.kind == "hatched" else rect(box, key.kind)
        made.append(cell + mark(box, key.letter, letter_of(key)) + label(x + 19, y + 11, key.means))
        x += room
    return "".join(made), y + 20 if made else y


MARGIN = 8


def text_lines(texts: Iterable[str], kind: str = "faint", most: int = 2) -> tuple[list[str], float]:
    """Draw sentences below each other, each in at most `most` lines; return them and the `y` below.

    A sentence that begins in capitals, such as `HOLES: …`, stands out.
    """
    shown = [part for text in texts for part in split(text, most)]
    lines = [label(0, 12 + 16 * n, part, "ink" if part[:5].isupper() else kind) for n, part in enumerate(shown)]
    return lines, 16.0 * len(shown) + 8


def split(text: str, most: int = 2) -> list[str]:
    """Split a sentence into at most `most` lines of the picture, at blanks where they are."""
    room = int(WIDTH / CHARACTER)
    lines: list[str] = []
    while len(text) > room and len(lines) < most - 1:
        blank = text.rfind(" ", room // 2, room + 1)
        lines.append(text[: room if blank < 0 else blank])
        text = text[len(lines[-1]) :].lstrip()
    return [*lines, name_text(text, room)]


def svg(title: str, text: str, parts: Iterable[str], height: float) -> str:
    """Make an `<svg>` element of the usual width: a title, and parts below it, whose `y` starts at 0 there.

    `text` describes the picture for readers who cannot see it.
    """
    wide, high = number(WIDTH + 2 * MARGIN), number(height + 30 + 2 * MARGIN)
    head = label(MARGIN, MARGIN + 13, clip_middle(title, int(WIDTH / 8.2)), "ink big")
    drawn = "".join(parts)
    style = STYLE + (RAMP_STYLE if f'fill="{DIVERGING[0]}"' in drawn else "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ckptsvg" role="img" viewBox="0 0 {wide} {high}" '
        f'width="{wide}" height="{high}" style="max-width:100%;height:auto">'
        f"<title>{escaped(title)}</title><desc>{escaped(text)}</desc><style>{style}</style>"
        f'<rect width="100%" height="100%" rx="6" class="paper"/>{head}'
        f'<g transform="translate({MARGIN},{MARGIN + 30})">{drawn}</g></svg>'
    )
