"""`ckptools create`."""

from __future__ import annotations


def create() -> None:
    """Not there yet."""
