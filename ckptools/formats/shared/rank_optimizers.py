"""Optimizers of ranks that hold parameters of their own, named before they are merged.

A plain `optimizer.state_dict()` numbers the parameters of its own process from 0, so that in the files of pipeline
stages one number stands for another parameter on every rank. Each rank's numbers are named by that rank's own model,
as those of a single file are; what stays without a name is kept apart from what other ranks call by the same number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckptools.formats.shared.merge import Merge, Ranked, empty_like
from ckptools.model.checkpoint import GivenNames
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath
from ckptools.training_state.given_names import name_with
from ckptools.training_state.module_order import AS_SAVED, believed, model_for_names
from ckptools.training_state.naming import UNNAMED, Id, Naming
from ckptools.training_state.optimizer_names import group_ids
from ckptools.training_state.sections import Section, is_flat_optimizer, is_optimizer

NOT_NAMED = (
    "every rank numbers its own parameters, and nothing proves which one this is; "
    "tell the names with --names FROM; --only model writes the model"
)


class NamedRanks(NamedTuple):
    """The trees of ranks, with names in their optimizers.

    Attributes:
        roots: what is to be merged, by the key path where it is put.
        assumed: parameters whose names hold if groups have the order of that rank's module.
    """

    roots: Mapping[KeyPath, Ranked]
    assumed: frozenset[str]


def named_by_own_models(merge: Merge, sections: Sequence[Section], given: GivenNames | None) -> NamedRanks | None:
    """Name each rank's optimizers by that rank's own model.

    Args:
        merge: how the ranks' trees were merged without names.
        sections: of what came of it.
        given: names of all parameters, where the user told them.

    Returns:
        None where no optimizer has numbers.

    Raises:
        RefusedError: the names that were given do not fit a rank's model.
    """
    optimizers = [s.path for s in sections if s.kind == "optimizer" and _is_numbered(merge.values(s.path))]
    if not optimizers:
        return None
    models = [merge.values(s.path) for s in sections if s.kind == "model"]
    roots, assumed = dict(merge.roots), set[str]()
    for path in optimizers:
        root = merge.root_of(path) or ()
        named: list[tuple[int, Any]] = []
        for rank, tree in roots[root]:
            value = merge.values(path).get(rank)
            if value is not None:
                naming = _naming(value, [of[rank] for of in models if rank in of], given, rank)
                assumed |= {naming.names[i] for i in naming.assumed}
                tree = _with(tree, path[len(root) :], _renamed(value, naming, rank))
            named.append((rank, tree))
        roots[root] = named
    return NamedRanks(roots, frozenset(assumed))


def _is_numbered(optimizers: Mapping[int, Any]) -> bool:
    """Whether what all ranks have is an optimizer's state dict, and some have numbers for parameters."""
    if not all(is_optimizer(o) and not is_flat_optimizer(o) for o in optimizers.values()):
        return False
    return any(type(i) is int for o in optimizers.values() for ids in (*group_ids(o), o["state"]) for i in ids)


def _naming(optimizer: Mapping[str, Any], models: Sequence[Any], given: GivenNames | None, rank: int) -> Naming:
    model = model_for_names([m for m in models if isinstance(m, Mapping)], AS_SAVED)
    own = None if given is None or model is None else _of_one_rank(given, model, rank)
    return name_with(optimizer, model, believed(AS_SAVED, model or {}), own)


def _of_one_rank(given: GivenNames, model: Mapping[str, Any], rank: int) -> GivenNames:
    """The names that were given, without those of parameters that a rank does not hold."""
    listed = tuple(tuple(name for name in group if name in model) for group in given.listed)
    shapes = {k: v for k, v in given.shapes.items() if k in model}
    return replace(given, told_by=f"{given.told_by}, for rank {rank}", listed=listed, shapes=shapes)


def _renamed(optimizer: Mapping[str, Any], naming: Naming, rank: int) -> dict[str, Any]:
    def name(number: Id) -> str:
        return naming.names.get(number) or f"{UNNAMED}{number} of rank {rank}"

    state = {name(i): entry if i in naming.names else _without_name(entry) for i, entry in optimizer["state"].items()}
    grouped = zip(optimizer["param_groups"], group_ids(optimizer), strict=True)
    groups = [{**group, "params": [name(i) for i in ids]} if ids else group for group, ids in grouped]
    return {**optimizer, "state": state, "param_groups": groups}


def _without_name(entry: Any) -> Any:
    """The state of a parameter nobody knows which: its tensors are not to be joined."""
    if not isinstance(entry, Mapping):
        return entry
    return {k: replace(v, note=v.note or NOT_NAMED) if isinstance(v, Tensor) else v for k, v in entry.items()}


def _with(tree: Any, path: KeyPath, value: Any) -> Any:
    """A tree with another value at a key path; the tree itself stays as it is."""
    if not path:
        return value
    child = _with(tree[path[0]], path[1:], value)
    if isinstance(tree, dict):
        copied = empty_like(tree)
        copied.update({**tree, path[0]: child})
        return copied
    return type(tree)((*tree[: path[0]], child, *tree[path[0] + 1 :]))
