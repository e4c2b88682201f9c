"""The leaves of a section, those that each rank has for itself once for every rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from typing import Any, NamedTuple

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import MAX_UNFOLDING, Key, KeyPath, children_of, leaf_at, of_kinds
from ckptools.model.values import Global, Lost, NumpyArray, Opaque, plain, scalar
from ckptools.text import MAX_BITS
from ckptools.training_state.generators import is_gathered
from ckptools.training_state.sections import Section


class RankLeaf(NamedTuple):
    """A leaf of a section.

    Attributes:
        path: key path in the section, the same for every rank.
        rank: None where it is shared.
        below: path in the section below which each rank has its own; None where it is shared.
    """

    path: KeyPath
    rank: int | None
    value: Any
    below: KeyPath | None = None


def rank_leaves(ck: Checkpoint, section: Section) -> Iterator[RankLeaf]:
    """The leaves of a section: of what lists all ranks' generators, of each rank's own file, or of what they share."""
    if section.kind == "rng" and is_by_rank(section.value):
        for key, value in children_of(section.value) or ():
            yield from (RankLeaf(path, int(key), leaf, ()) for path, leaf in leaves_of(value))
        return
    own = dict(_own(ck, section))
    for below, values in own.items():
        for rank, value in values.items():
            yield from (RankLeaf((*below, *path), rank, leaf, below) for path, leaf in leaves_of(value))
    for path, leaf in leaves_of(section.value):
        if not any(path[: len(below)] == below for below in own):
            yield from _by_holder(path, leaf)


def rank_containers(ck: Checkpoint, section: Section) -> Iterator[RankLeaf]:
    """The containers of a section that `rank_leaves` goes into, as leaves are: each rank's own, and shared ones."""
    own = dict(_own(ck, section))
    for below, values in own.items():
        for rank, value in values.items():
            yield from (RankLeaf((*below, *path), rank, node, below) for path, node in containers_of(value))
    for path, node in containers_of(section.value):
        if not any(path[: len(below)] == below for below in own):
            yield RankLeaf(path, None, node)


def is_by_rank(states: Any) -> bool:
    """Whether states are those of all ranks: a list of dicts, or a dict whose keys are the ranks; some may be lost."""
    if isinstance(states, Mapping):
        ranks = {str(key) for key in states}
        if len(ranks) > 1 and ranks == {str(n) for n in range(len(ranks))}:
            return True
        dicts = (isinstance(state, Mapping) for state in states.values())
        return bool(ranks) and all(rank.isdecimal() for rank in ranks) and all(dicts)
    return is_gathered(states)


def _own(ck: Checkpoint, section: Section) -> Iterator[tuple[KeyPath, Mapping[int, Any]]]:
    n = len(section.path)
    for key, values in ck.per_rank.items():
        if key[:n] == section.path:
            yield key[n:], values
        elif section.path[: len(key)] == key:
            yield (), {rank: leaf_at(value, section.path[len(key) :]) for rank, value in values.items()}


def _by_holder(path: KeyPath, leaf: Any) -> Iterator[RankLeaf]:
    """A leaf; a tensor that several ranks' files hold whole, each with bytes of its own, once for each of them."""
    ranks = sorted({s.rank for s in leaf.found if s.rank is not None}) if isinstance(leaf, Tensor) else []
    if len(ranks) > 1 and leaf.kind in ("plain", "storage"):
        yield from (RankLeaf(path, rank, leaf, path) for rank in ranks)
    else:
        yield RankLeaf(path, None, leaf)


# -- leaves -----------------------------------------------------------------------------------------------------------


MAX_DEPTH = 250
"""Levels that are gone down; a tree has fewer, what lies in foreign objects may have any number."""

LONG = 8
"""A sequence of more plain values than this is one leaf."""

MAX_BRIEF = 6
"""Plain arguments of a foreign object that is shown in one line."""

HOLDING = (dict, list, tuple, Opaque)
"""Types that may hold other values; everything else, which is most, is a leaf."""


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
        children = [] if id(node) in above or is_run(node) else children_inside(node, inner=bool(above))
        if len(path) >= MAX_DEPTH and isinstance(node, Opaque) and children:
            yield path, Lost(f"it lies more than {MAX_DEPTH} levels deep")
            continue
        children = children if len(path) < MAX_DEPTH else []
        if isinstance(node, Opaque) or not children:
            yield path, node
        above = above | {id(node)} if isinstance(node, Opaque) else above
        stack += [((*path, key), child, above) for key, child in reversed(children)]


def containers_of(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """The dicts, lists and tuples that `leaves_of` goes into, from the outermost on."""
    stack: list[tuple[KeyPath, Any, frozenset[int]]] = [((), tree, frozenset())]
    while stack:
        path, node, above = stack.pop()
        if not isinstance(node, HOLDING) or len(path) >= MAX_DEPTH or id(node) in above or is_run(node):
            continue
        children = children_inside(node, inner=bool(above))
        if children and not isinstance(node, Opaque):
            yield path, node
        above = above | {id(node)} if isinstance(node, Opaque) else above
        stack += [((*path, key), child, above) for key, child in reversed(children) if isinstance(child, HOLDING)]


def children_inside(node: Any, inner: bool = False) -> list[tuple[Key, Any]]:
    """The children of a container, or the data of a foreign object beyond what its own line has.

    An `inner` object lies in another one, which was found to unfold to few values with all that is in it.
    """
    if isinstance(node, Opaque):
        return [] if is_brief(node) or (not inner and _unfolds(node)) else list(node.fields.items())
    return children_of(node) or []


def _unfolds(node: Opaque) -> bool:
    """Whether the data of a foreign object share objects or containers, so that a small pickle stands for 2^40."""
    leaves: dict[int, int] = {}
    kept: list[Any] = []  # an id is that of one object only as long as the object is there
    own = 0
    stack: list[tuple[Any, list[Any] | None]] = [(node, None)]
    while stack:
        one, values = stack.pop()
        if values is None and id(one) not in leaves:
            inside = one.fields if isinstance(one, Opaque) else one
            values = of_kinds(inside.values() if isinstance(inside, dict) else inside, HOLDING)
            leaves[id(one)] = 1 + len(inside) - len(values)
            own += 1 + len(inside)
            kept.append(inside)
            stack += [(one, values), *((value, None) for value in values)]
        elif values is not None:
            leaves[id(one)] = min(leaves[id(one)] + sum(leaves[id(value)] for value in values), MOST_COUNTED)
    return leaves[id(node)] > MAX_SHARED + MAX_UNFOLDING * own


MAX_SHARED = 10_000
"""Values that a foreign object may stand for because it shares some; it is one value where it stands for more."""

MOST_COUNTED = 1 << 62
"""Ends counting, for numbers that double with each of many levels take memory."""


def is_run(node: Any) -> bool:
    """Whether a sequence is shown as one value: short pairs such as betas, and long states of a generator."""
    return isinstance(node, (list, tuple)) and all(is_plain(item) for item in node[:LONG])


def fingerprint(value: Any) -> int | None:
    """CRC-32 of a long sequence of integers or of an array, to distinguish ranks; None for any other value."""
    data = value.data if isinstance(value, NumpyArray) else None
    if isinstance(data, bytes):
        return zlib.crc32(data)
    if isinstance(value, (list, tuple)) and len(value) > LONG and all(type(v) is int for v in value):
        return zlib.crc32(b",".join(b"%d" % v if v.bit_length() <= MAX_BITS else b"?" for v in value))
    return None
