"""A tree without the circles that a pickle may hold: where a container lies in itself, a `Cycle` says so.

Everything behind the reader walks trees, which end. Only what is on a circle is touched: lists and dicts in place,
tuples made again.
"""

from __future__ import annotations

from typing import Any

from ckptools.model.values import Cycle

CONTAINERS = (dict, list, tuple)


def without_cycles(tree: Any) -> Any:
    """The tree with a `Cycle` in place of each container that is met again inside itself. Iterative, like all walks."""
    done: dict[int, Any] = {}
    path: set[int] = set()
    stack: list[tuple[Any, bool]] = [(tree, False)]
    while stack:
        node, seen = stack.pop()
        if seen:
            done[id(node)] = _remade(node, done)
            path.discard(id(node))
        elif id(node) not in done and id(node) not in path and isinstance(node, CONTAINERS):
            path.add(id(node))
            stack.append((node, True))
            stack += [(child, False) for child in _children(node) if isinstance(child, CONTAINERS)]
    return done.get(id(tree), tree)


def _children(node: Any) -> list[Any]:
    metadata = [node._metadata] if hasattr(node, "_metadata") else []
    return [*(node.values() if isinstance(node, dict) else node), *metadata]


def _remade(node: Any, done: dict[int, Any]) -> Any:
    """The container with its children as they are now; one that is not done yet lies around this one."""

    def now(child: Any) -> Any:
        if not isinstance(child, CONTAINERS):
            return child
        return done[id(child)] if id(child) in done else Cycle(f"the {_kind(child)} that it lies in")

    if isinstance(node, tuple):
        children = [now(child) for child in node]
        return node if all(a is b for a, b in zip(children, node, strict=True)) else tuple(children)
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(child, CONTAINERS):
            node[key] = now(child)
    if hasattr(node, "_metadata") and now(node._metadata) is not node._metadata:
        del node._metadata
    return node


def _kind(node: Any) -> str:
    return "dict" if isinstance(node, dict) else "list" if isinstance(node, list) else "tuple"
