"""The first place where two values differ, looked for in everything that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from ckptools.model.tree import KeyPath
from ckptools.model.values import NumpyArray, Opaque

MAX_LOOKED_AT = 4_000_000
"""Pairs of values that are looked at."""

Found = tuple[KeyPath, Any, Any]


def first_difference(a: Any, b: Any, same: Callable[[Any, Any], bool]) -> Found | None:
    """The key path of the first difference, and the value of each side there; None where none was found.

    Two containers with other lengths or keys are the difference themselves, if nothing that both hold differs.

    Args:
        a: a value.
        b: another.
        same: whether two values are the same; not asked for two containers of one class.
    """
    seen: set[tuple[int, int]] = set()
    stack: list[Iterator[tuple[KeyPath, Any, Any, bool]]] = [iter([((), a, b, False)])]
    for _ in range(MAX_LOOKED_AT):
        while stack and (found := next(stack[-1], None)) is None:
            stack.pop()
        if not stack or found is None:
            return None
        path, x, y, looked_into = found
        inside = None if looked_into or x is y else _inside(x, y, path)
        if looked_into or (inside is None and x is not y and not same(x, y)):
            return path, x, y
        if inside is not None and (id(x), id(y)) not in seen:
            seen.add((id(x), id(y)))
            pairs, alike = inside
            stack.append(chain(((p, v, w, False) for p, v, w in pairs), [] if alike else [(path, x, y, True)]))
    return None


def _inside(x: Any, y: Any, path: KeyPath) -> tuple[Iterable[Found], bool] | None:
    """What two containers of one class both hold, and whether neither has more; None for any other values."""
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return (((*path, n), v, w) for n, (v, w) in enumerate(zip(x, y, strict=False))), len(x) == len(y)
    if isinstance(x, dict) and isinstance(y, dict):
        return (((*path, key), x[key], y[key]) for key in x if key in y), list(x) == list(y)
    if isinstance(x, Opaque) and isinstance(y, Opaque) and x.name == y.name:
        return _inside(x.fields, y.fields, path)
    if isinstance(x, NumpyArray) and isinstance(y, NumpyArray) and x.objects and y.objects:
        return _inside(x.objects, y.objects, path) if x.shape == y.shape else None
    return None
