"""The command line that shows or does the same as what is on the screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ckptools.display.next_command import quoted
from ckptools.keys.entries import pattern

if TYPE_CHECKING:
    from ckptools.contents.record import KeyRow


def line(command: str, arguments: str, *words: str) -> str:
    """A command with the arguments that open the checkpoint, and words of its own."""
    return " ".join(["ckptools", command, arguments, *([quoted(words)] if words else [])])


def escaped(name: str) -> str:
    """A glob that matches one name: `[*]` stands for `*`."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def glob_of(rows: Sequence[KeyRow], others: Iterable[KeyRow]) -> str | None:
    """One glob that matches the names of some keys and of no others; None where there is none so simple.

    `others` are the keys among which it has to tell them apart.
    """
    names = [row.name for row in rows]
    wanted = set(names)
    every = [row.name for row in others]
    for candidate in _candidates(names):
        matches = pattern((candidate,)).fullmatch
        if {name for name in every if matches(name)} == wanted:
            return candidate
    return None


def _candidates(names: Sequence[str]) -> list[str]:
    """The name itself; their common beginning, `*`, and their common end, with whole words or as they are."""
    if not names:
        return []
    if len(names) == 1:
        return [escaped(names[0])]
    first, last = min(names), max(names)
    begin = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    turned = [name[::-1] for name in names]
    low, high = min(turned), max(turned)
    end = next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    head = first[:begin]
    tail = low[: min(end, min(map(len, names)) - begin)][::-1]
    whole = head[: head.rfind(".") + 1]
    return [f"{escaped(whole)}*", f"{escaped(head)}*", f"{escaped(head)}*{escaped(tail)}", "*"]
