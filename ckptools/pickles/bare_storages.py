"""Storages that were saved by themselves: each is shown, and written, as a tensor of one dimension.

torch.save writes a `torch.FloatStorage` or an `UntypedStorage` that no tensor holds as a persistent id with nothing
around it. Source: `persistent_id` in `_save` and `_legacy_save` of torch/serialization.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptools.model.values import Opaque
from ckptools.pickles.classes.tensors import strided_tensor
from ckptools.pickles.machine_state import MachineState
from ckptools.pickles.objects import Storage

CONTAINERS = (dict, list, tuple, Opaque)


def with_storages_as_tensors(m: MachineState, tree: Any) -> Any:
    """The tree with a tensor in the place of each storage that no tensor holds."""
    done: dict[int, Any] = {}
    path: set[int] = set()
    stack: list[tuple[Any, bool]] = [(tree, False)]
    while stack:
        node, seen = stack.pop()
        if seen:
            done[id(node)] = _remade(node, done)
        elif id(node) in path or not isinstance(node, CONTAINERS):
            continue
        elif isinstance(node, Storage):
            view = strided_tensor(m, node, 0, (node.numel,), (1,), node.dtype)
            done[id(node)] = view if view.note else replace(view, kind="storage")
        else:
            path.add(id(node))
            stack.append((node, True))
            stack += [(child, False) for child in _children(node) if isinstance(child, CONTAINERS)]
    return done.get(id(tree), tree)


def _children(node: Any) -> list[Any]:
    return list(node.values() if isinstance(node, dict) else node.parts() if isinstance(node, Opaque) else node)


def _remade(node: Any, done: dict[int, Any]) -> Any:
    """The container with tensors in it; only a tuple becomes another object."""
    if isinstance(node, Opaque):
        node.args, node.state, node.keywords = (done.get(id(p), p) for p in (node.args, node.state, node.keywords))
        node.items = [done.get(id(item), item) for item in node.items]
    elif isinstance(node, dict):
        node.update({key: done[id(child)] for key, child in node.items() if id(child) in done})
    elif isinstance(node, list):
        node[:] = [done.get(id(child), child) for child in node]
    elif any(done.get(id(child), child) is not child for child in node):
        return tuple([done.get(id(child), child) for child in node])
    return node
