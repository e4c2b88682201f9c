"""The tree of a checkpoint: nested dicts, lists and tuples, walked without recursion, and the key paths in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from copy import copy
from typing import Any

from ckptools.model.tensor import Tensor

Key = Any
"""One step of a key path: usually a str, an int for optimizer ids and list positions."""

KeyPath = tuple[Key, ...]


def fqn_of(path: KeyPath) -> str:
    """Join a key path for people. Inside ckptools pass the tuple: keys may hold dots."""
    return ".".join(map(str, path))


def is_within(name: str, part: str) -> bool:
    """Whether a dotted name is that of a part, or of something in it."""
    return f"{name}.".startswith(f"{part}.")


def walk(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield `(key path, leaf)` of a tree of dicts, lists and tuples, in order, without recursion.

    Empty containers are leaves too, so that nothing that a file holds goes unseen. A container that contains
    itself is walked once along each path and not entered again.
    """
    stack: list[tuple[KeyPath, Any, frozenset[int]]] = [((), tree, frozenset())]
    while stack:
        path, node, above = stack.pop()
        children = None if id(node) in above else children_of(node)
        if not children:
            yield path, node
            continue
        inside = above | {id(node)}
        stack += [((*path, key), child, inside) for key, child in reversed(children)]


def children_of(node: Any) -> list[tuple[Key, Any]] | None:
    """The `(key, value)` pairs of a dict, list or tuple; None for anything else."""
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, (list, tuple)):
        return list(enumerate(node))
    return None


def of_kinds(values: Collection[Any], kinds: tuple[type, ...]) -> list[Any]:
    """The values that are of some classes, in order.

    Of many values each class that occurs is asked once: the RNG states of 256 ranks are 160,000 ints.
    """
    if len(values) > MANY and not any(issubclass(kind, kinds) for kind in set(map(type, values))):
        return []
    return [value for value in values if isinstance(value, kinds)]


MANY = 32


def nodes_in(tree: Any, kinds: tuple[type, ...]) -> Iterator[tuple[KeyPath, Any]]:
    """Yield `(key path, node)` of every node of some classes, containers too if asked for, in order.

    Everything else is stepped over without a path of its own: the RNG states of 256 ranks are 300,000 ints.
    """
    entered = (dict, list, tuple, *kinds)
    stack: list[tuple[KeyPath, Any, frozenset[int]]] = [((), tree, frozenset())]
    while stack:
        path, node, above = stack.pop()
        if isinstance(node, kinds):
            yield path, node
        children = None if id(node) in above else children_of(node)
        if children:
            inside = above | {id(node)}
            deeper = ((key, child) for key, child in reversed(children) if isinstance(child, entered))
            stack += [((*path, key), child, inside) for key, child in deeper]


def tensors_in(tree: Any) -> Iterator[tuple[KeyPath, Tensor]]:
    """Yield `(key path, tensor)` of every tensor in the tree."""
    return nodes_in(tree, (Tensor,))


GONE = object()
"""Stands for the value of a key that a rebuilt dict does not have."""


def rebuilt(tree: Any, changed: Callable[[dict[Any, Any]], Mapping[Any, Any]]) -> Any:
    """A copy of a tree in which `changed` gives, for each of its dicts, the keys that have other values."""
    if type(tree) in (list, tuple):
        return type(tree)(rebuilt(value, changed) for value in tree)
    if not isinstance(tree, dict):
        return tree
    made, new = copy(tree), changed(tree)
    for key, value in tree.items():
        if key not in new:
            made[key] = rebuilt(value, changed) if isinstance(value, (dict, list, tuple)) else value
        elif new[key] is GONE:
            del made[key]
        else:
            made[key] = new[key]
    return made


def leaf_at(tree: Any, path: KeyPath) -> Any:
    """Return what is at a key path; None when nothing is."""
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(key)
        elif isinstance(tree, (list, tuple)) and type(key) is int and 0 <= key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


# -- tree limits ------------------------------------------------------------------------------------------------------


MAX_LEAVES = 20_000_000
MAX_SHARED = 1_000_000
MAX_UNFOLDING = 8
"""A tree may have many leaves, or share some of its containers; not have many because it shares."""

MAX_DEPTH = 200


class TreeLimitError(ValueError):
    """A tree has more values, or more levels, than any checkpoint has."""


class CycleError(TreeLimitError):
    """A container lies inside of itself."""


def check_tree_limits(tree: Any, flat: Container[int] = ()) -> None:
    """Refuse a tree that unfolds to more leaves, or deeper, than any checkpoint does.

    Containers may be shared, so that a few kilobytes of pickle can stand for 10^9 leaves; each is counted once
    and its count multiplied. Iterative, so that depth costs nothing.

    Args:
        tree: of dicts, lists and tuples.
        flat: the `id`s of tuples that are known to hold no container.

    Raises:
        TreeLimitError: the tree is beyond the budgets.
        CycleError: it contains itself.
    """
    leaves: dict[int, int] = {}
    depth: dict[int, int] = {}
    own = 0
    stack: list[tuple[Any, list[Any] | None]] = [(tree, None)]
    while stack:
        node, values = stack.pop()
        if values is None:
            if leaves.get(id(node), 0) or not isinstance(node, (dict, list, tuple)):
                continue
            if id(node) in leaves:
                raise CycleError("a container that contains itself")
            values = (
                [] if id(node) in flat else of_kinds(node.values() if isinstance(node, dict) else node, _CONTAINERS)
            )
            if hasattr(node, "_metadata"):
                values.append(node._metadata)
            leaves[id(node)] = 0
            own += len(node)
            stack.append((node, values))
            stack += [(value, None) for value in values]
            continue
        leaves[id(node)] = 1 + len(node) - len(values) + sum(leaves[id(v)] for v in values)
        depth[id(node)] = 1 + max((depth[id(v)] for v in values), default=0)
        if depth[id(node)] > MAX_DEPTH:
            raise TreeLimitError(f"a tree of more than {MAX_DEPTH} levels")
        if leaves[id(node)] > MAX_LEAVES:
            raise TreeLimitError(f"a tree of more than {MAX_LEAVES} values")
    if leaves.get(id(tree), 1) > MAX_SHARED + MAX_UNFOLDING * own:
        raise TreeLimitError(f"a tree whose {own} values unfold to {leaves[id(tree)]}")


_CONTAINERS = (dict, list, tuple)
"""Containers that `walk` enters."""
