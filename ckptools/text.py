"""Render values in one line of plain text: names made safe to print, numbers with units, shortened lists.

The output is ASCII but for `…`; only names from files may contain other characters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any

CUT = "..."
MOST = 6
"""Default for the number of names in a line."""

MAX_KEY = 200
"""Characters of a key in an error."""

MAX_COMPARED = 20_000
"""At most this many names are searched for a "did you mean"."""

MAX_BITS = 512
"""Longer integers are described, not printed: printing takes quadratic time, and Python refuses it."""

# -- names -------------------------------------------------------------------------------------------------------------


Key = Any
"""One step of a key path: usually a str, an int for optimizer ids and list positions."""

KeyPath = tuple[Key, ...]


def fqn_of(path: KeyPath) -> str:
    """Join a key path for display. Inside ckptools pass the tuple: keys may contain dots."""
    return ".".join(map(str, path))


def is_within(name: str, part: str) -> bool:
    """Whether a dotted name is `part`, or lies inside it."""
    return f"{name}.".startswith(f"{part}.")


def printable(text: str) -> str:
    r"""Escape everything in a text that a terminal could act on, or that would forge a line.

    Control characters of both sets, line and paragraph separators, bidi and zero-width marks, lone surrogates and
    unassigned code points become `\x1b`, `\u202e` and the like. A second call changes nothing.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def encodable(text: str, encoding: str | None) -> str:
    """Make a text writable in an encoding: `->` for an arrow, backslash escapes for other characters."""
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
    """Clip a text to `width` characters, between two words if one ends near there; a clipped text ends in `...`."""
    if len(text) <= width:
        return text
    room = max(width - len(CUT), 0)
    space = text.rfind(" ", room * 2 // 3, room)
    return text[: space + 1 or room] + CUT


def clip_middle(text: str, width: int) -> str:
    """Clip a name to `width` characters by cutting its middle, since fqns differ at both ends."""
    if len(text) <= width:
        return text
    tail = max(width - len(CUT), 0) * 2 // 3
    return clip(text, width - tail) + text[len(text) - tail :]


def told_apart(texts: Sequence[str], width: int) -> list[str]:
    """Clip texts to `width` characters so that different texts stay different.

    Texts that clipping would make equal start shortly before their first difference.
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
    """The length of the common prefix of two texts, or of two byte strings."""
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
    """List at most `most` names: `a, b, c and 4 more`."""
    return ", ".join(names[:most]) + and_more(len(names) - most)


def first_few(things: Sequence[object], most: int = 8) -> str:
    """List at most `most` things, followed by ` …` if there are more: `0, 1, 2 …`."""
    return ", ".join(map(str, things[:most])) + (" …" if len(things) > most else "")


def and_more(count: int) -> str:
    """` and 4 more`; "" if `count` is 0."""
    return f" and {count} more" if count > 0 else ""


def and_others(count: int) -> str:
    """` (and 4 more)`, to follow the first of several sentences; "" if `count` is 0."""
    return f" (and {count} more)" if count > 0 else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# -- numbers -----------------------------------------------------------------------------------------------------------


def size(nbytes: int) -> str:
    """Format a number of bytes in IEC units: `384 B`, `5.0 KiB`, `74.9 GiB`."""
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
    """Format a number of elements, exact up to four digits: `1538`, `266 k`, `16.8 M`, `6.74 B`."""
    if n < 10_000:
        return str(n)
    value, unit = _scaled(min(n, 10**24), 1000, ("k", "M", "B", "T"), 999.5)
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def number(value: float) -> str:
    """Format a float as people write it: `0.1`, `0`, `7.5e-04`, `1e-08`; at most six digits."""
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
    """Format a number of things: `1 rank`, `3 ranks`; `nouns` is the plural unless it is `noun` with an s."""
    return f"{n} {noun if n == 1 else nouns or f'{noun}s'}"


def spans(numbers: Iterable[int]) -> str:
    """Format integers in ascending order, consecutive ones folded: `0, 4..9, 12`."""
    shown = [", ".join(run) for run in runs_of(numbers)]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more runs" if len(shown) > 12 else "")


def runs_of(numbers: Iterable[int]) -> list[list[str]]:
    """Divide integers into runs of consecutive ones, in ascending order; a run of three or more is one word: `4..9`."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return [[str(a)] if a == b else [str(a), str(b)] if b == a + 1 else [f"{a}..{b}"] for a, b in runs]


def named_ranks(ranks: Collection[int]) -> str:
    """Format ranks: `rank 2`, `ranks 0, 4..9`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


# -- times -------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Format a duration: `0.01 s`, `2.9 s`, `3 min 20 s`."""
    if seconds < 0.995:
        return f"{max(seconds, 0.01):.2f} s"
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def moment(seconds: float) -> str:
    """Format seconds since 1970 in the local time zone: `2026-11-20 01:42:07`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def moment_utc(seconds: float) -> str:
    """Format seconds since 1970 for JSON: `2026-11-20T01:42:07Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def period(first: float, last: float) -> str:
    """Format two file times, with their common part written once: `2026-11-20 01:42:07 .. 01:42:45`."""
    start, end = moment(first), moment(last)
    if start == end:
        return start
    return f"{start} .. {end[11:] if start[:10] == end[:10] else end}"


def parse_bytes(text: str) -> int | None:
    """Parse `5GB` (decimal, as Hugging Face means it), `500MiB`, or a plain number of bytes; None for other texts."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) <= 0:
        return None
    power = "KMGT".index(found[2].upper()) + 1 if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def shape(sizes: Sequence[int]) -> str:
    """Format sizes per dimension: `[32000, 4096]`."""
    return f"[{', '.join(map(str, sizes))}]"


def no_such_key(key: object, names: Iterable[str]) -> str:
    """The message of a `KeyError` about an unknown name: `no 'wieght' here; the nearest is 'weight'`."""
    from difflib import get_close_matches  # takes some milliseconds to import

    shown = repr(clip(printable(str(key)), MAX_KEY))
    near = get_close_matches(str(key)[:MAX_KEY], list(islice(names, MAX_COMPARED)), 1)
    return f"no {shown} here" + (f"; the nearest is {clip(printable(near[0]), MAX_KEY)!r}" if near else "")
