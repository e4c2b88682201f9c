"""`ckptools shell`."""

from __future__ import annotations


def shell() -> None:
    """Not there yet."""
