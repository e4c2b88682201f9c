"""Optimizer state under the names of its parameters, for outputs in which a number means nothing.

A `.pt` keeps the source's tree, which `optimizer.load_state_dict` takes with its numbers. In a flat list of tensors a
number is nobody's, so the names stand there that are known, and it is said how. What has none keeps its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptools.consolidate.selection import Selection
from ckptools.model.tree import KeyPath
from ckptools.training_state.naming import Id, Naming
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.sections import Section, is_flat_optimizer

NOT_NAMED = Naming({}, "fqn", (), (), "")


def naming_of(selection: Selection, section: Section) -> Naming:
    """How the parameters of an optimizer that is written are named."""
    optimizers = optimizers_of(selection.source).values() if selection.source is not None else ()
    naming = next((o.naming for o in optimizers if o.path == section.path), NOT_NAMED)
    new = selection.renamed
    return naming._replace(names={new.get(i, i): new.get(name, name) for i, name in naming.names.items()})


def by_name(selection: Selection) -> Selection:
    """The selection with the state of every optimizer by name, as far as names are known."""
    renamed = [(at, naming_of(selection, s)) for s, at in selection.places if _is_keyed(s)]
    tree = selection.tree
    for at, naming in renamed:
        tree = _replaced(tree, at, naming.names)
    return replace(
        selection.moved(lambda path: _path(path, renamed)),
        tree=tree,
        notes=[*selection.notes, *(note for _, naming in renamed for note in naming_notes(naming))],
    )


def naming_notes(naming: Naming) -> Iterator[str]:
    """What the user should know of the names that are written."""
    if naming.note:
        yield f"optimizer: {naming.note}"
    if naming.unnamed and naming.by != "fqn":
        yield f"optimizer: state without a name is written under its number ({len(naming.unnamed)})"


def _is_keyed(section: Section) -> bool:
    return section.kind == "optimizer" and not is_flat_optimizer(section.value)


def _replaced(node: Any, at: KeyPath, names: Mapping[Id, str]) -> Any:
    """A tree in which the optimizer at a key path has names in place of numbers; the tree itself stays as it is."""
    if not at:
        return _named(node, names)
    first, *rest = at
    if isinstance(node, (list, tuple)):
        return type(node)(_replaced(v, tuple(rest), names) if i == first else v for i, v in enumerate(node))
    return {key: _replaced(v, tuple(rest), names) if key == first else v for key, v in node.items()}


def _named(optimizer: Mapping[str, Any], names: Mapping[Id, str]) -> dict[str, Any]:
    state = {names.get(i, i): entry for i, entry in optimizer["state"].items()}
    groups = [_group(group, names) for group in optimizer["param_groups"]]
    return {**optimizer, "state": state, "param_groups": groups}


def _group(group: Mapping[str, Any], names: Mapping[Id, str]) -> dict[str, Any]:
    params = group.get("params")
    listed = isinstance(params, (list, tuple)) and all(isinstance(i, (int, str)) for i in params)
    return {**group, "params": [names.get(i, i) for i in params]} if listed and params else dict(group)


def _path(path: KeyPath, renamed: list[tuple[KeyPath, Naming]]) -> KeyPath:
    """Where something lies in the tree with names."""
    for at, naming in renamed:
        n = len(at)
        if path[:n] == at and path[n : n + 1] == ("state",) and len(path) > n + 1:
            return (*path[: n + 1], naming.names.get(path[n + 1], path[n + 1]), *path[n + 2 :])
    return path
