"""Which values are private to the class that wrote them, and are shown only on request: their names begin with `_`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptools.contents.entries import Entry
from ckptools.model.tensor import Tensor

ASKED_FOR = ("_last_lr",)
"""Private by its name, but what people look for in a scheduler: the learning rates it gave last."""


def is_private(entry: Entry) -> bool:
    """Whether it is a value whose name, or that of what it is in, begins with `_`; what is a parameter's never is."""
    inside = entry.name.removeprefix(f"{entry.section}.")
    return not entry.parameter and is_private_value(entry.kind, inside, entry.value)


def is_private_value(kind: str, name: str, value: Any) -> bool:
    """Whether a value of a section is private.

    Args:
        kind: kind of the section; a model has nothing private.
        name: its name below the section.
        value: what it is; a tensor is never private.
    """
    return kind != "model" and not isinstance(value, Tensor) and any(map(is_private_name, name.split(".")))


def is_private_name(word: str) -> bool:
    """Whether a name begins with `_`, and is not one that people look for."""
    return word.startswith("_") and word not in ASKED_FOR


def asks_for_private(keys: Iterable[str]) -> bool:
    """Whether keys or globs spell a private name, such as `_is_initial` or `*._is*`."""
    return any(word.lstrip("*?").startswith("_") for key in keys for word in key.split("."))
