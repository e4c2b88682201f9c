"""The leaves of a section, those that each rank has for itself once for every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptools.contents.leaves import leaves_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, children_of, leaf_at
from ckptools.training_state.sections import Section, is_gathered


class RankLeaf(NamedTuple):
    """A leaf.

    Attributes:
        path: key path in the section, the same for every rank.
        rank: whose it is; None where it is nobody's own.
        value: what is there.
        below: path in the section below which each rank has its own; None where it is nobody's own.
    """

    path: KeyPath
    rank: int | None
    value: Any
    below: KeyPath | None = None


def rank_leaves(ck: Checkpoint, section: Section) -> Iterator[RankLeaf]:
    """The leaves of a section: of what lists all ranks' generators, of each rank's own file, or of what they share."""
    if section.kind == "rng" and is_by_rank(section.value):
        for key, value in children_of(section.value) or ():
            yield from (RankLeaf(path, int(key), leaf, ()) for path, leaf in leaves_of(value))
        return
    own = dict(_own(ck, section))
    for below, values in own.items():
        for rank, value in values.items():
            yield from (RankLeaf((*below, *path), rank, leaf, below) for path, leaf in leaves_of(value))
    for path, leaf in leaves_of(section.value):
        if not any(path[: len(below)] == below for below in own):
            yield from _by_holder(path, leaf)


def is_by_rank(states: Any) -> bool:
    """Whether states are those of all ranks: a list of dicts, or a dict whose keys are the ranks; some may be lost."""
    if isinstance(states, Mapping):
        ranks = {str(key) for key in states}
        if len(ranks) > 1 and ranks == {str(n) for n in range(len(ranks))}:
            return True
        dicts = (isinstance(state, Mapping) for state in states.values())
        return bool(ranks) and all(rank.isdecimal() for rank in ranks) and all(dicts)
    return is_gathered(states)


def _own(ck: Checkpoint, section: Section) -> Iterator[tuple[KeyPath, Mapping[int, Any]]]:
    """What each rank has for itself in a section, by the path in it below which that lies."""
    n = len(section.path)
    for key, values in ck.per_rank.items():
        if key[:n] == section.path:
            yield key[n:], values
        elif section.path[: len(key)] == key:
            yield (), {rank: leaf_at(value, section.path[len(key) :]) for rank, value in values.items()}


def _by_holder(path: KeyPath, leaf: Any) -> Iterator[RankLeaf]:
    """A leaf; a tensor that several ranks' files hold whole, each with bytes of its own, once for each of them."""
    ranks = sorted({s.rank for s in leaf.found if s.rank is not None}) if isinstance(leaf, Tensor) else []
    if len(ranks) > 1 and leaf.kind == "plain":
        yield from (RankLeaf(path, rank, leaf, path) for rank in ranks)
    else:
        yield RankLeaf(path, None, leaf)
