"""How lists are told in one line: the first few of many, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence

MOST = 6
"""Names that a line has, where nothing asks for another number."""


def few(names: Sequence[str], most: int = MOST) -> str:
    """`a, b, c and 4 more`: names, at most so many of them."""
    return ", ".join(names[:most]) + and_more(len(names) - most)


def and_more(count: int) -> str:
    """` and 4 more`; nothing where there are none."""
    return f" and {count} more" if count > 0 else ""


def and_others(count: int) -> str:
    """` (and 4 more)` behind the first of several sentences; nothing where there are none."""
    return f" (and {count} more)" if count > 0 else ""
