"""Param groups that are an item of their own, put beside the state of the optimizer that they are of.

Safetensors hold nothing but tensors, so that who keeps an optimizer's state in them keeps its groups in another item.
Which optimizer that is, `param_names` tell (`optimizer_transform_pre` keys the state by them): they have every name of
the state. Source: torch_checkpointing/state_transformations.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STATE, GROUPS = "state", "param_groups"
VERSION = "_optimizer_state_format_version"


def with_param_groups(ranked: Sequence[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    """Each rank's items, with every list of param groups in the one optimizer whose state has its names."""
    found = [pairs for _, tree in ranked if (pairs := _pairs(tree))]
    if not found or any(pairs != found[0] for pairs in found):
        return list(ranked)
    return [(rank, _joined(tree, found[0])) for rank, tree in ranked]


def _joined(tree: dict[str, Any], pairs: Mapping[str, str]) -> dict[str, Any]:
    """The items with those of `pairs`, an optimizer and its groups, in one; a rank may have lost either."""
    made = {name: value for name, value in tree.items() if name not in pairs.values()}
    for name, groups in pairs.items():
        if groups in tree:
            made[name] = {**made.get(name, {STATE: {}}), GROUPS: tree[groups]}
    return made


def _pairs(tree: Mapping[str, Any]) -> dict[str, str]:
    """Optimizers with their groups, as one rank's items tell; none where a list fits two states, or the other way."""
    states = {name: set(value[STATE]) for name, value in tree.items() if is_state(value)}
    lists = {name: listed for name, value in tree.items() if (listed := _names(value)) is not None}
    fitting = {group: [s for s, keys in states.items() if keys <= names] for group, names in lists.items()}
    pairs = {found[0]: group for group, found in fitting.items() if len(found) == 1}
    return pairs if len(pairs) == len(fitting) else {}


def is_state(value: Any) -> bool:
    """Whether an item is an optimizer's state without its param groups."""
    return isinstance(value, Mapping) and set(value) <= {STATE, VERSION} and isinstance(value.get(STATE), Mapping)


def _names(value: Any) -> set[str] | None:
    """The names that a list of param groups has; None for anything else."""
    if not isinstance(value, list) or not value or not all(isinstance(group, Mapping) for group in value):
        return None
    names = [group.get("param_names") for group in value]
    listed = [name for some in names if isinstance(some, list) for name in some]
    good = all(isinstance(some, list) for some in names) and all(isinstance(name, str) for name in listed)
    return set(listed) if good else None
