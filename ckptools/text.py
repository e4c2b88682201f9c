"""How things are said in one line of plain text: names made safe to print, numbers with their units, lists cut short.

The words are ASCII but for `…`; only names from files may hold more.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any

CUT = "..."
MOST = 6
"""Names in a line, unless the caller asks for another number."""

MAX_KEY = 200
"""Characters of a key that an error shows."""

MAX_COMPARED = 20_000
"""At most this many names are searched for a "did you mean"."""

MAX_BITS = 512
"""A longer integer is described: printing one takes time quadratic in its length, and Python refuses it."""

# -- names -------------------------------------------------------------------------------------------------------------


Key = Any
"""One step of a key path: usually a str, an int for optimizer ids and list positions."""

KeyPath = tuple[Key, ...]


def fqn_of(path: KeyPath) -> str:
    """Join a key path for people. Inside ckptools pass the tuple: keys may hold dots."""
    return ".".join(map(str, path))


def is_within(name: str, part: str) -> bool:
    """Whether a dotted name is that of a part, or of something in it."""
    return f"{name}.".startswith(f"{part}.")


def printable(text: str) -> str:
    r"""The text with everything escaped that a terminal could act on, or that would forge a line.

    Control characters of both sets, line and paragraph separators, bidi and zero-width marks, lone surrogates and
    unassigned code points become `\x1b`, `\u202e` and the like. Doing it twice changes nothing.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def encodable(text: str, encoding: str | None) -> str:
    """The text as a stream of an encoding can write it: `->` for an arrow, else a backslash escape."""
    try:
        text.encode(encoding or "ascii")
        return text
    except (UnicodeEncodeError, LookupError):
        text = text.replace("→", "->")
    try:
        return text.encode(encoding or "ascii", "backslashreplace").decode(encoding or "ascii")
    except LookupError:
        return text.encode("ascii", "backslashreplace").decode("ascii")


def clip(text: str, width: int) -> str:
    """A text of at most `width` characters: a longer one loses its end, and ends in `...`."""
    return text if len(text) <= width else text[: max(width - len(CUT), 0)] + CUT


def clip_middle(text: str, width: int) -> str:
    """A name of at most `width` characters: a longer one loses its middle, for fqns differ at both ends."""
    if len(text) <= width:
        return text
    tail = max(width - len(CUT), 0) * 2 // 3
    return clip(text, width - tail) + text[len(text) - tail :]


def clip_name(text: str, width: int) -> str:
    """An fqn of at most `width` characters, cut at dots where that fits: `model...mlp.down_proj.weight`."""
    parts = text.split(".")
    if len(text) <= width or len(parts) < 3 or len(parts[0]) + len(CUT) + len(parts[-1]) > width:
        return clip_middle(text, width)
    head, tail = f"{parts[0]}{CUT}", parts.pop()
    while len(head) + len(parts[-1]) + 1 + len(tail) <= width:
        tail = f"{parts.pop()}.{tail}"
    return head + tail


def told_apart(texts: Sequence[str], width: int) -> list[str]:
    """Texts of at most `width` characters, of which no two that differ look alike.

    Texts that a cut would make equal are shown from shortly before their first difference on.
    """
    cut = [clip(text, width) for text in texts]
    shown = list(cut)
    for n, text in enumerate(texts):
        twins = [other for other, brief in zip(texts, cut, strict=True) if brief == cut[n] and other != text]
        if twins:
            start = max(common_prefix(text, other) for other in twins) - width // 3
            shown[n] = clip(CUT + text[max(start, 0) :], width)
    return shown


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """How many of the first items of two texts, or two runs of bytes, are the same."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# -- lists -------------------------------------------------------------------------------------------------------------


def few(names: Sequence[str], most: int = MOST) -> str:
    """Names in a row, at most `most` of them: `a, b, c and 4 more`."""
    return ", ".join(names[:most]) + and_more(len(names) - most)


def first_few(things: Sequence[object], most: int = 8) -> str:
    """Things in a row, at most `most` of them, and ` …` where there are more: `0, 1, 2 …`."""
    return ", ".join(map(str, things[:most])) + (" …" if len(things) > most else "")


def and_more(count: int) -> str:
    """` and 4 more`; nothing where there are none."""
    return f" and {count} more" if count > 0 else ""


def and_others(count: int) -> str:
    """` (and 4 more)` behind the first of several sentences; nothing where there are none."""
    return f" (and {count} more)" if count > 0 else ""


def first_line(error: BaseException) -> str:
    """An error in one line: its message up to the first line break, or the name of its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# -- numbers -----------------------------------------------------------------------------------------------------------


