"""`ckptools inspect`."""

from __future__ import annotations


def inspect() -> None:
    """Not there yet."""
