"""Key paths: where in a tree something lies, and the dotted name that people read."""

from __future__ import annotations

from typing import Any

Key = Any
"""One step of a key path: usually a str, an int for optimizer ids and list positions."""

KeyPath = tuple[Key, ...]


def fqn_of(path: KeyPath) -> str:
    """Join a key path for people. Inside ckptools pass the tuple: keys may hold dots."""
    return ".".join(map(str, path))


def is_within(name: str, part: str) -> bool:
    """Whether a dotted name is that of a part, or of something in it."""
    return f"{name}.".startswith(f"{part}.")