def size(nbytes: int) -> str:
    """A number of bytes in IEC units: `384 B`, `5.0 KiB`, `74.9 GiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value, unit = _scaled(min(nbytes, 1 << 90), 1024, ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"), 1023.95)
    return f"{value:.1f} {unit}"


def _scaled(n: int, base: int, units: Sequence[str], limit: float) -> tuple[float, str]:
    """Divide by `base` until the number is below `limit`, or units run out."""
    value = float(n)
    for unit in units:
        value /= base
        if value < limit:
            return value, unit
    return value, units[-1]


def count(n: int) -> str:
    """A number of elements, exact up to four digits: `1538`, `266 k`, `16.8 M`, `6.74 B`."""
    if n < 10_000:
        return str(n)
    value, unit = _scaled(min(n, 10**24), 1000, ("k", "M", "B", "T"), 999.5)
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def number(value: float) -> str:
    """A float as people write it: `0.1`, `0`, `7.5e-04`, `1e-08`; six digits where the file has more."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) < 1e6 and value == int(value):
        return str(int(value))
    if 1e-3 <= abs(value) < 1e6:
        exact = repr(value)
        return exact if len(exact) <= 10 else f"{value:.6g}"
    mantissa, _, exponent = f"{value:.5e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{exponent}"


def plural(n: int, noun: str, nouns: str = "") -> str:
    """A number of things: `1 rank`, `3 ranks`; `nouns` is the plural where that is not `noun` with an s."""
    return f"{n} {noun if n == 1 else nouns or f'{noun}s'}"


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers in ascending order, consecutive ones folded: `0, 4..9, 12`."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    shown = [str(a) if a == b else f"{a}..{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more runs" if len(shown) > 12 else "")


def named_ranks(ranks: Collection[int]) -> str:
    """`rank 2`, `ranks 0, 4..9`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


# -- times -------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """How long something took: `0.01 s`, `2.9 s`, `3 min 20 s`."""
    if seconds < 0.995:
        return f"{max(seconds, 0.01):.2f} s"
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def moment(seconds: float) -> str:
    """A time in seconds since 1970, in the local zone: `2026-11-20 01:42:07`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def moment_utc(seconds: float) -> str:
    """A time in seconds since 1970, as JSON has it: `2026-11-20T01:42:07Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def period(first: float, last: float) -> str:
    """Two file times, what they have in common written once: `2026-11-20 01:42:07 .. 01:42:45`."""
    start, end = moment(first), moment(last)
    if start == end:
        return start
    return f"{start} .. {end[11:] if start[:10] == end[:10] else end}"


def parse_bytes(text: str) -> int | None:
    """`5GB` (decimal, as Hugging Face means it), `500MiB`, or a plain number of bytes; None for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) <= 0:
        return None
    power = "KMGT".index(found[2].upper()) + 1 if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def shape(sizes: Sequence[int]) -> str:
    """Sizes per dimension: `[32000, 4096]`."""
    return f"[{', '.join(map(str, sizes))}]"


def no_such_key(key: object, names: Iterable[str]) -> str:
    """`no 'wieght' here; the nearest is 'weight'`: what a `KeyError` says of a name that is not there."""
    from difflib import get_close_matches  # takes some milliseconds to import

    shown = repr(clip(printable(str(key)), MAX_KEY))
    near = get_close_matches(str(key)[:MAX_KEY], list(islice(names, MAX_COMPARED)), 1)
    return f"no {shown} here" + (f"; the nearest is {clip(printable(near[0]), MAX_KEY)!r}" if near else "")
