"""Objects of torch's classes that a pickle which we write makes when torch loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of one of torch's classes, made without a call and then given its state. May be a key of a dict.

    Attributes:
        module: of the class.
        name: of the class.
        state: what its `__setstate__` gets, or its attributes.
    """

    module: str
    name: str
    state: Any


@dataclass(frozen=True, slots=True)
class Call:
    """What one of torch's functions or classes returns, such as a member of an enum.

    Attributes:
        module: of the function.
        name: of the function.
        args: positional arguments.
    """

    module: str
    name: str
    args: tuple[Any, ...]
