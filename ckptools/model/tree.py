"""The tree of a checkpoint: nested dicts, lists and tuples, walked without recursion, and the key paths in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ckptools.model.tensor import Tensor

Key = Any
"""One step of a key path: usually a str, an int for optimizer ids and list positions."""

KeyPath = tuple[Key, ...]


def fqn_of(path: KeyPath) -> str:
    """Join a key path for people. Inside ckptools pass the tuple: keys may hold dots."""
    return ".".join(map(str, path))


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
    """Those of the values that are of some classes, in order.

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
