"""What of a tree is no plain value and no tensor, so that no output can hold it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.model.tree import walk
from ckptools.model.values import Global, Lost, NumpyArray, Opaque


def why_foreign(node: Any) -> str:
    """Why a leaf is not written; empty when it is."""
    if isinstance(node, Opaque):
        return node.name if isinstance(node, Lost) else f"an object of class {node.name}"
    if isinstance(node, (set, frozenset)) and is_foreign(node):
        return "a set of foreign objects"
    if isinstance(node, NumpyArray) and node.dtype == "|O":
        return "a numpy array of Python objects"
    if isinstance(node, Global) and not (node.module == "torch" and node.name in ITEMSIZE):
        return f"the name {node.dotted}"
    return ""


def is_foreign(node: Any) -> bool:
    """Whether a key, or a set, is or holds an object that is not rebuilt."""
    if isinstance(node, (tuple, set, frozenset)):
        return any(map(is_foreign, node))
    return isinstance(node, Opaque)


def without_attributes(node: Any) -> Any:
    """A copy of plain values without what their dicts carry as attributes, such as a `_metadata` of their own."""
    if isinstance(node, dict):
        made: dict[Any, Any] = OrderedDict() if isinstance(node, OrderedDict) else {}
        made.update((key, without_attributes(value)) for key, value in node.items())
        return made
    return type(node)(map(without_attributes, node)) if type(node) in (list, tuple) else node


def is_plain(tree: Any) -> bool:
    """Whether a tree holds nothing but values that Python itself has."""
    return all(
        isinstance(leaf, (str, bytes, int, float, type(None), dict, list, tuple))
        and not any(isinstance(key, Opaque) for key in path)
        for path, leaf in walk(tree)
    )
