"""The nested state of a DCP folder, rebuilt from its flat names by the paths that its planner kept.

torch flattens a state before it saves it: dicts are always entered and their keys made text, a list is entered when it
holds tensors or dicts (as far as torch 2.3 a dict without tensors was one pickled value). `planner_data` has the path
of every name: text for a key, an int for a place in a list. Not told by a path, and so lost: what was a tuple (it is a
list now), an int as a key (it is text now), empty containers. A place in a list that held one of those is None here.
Source: torch/distributed/checkpoint/_nested_dict.py and _traverse.py.

One loss can be undone surely: an optimizer that numbers its parameters says the numbers again in its param groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptools.model.tree import KeyPath
from ckptools.model.values import describe_for_error
from ckptools.training_state.sections import is_optimizer

MAX_PATH = 100
MAX_HOLES = 100_000
"""Places in lists that hold nothing; a forged index of 2^40 asks for more."""


class ContradictionError(ValueError):
    """The paths do not describe a tree."""


class _Node(dict[Any, Any]):
    """A container of the tree while it is made; a leaf may be a plain dict."""


def nest(leaves: Iterable[tuple[str, Any]], paths: Mapping[str, KeyPath]) -> tuple[dict[str, Any], int]:
    """Rebuild a nested state from leaves and key paths; return it, and how many places of its lists are empty.

    Raises:
        ContradictionError: two names have one place, one lies inside another, or a list has an absurd index.
    """
    root = _Node()
    for fqn, leaf in leaves:
        path = paths.get(fqn, (fqn,))
        if len(path) > MAX_PATH:
            raise ContradictionError(f"{describe_for_error(fqn)} lies {len(path)} levels deep")
        *above, last = path
        node: Any = root
        for key in above:
            node = node.setdefault(key, _Node())
            if not isinstance(node, _Node):
                raise ContradictionError(
                    f"{describe_for_error(fqn)} lies inside of another value, at {describe_for_error(path)}"
                )
        if last in node:
            raise ContradictionError(
                f"{describe_for_error(fqn)} lies where another value is, at {describe_for_error(path)}"
            )
        node[last] = leaf
    holes = [0]
    return {key: _settled(value, holes) for key, value in root.items()}, holes[0]


def _settled(node: Any, holes: list[int]) -> Any:
    """The container that a node stands for. The depth of recursion is that of the paths."""
    if not isinstance(node, _Node):
        return node
    children = {key: _settled(child, holes) for key, child in node.items()}
    if all(type(key) is int for key in children):
        return _list(children, holes)
    if any(type(key) is int for key in children):
        raise ContradictionError(f"{describe_for_error(next(iter(children)))} and an index are keys of one container")
    return _numbered(children) if is_optimizer(children) else children


def _list(children: dict[int, Any], holes: list[int]) -> list[Any]:
    if min(children) < 0:
        raise ContradictionError(f"a place {describe_for_error(min(children))} in a list")
    size = max(children) + 1
    holes[0] += size - len(children)
    if holes[0] > MAX_HOLES:
        raise ContradictionError(f"a list of {describe_for_error(size)} places for {len(children)} values")
    values: list[Any] = [None] * size
    for index, child in children.items():
        values[index] = child
    return values


def _numbered(optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimizer whose state has the numbers of its param groups as keys again, where text stood for them."""
    groups = optimizer.get("param_groups")
    if not isinstance(groups, list):
        return optimizer
    numbers = {str(i): i for g in groups if isinstance(g.get("params"), list) for i in g["params"] if type(i) is int}
    state = optimizer["state"]
    if not numbers or not all(key in numbers for key in state):
        return optimizer
    return {**optimizer, "state": {numbers[key]: value for key, value in state.items()}}
