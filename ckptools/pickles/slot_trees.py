"""Trees with slots: what holds them, and the same trees with values in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, of_kinds
from ckptools.model.values import Opaque
from ckptools.pickles.objects import Storage
from ckptools.pickles.slots import Placing, ValueSlot, filled

_CONTAINERS = (dict, list, tuple)


def remade(node: Any, tensor: Callable[[Tensor], Tensor], values: Mapping[int, Any]) -> Any:
    """A part of a pattern's tree with other tensors, and values in its slots; what has neither is the same object."""
    return _remade(node, tensor, values, {})


def _remade(node: Any, tensor: Callable[[Tensor], Tensor], values: Mapping[int, Any], done: dict[int, Any]) -> Any:
    if isinstance(node, (ValueSlot, Opaque)):
        return filled(node, values)
    if not isinstance(node, (Tensor, *_CONTAINERS)):
        return node
    if id(node) not in done:
        done[id(node)] = tensor(node) if isinstance(node, Tensor) else _container(node, tensor, values, done)
    return done[id(node)]


def _container(node: Any, tensor: Callable[[Tensor], Tensor], values: Mapping[int, Any], done: dict[int, Any]) -> Any:
    if isinstance(node, dict):
        made = copy(node)
        for key, child in node.items():
            made[key] = _remade(child, tensor, values, done)
        return made
    if not of_kinds(node, (ValueSlot, Tensor, Opaque, *_CONTAINERS)):
        return node
    children = [_remade(child, tensor, values, done) for child in node]
    return children if isinstance(node, list) else tuple(children)


def varying_paths(node: Any, path: KeyPath) -> Sequence[KeyPath]:
    """The key paths of slots, and of everything that holds one."""
    if isinstance(node, ValueSlot):
        return [path]
    if isinstance(node, Opaque):
        return [path] if filled(node, _Nothing()) is not node else []
    if not isinstance(node, _CONTAINERS):
        return []
    if not isinstance(node, dict) and not of_kinds(node, (ValueSlot, Opaque, *_CONTAINERS)):
        return []
    entries = node.items() if isinstance(node, dict) else enumerate(node)
    inside = [found for key, child in entries for found in varying_paths(child, (*path, key))]
    return [*inside, path] if inside else []


class _Nothing(dict[int, Any]):
    def __missing__(self, number: int) -> Any:
        return None


def check_plain(tree: Any) -> None:
    """Refuse a tree in which something else than a tensor says where bytes lie.

    Raises:
        ValueError: it is one.
    """
    stack, seen = [(tree, False)], set[int]()
    while stack:
        node, inside = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Storage) or (isinstance(node, Tensor) and (inside or not _is_plain(node))):
            raise ValueError("a storage, or a tensor of several parts")
        if isinstance(node, dict):
            of = [*node.values(), getattr(node, "_metadata", None)]
        else:
            of = [*node.parts()] if isinstance(node, Opaque) else [*node] if isinstance(node, _SEVERAL) else []
        within = inside or isinstance(node, Opaque)
        stack += [(child, within) for child in of_kinds(of, (Opaque, Tensor, *_SEVERAL))]


_SEVERAL = (*_CONTAINERS, set, frozenset)


def _is_plain(tensor: Tensor) -> bool:
    if tensor.contradictions:
        return False
    if isinstance(tensor.detail, Placing):
        return tensor.kind in ("dtensor", "meta") and all(s.source is not None for s in tensor.detail.local.shards)
    return tensor.detail is None and tensor.kind == "plain" and all(s.source is not None for s in tensor.shards)
