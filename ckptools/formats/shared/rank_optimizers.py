"""Optimizers of ranks that hold parameters of their own, named before they are merged.

A plain `optimizer.state_dict()` numbers the parameters of its own process from 0, so that in the files of pipeline
stages one number stands for another parameter on every rank. Each rank's numbers are named by that rank's own model,
as those of a single file are; what stays without a name is kept apart from what other ranks call by the same number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
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
NO_MODEL = (
    "numbered rank by rank, with no model beside it: nothing proves that a number is one parameter on two ranks, so it "
    "is not joined"
)


class NamedRanks(NamedTuple):
    """The trees of ranks, with names in their optimizers.

    Attributes:
        roots: what is to be merged, by the key path where it is put.
        assumed: parameters whose names hold if groups have the order of that rank's module.
    """

    roots: Mapping[KeyPath, Ranked]
    assumed: frozenset[str]


def named_by_own_models(
    merge: Merge, sections: Sequence[Section], given: GivenNames | None, in_parts: bool
) -> NamedRanks | None:
    """Name each rank's optimizers by that rank's own model, where a number may stand for one parameter on each rank.

    Args:
        merge: how the ranks' trees were merged without names.
        sections: of what came of it.
        given: names of all parameters, where the user told them.
        in_parts: whether ranks hold parameters of their own.

    Returns:
        None where no optimizer has numbers, or they are the same parameters on all ranks.

    Raises:
        RefusedError: the names that were given do not fit a rank's model.
    """
    models = [merge.values(s.path) for s in sections if s.kind == "model"]
    numbered = [s.path for s in sections if s.kind == "optimizer" and _is_numbered(merge.values(s.path))]
    optimizers = [path for path in numbered if in_parts or _number_their_own(merge.values(path), bool(models or given))]
    if not optimizers:
        return None
    roots, assumed = dict(merge.roots), set[str]()
    for path in optimizers:
        root = merge.root_of(path) or ()
        named: list[tuple[int, Any]] = []
        for rank, tree in roots[root]:
            value = merge.values(path).get(rank)
            if value is not None:
                naming = _naming(value, [of[rank] for of in models if rank in of], given, rank)
                assumed |= {naming.names[i] for i in naming.assumed}
                renamed = _renamed(value, naming, rank, NOT_NAMED if models else NO_MODEL)
                tree = _with(tree, path[len(root) :], renamed)
            named.append((rank, tree))
        roots[root] = named
    return NamedRanks(roots, frozenset(assumed))


def _is_numbered(optimizers: Mapping[int, Any]) -> bool:
    """Whether what all ranks have is an optimizer's state dict, and some have numbers for parameters."""
    if not all(is_optimizer(o) and not is_flat_optimizer(o) for o in optimizers.values()):
        return False
    return any(type(i) is int for o in optimizers.values() for ids in (*group_ids(o), o["state"]) for i in ids)


def _number_their_own(optimizers: Mapping[int, Any], told: bool) -> bool:
    """Whether one number may stand for another parameter on each rank.

    It does where ranks number not as many. Where no model tells what a rank holds, nor the user, copies have moments in
    common, by the checksums that their files state; those of stages are all different.
    """
    if len({tuple(map(len, group_ids(optimizer))) for optimizer in optimizers.values()}) > 1:
        return True
    held = {frozenset(_stated_checksums(optimizer)) for optimizer in optimizers.values()}
    return not told and len(held) > 1 and all(one and not one & other for one, other in combinations(held, 2))


def _stated_checksums(optimizer: Mapping[str, Any]) -> Iterator[tuple[Any, str, int]]:
    """The CRC-32 of each moment that is no vector, which alone could be a piece of a flattened parameter."""
    for number, entry in optimizer["state"].items():
        for slot, moment in entry.items() if isinstance(entry, Mapping) else ():
            if isinstance(moment, Tensor) and moment.kind == "plain" and len(moment.shape) > 1:
                yield from ((number, slot, s.source.crc) for s in moment.found if s.source and s.source.crc)


def _naming(optimizer: Mapping[str, Any], models: Sequence[Any], given: GivenNames | None, rank: int) -> Naming:
    model = model_for_names([m for m in models if isinstance(m, Mapping)], AS_SAVED)
    own = given if given is None or model is None else _of_one_rank(given, model, rank)
    return name_with(optimizer, model, believed(AS_SAVED, model or {}), own)


def _of_one_rank(given: GivenNames, model: Mapping[str, Any], rank: int) -> GivenNames:
    """The names that were given, without those of parameters that a rank does not hold."""
    listed = tuple(tuple(name for name in group if name in model) for group in given.listed)
    shapes = {k: v for k, v in given.shapes.items() if k in model}
    return replace(given, told_by=f"{given.told_by}, for rank {rank}", listed=listed, shapes=shapes)


def _renamed(optimizer: Mapping[str, Any], naming: Naming, rank: int, why: str) -> dict[str, Any]:
    """A rank's optimizer with names; `why` is said of what has none."""

    def name(number: Id) -> str:
        return naming.names.get(number) or f"{UNNAMED}{number} of rank {rank}"

    state = {
        name(i): entry if i in naming.names else _without_name(entry, why) for i, entry in optimizer["state"].items()
    }
    grouped = zip(optimizer["param_groups"], group_ids(optimizer), strict=True)
    groups = [{**group, "params": [name(i) for i in ids]} if ids else group for group, ids in grouped]
    return {**optimizer, "state": state, "param_groups": groups}


def _without_name(entry: Any, why: str) -> Any:
    """The state of a parameter nobody knows which: its tensors are not to be joined."""
    if not isinstance(entry, Mapping):
        return entry
    return {k: replace(v, note=v.note or why) if isinstance(v, Tensor) else v for k, v in entry.items()}


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
