"""Numbers and names in words: the one place where text from a file is made safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` with everything that a terminal could act on, or that would forge a line, escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
