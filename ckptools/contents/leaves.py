"""The leaves of a subtree, as people count them: a long run of numbers is one, what a foreign object holds is many."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from datetime import date, timedelta
from typing import Any

from ckptools.model.tree import Key, KeyPath, children_of
from ckptools.model.values import Global, NumpyArray, Opaque, plain, scalar

MAX_DEPTH = 250
"""Levels that are gone down; a tree has fewer, what lies in foreign objects may have any number."""

LONG = 8
"""A sequence of more plain values than this is one leaf."""

MAX_BRIEF = 6
"""Plain arguments of a foreign object that is shown in one line."""

MAX_BITS = 512
"""A longer integer is described: printing one takes time quadratic in its length, and Python refuses it."""

HOLDING = (dict, list, tuple, Opaque)
"""What may hold other values; everything else, of which there is most, is a leaf."""


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a flag or None: something that fits into one cell."""
    return scalar(value) is None or isinstance(scalar(value), (bool, int, float, str, timedelta, date))


def is_brief(value: Opaque) -> bool:
    """Whether a foreign object is nothing but a class and a few plain arguments, such as an enum or a path."""
    bare = value.state is None and not value.items and not value.keywords and isinstance(value.args, tuple)
    return bare and len(value.args) <= MAX_BRIEF and all(is_plain(a) or isinstance(a, Global) for a in value.args)


def leaves_of(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Walk a subtree in order, lazily; a long run of plain values is a leaf.

    A foreign object is a leaf with its attributes behind it. It may hold itself, so it is not entered twice on a path.
    """
    stack: list[tuple[KeyPath, Any, frozenset[int]]] = [((), tree, frozenset())]
    while stack:
        path, node, above = stack.pop()
        node = plain(node)
        if not isinstance(node, HOLDING):
            yield path, node
            continue
        children = [] if len(path) >= MAX_DEPTH or id(node) in above or is_run(node) else children_inside(node)
        if isinstance(node, Opaque) or not children:
            yield path, node
        above = above | {id(node)} if isinstance(node, Opaque) else above
        stack += [((*path, key), child, above) for key, child in reversed(children)]


def children_inside(node: Any) -> list[tuple[Key, Any]]:
    """What a container holds, or the file says of an object of a foreign class beyond what its own line has."""
    if isinstance(node, Opaque):
        return [] if is_brief(node) else list(node.fields.items())
    return children_of(node) or []


def is_run(node: Any) -> bool:
    """Whether a sequence is shown as one value: short pairs such as betas, and long states of a generator."""
    return isinstance(node, (list, tuple)) and all(is_plain(item) for item in node[:LONG])


def fingerprint(value: Any) -> int | None:
    """CRC-32 of a long sequence of integers or of an array, to tell ranks apart; None for any other value."""
    data = value.data if isinstance(value, NumpyArray) else None
    if isinstance(data, bytes):
        return zlib.crc32(data)
    if isinstance(value, (list, tuple)) and len(value) > LONG and all(type(v) is int for v in value):
        return zlib.crc32(b",".join(b"%d" % v if v.bit_length() <= MAX_BITS else b"?" for v in value))
    return None
