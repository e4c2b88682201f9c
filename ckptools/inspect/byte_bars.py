"""The bytes of the sections of a checkpoint by dtype, as bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptools.display.drawing import FILLS, WIDTH, Key, Picture, Rect, label, legend, mark, name_text, rect, svg
from ckptools.dtypes import short
from ckptools.model.checkpoint import Checkpoint
from ckptools.text import plural, size
from ckptools.training_state.section_size import measure
from ckptools.training_state.sections import sections_of

MAX_BARS = 40
"""At most this many sections, the largest, have a bar."""

_KINDS = tuple(kind for kind in FILLS if kind != "light")

BAR = 22.0
NAMES, SIZES = 180.0, 80.0
"""Room for the names of sections, and for their sizes."""


class ByteBar(NamedTuple):
    """The bytes of one section by dtype, the most first."""

    section: str
    dtypes: tuple[tuple[str, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all dtypes together."""
        return sum(nbytes for _, nbytes in self.dtypes)


def byte_bars(ck: Checkpoint) -> tuple[ByteBar, ...]:
    """The bytes of tensors by section, the largest first; a tied weight counts once."""
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
    """Start and width of each part of a bar; the largest section fills the width."""
    room, before = WIDTH - NAMES - SIZES, 0
    for _, nbytes in bar.dtypes:
        yield NAMES + before / most * room, nbytes / most * room
        before += nbytes


def _bar(bar: ByteBar, y: float, most: int, kinds: dict[str, str]) -> Iterator[str]:
    yield label(NAMES - 8, y + 14, name_text(bar.section, int(NAMES / 7)), "ink", "end")
    end = NAMES
    for (dtype, nbytes), (x, width) in zip(bar.dtypes, part_widths(bar, most), strict=True):
        at = Rect(x, y + 2, width, BAR - 4).inset(0.5)
        yield rect(at, kinds[dtype], f"{name_text(bar.section)}: {short(dtype)} {size(nbytes)}") + mark(
            at, short(dtype)
        )
        end = x + width
    yield label(end + 6, y + 14, size(bar.nbytes), "faint")
