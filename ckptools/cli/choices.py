"""What an option can be, where it is one of a few words."""

from __future__ import annotations

from enum import Enum


class Engine(str, Enum):
    """What reads the files."""

    inert = "inert"
    torch = "torch"
