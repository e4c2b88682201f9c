"""Being told how far something is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, str], None]
"""Called with bytes that were read or written, and the tensor they are of."""


def not_told(_nbytes: int, _name: str) -> None:
    """Tell nobody: what stands for a `Progress` that the caller did not give."""
