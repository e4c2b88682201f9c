"""What a case is made with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Build = Callable[[Path], Path]
"""Writes a case's files into a folder of its own and returns the path that a user would name."""

BIG = 1 << 62


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
