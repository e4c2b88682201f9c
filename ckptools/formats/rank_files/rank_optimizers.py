"""Optimizers of ranks that hold parameters of their own, named before they are merged.

A plain `optimizer.state_dict()` numbers the parameters of its own process from 0, so that in the files of pipeline
stages one number stands for another parameter on every rank. Each rank's numbers are named by that rank's own model,
as those of a single file are; a parameter without a name is kept apart from other ranks' parameters of that number.

Rank files do not state that each holds parameters of its own. It shows where no rank has all of the model: then a
missing file takes parameters with it, sizes may differ, and a param group has the entries of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

from ckptools.formats.shared.merge import Merge, Ranked, with_value
from ckptools.model.checkpoint import GivenNames, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath
from ckptools.pickles.alike import Alike
from ckptools.text import named_ranks
from ckptools.training_state.optimizer_names import group_ids
from ckptools.training_state.optimizers import name_with
from ckptools.training_state.parameter_names import AS_SAVED, UNNAMED, Id, Naming, believed, model_for_names
from ckptools.training_state.sections import Section, is_flat_optimizer, is_optimizer

NOT_NAMED = (
    "every rank numbers its own parameters, and nothing proves which one this is; "
    "give the names with --names FROM; --only model writes the model"
)
NO_MODEL = (
    "numbered rank by rank, with no model beside it: nothing proves that a number is one parameter on two ranks, so it "
    "is not joined"
)


class NamedRanks(NamedTuple):
    """The trees of ranks, with names in their optimizers.

    Attributes:
        roots: the trees to merge, by the key path where each is put.
        assumed: parameters whose names are right if groups have the order of that rank's module.
    """

    roots: Mapping[KeyPath, Ranked]
    assumed: frozenset[str]


def named_by_own_models(
    merge: Merge, sections: Sequence[Section], given: GivenNames | None, in_parts: bool
) -> NamedRanks | None:
    """Name each rank's optimizers by that rank's own model, where a number may stand for one parameter on each rank.

    Returns:
        None where no optimizer has numbers, or they are the same parameters on all ranks.

    Raises:
        RefusedError: the names that were given do not fit a rank's model.
    """
    of_model = [s.path for s in sections if s.kind == "model"]
    numbered = [s.path for s in sections if s.kind == "optimizer" and _is_numbered(merge.of_groups(s.path))]
    known = bool(of_model or given)
    optimizers = [path for path in numbered if in_parts or _number_their_own(merge.values(path), known)]
    if not optimizers:
        return None
    models = [merge.values(path) for path in of_model]
    roots, assumed = dict(merge.roots), set[str]()
    for path in optimizers:
        root = merge.root_of(path) or ()
        named: list[tuple[int, Any]] = []
        for rank, content in roots[root]:
            tree = content.tree() if isinstance(content, Alike) else content
            value = merge.values(path).get(rank)
            if value is not None:
                naming = _naming(value, [of[rank] for of in models if rank in of], given, rank)
                assumed |= {naming.names[i] for i in naming.assumed}
                renamed = _renamed(value, naming, rank, NOT_NAMED if models else NO_MODEL)
                tree = with_value(tree, path[len(root) :], renamed)
            named.append((rank, tree))
        roots[root] = named
    return NamedRanks(roots, frozenset(assumed))


def _is_numbered(optimizers: Mapping[int, Any]) -> bool:
    """Whether every rank has an optimizer's state dict, and some number their parameters."""
    if not all(is_optimizer(o) and not is_flat_optimizer(o) for o in optimizers.values()):
        return False
    return any(type(i) is int for o in optimizers.values() for ids in (*group_ids(o), o["state"]) for i in ids)


def _number_their_own(optimizers: Mapping[int, Any], is_known: bool) -> bool:
    """Whether one number may stand for another parameter on each rank.

    It may where ranks number different counts. Without a model or names from the user, copies have moments in common,
    by the checksums that their files state; those of stages are all different.
    """
    if len({tuple(map(len, group_ids(optimizer))) for optimizer in optimizers.values()}) > 1:
        return True
    sums = {frozenset(_stated_checksums(optimizer)) for optimizer in optimizers.values()}
    return not is_known and len(sums) > 1 and all(one and not one & other for one, other in combinations(sums, 2))


def _stated_checksums(optimizer: Mapping[str, Any]) -> Iterator[tuple[Any, str, int]]:
    """The CRC-32 of each moment that is no vector: a vector could be a piece of a flattened parameter."""
    for number, entry in optimizer["state"].items():
        for slot, moment in entry.items() if isinstance(entry, Mapping) else ():
            if isinstance(moment, Tensor) and moment.kind == "plain" and len(moment.shape) > 1:
                yield from ((number, slot, s.source.crc) for s in moment.found if s.source and s.source.crc)


def _naming(optimizer: Mapping[str, Any], models: Sequence[Any], given: GivenNames | None, rank: int) -> Naming:
    model = model_for_names([m for m in models if isinstance(m, Mapping)], AS_SAVED)
    own = given if given is None or model is None else _of_one_rank(given, model, rank)
    return name_with(optimizer, model, believed(AS_SAVED, model or {}), own)


def _of_one_rank(given: GivenNames, model: Mapping[str, Any], rank: int) -> GivenNames:
    """The given names, without those of parameters that a rank does not hold."""
    listed = tuple(tuple(name for name in group if name in model) for group in given.listed)
    shapes = {k: v for k, v in given.shapes.items() if k in model}
    return replace(given, given_by=f"{given.given_by}, for rank {rank}", listed=listed, shapes=shapes)


def _renamed(optimizer: Mapping[str, Any], naming: Naming, rank: int, why: str) -> dict[str, Any]:
    """A rank's optimizer with names; `why` is the note on parameters without one: their tensors are not joined."""

    def name(number: Id) -> str:
        return naming.names.get(number) or f"{UNNAMED}{number} of rank {rank}"

    state = {
        name(i): entry if i in naming.names or not isinstance(entry, Mapping) else _noted(entry, why)
        for i, entry in optimizer["state"].items()
    }
    grouped = zip(optimizer["param_groups"], group_ids(optimizer), strict=True)
    groups = [{**group, "params": [name(i) for i in ids]} if ids else group for group, ids in grouped]
    return {**optimizer, "state": state, "param_groups": groups}


def _noted(entry: Mapping[str, Any], why: str) -> dict[str, Any]:
    return {k: replace(v, note=v.note or why) if isinstance(v, Tensor) else v for k, v in entry.items()}


def is_in_parts(merge: Merge, sections: Sequence[Section]) -> bool:
    """Whether no rank has every tensor of the model."""
    models = (s for s in sections if s.kind == "model" and any(s.holds(path) for path in merge.partial))
    keys = ([v.keys() for v in merge.values(m.path).values() if isinstance(v, Mapping)] for m in models)
    return any(set().union(*by_rank) not in by_rank for by_rank in keys)


def lost_parts(files: Iterable[RankFile]) -> Iterator[Problem]:
    """The problem of unreadable files: their parameters are in no other file, not even their names."""
    lost = sorted({f.rank for f in files if f.rank is not None and not f.is_here})
    if lost:
        text = f"ranks hold parameters of their own; those of {named_ranks(lost)} are nowhere else"
        yield Problem(Code.MODEL_PART_MISSING, text)
