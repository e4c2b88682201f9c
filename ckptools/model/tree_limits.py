"""How large a tree of plain values may be: a small file can stand for one that no machine can walk."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from ckptools.model.tree import of_kinds

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
"""What `walk` enters."""
