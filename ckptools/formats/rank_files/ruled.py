"""Whole tensors in rank files that are slices, joined by the rules that the user gives.

Each rank of FSDP2 may save its local tensors (`to_local()`), which say nothing of their place. `--rules` says along
which dimension they follow each other in rank order; sizes may differ there, as the last ranks of FSDP2 have less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptools.errors import UsageError
from ckptools.formats.shared.merge import Merge, put
from ckptools.formats.shared.tensor_parallel import GivenRules, RankPiece, UnlikeError, given_rule, join
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.training_state.sections import Section, find_sections


def join_by_rules(path: Path, merge: Merge, tree: Any, rules: GivenRules, world: int) -> tuple[Any, list[Problem]]:
    """Join the slices whose names the rules know, of the model and of an optimizer that is keyed by name.

    Returns:
        The tree, and problems of slices that do not fit together.

    Raises:
        UsageError: the rules are for no tensor here.
    """
    problems, ruled = list[Problem](), False
    for name, place in [*_places(find_sections(tree))]:
        rule, values = given_rule(rules, name), merge.values(place)
        if rule is None or not all(isinstance(v, Tensor) and v.kind == "plain" for v in values.values()):
            continue
        ruled = True
        ranks: Sequence[int] = range(world) if rule.dim is not None else sorted(values)
        try:
            joined = join([RankPiece(rank, rank, values.get(rank)) for rank in ranks], rule, world)
        except UnlikeError as error:
            problems.append(Problem(Code.LAYOUT_DISAGREES, str(error), None, fqn_of(place)))
            continue
        tree = put(tree, place, joined)
        merge.disagreeing.pop(place, None)
        merge.uneven = [one for one in merge.uneven if one != place]
    if not ruled:
        raise UsageError(path, "--rules: no pattern fits a tensor here that says nothing of its place itself")
    return tree, problems


def _places(sections: Iterable[Section]) -> Iterator[tuple[str, KeyPath]]:
    """The name and key path of each tensor of a model, and of each moment with the name of its parameter."""
    for section in sections:
        if section.kind == "model":
            yield from ((key, (*section.path, key)) for key in section.value)
        state = section.value.get("state") if section.kind == "optimizer" else None
        for key, entry in state.items() if isinstance(state, Mapping) else ():
            slots = entry.items() if isinstance(entry, Mapping) and isinstance(key, str) else ()
            yield from ((key, (*section.path, "state", key, slot)) for slot, v in slots if getattr(v, "shape", ()))
