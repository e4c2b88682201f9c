"""`ckptools consolidate`."""

from __future__ import annotations


def consolidate() -> None:
    """Not there yet."""
