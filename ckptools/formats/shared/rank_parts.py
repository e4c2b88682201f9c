"""Rank files of which each holds parameters of its own: stages of a pipeline that every rank saves for itself.

Nothing in such a file says so. It shows where no rank has all of the model: then a file that is missing takes
parameters with it, sizes may differ as they like, and a param group is all that the ranks list in theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptools.formats.shared.merge import Merge, put
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Code, Problem
from ckptools.text import spans
from ckptools.training_state.naming import UNNAMED
from ckptools.training_state.sections import Section, find_sections


def is_in_parts(merge: Merge, sections: Sequence[Section]) -> bool:
    """Whether no rank has every tensor of the model."""
    models = (s for s in sections if s.kind == "model" and any(s.holds(path) for path in merge.partial))
    return any(_nobody_has_all(merge.values(model.path)) for model in models)


def _nobody_has_all(models: Mapping[int, Any]) -> bool:
    keys = {rank: value.keys() for rank, value in models.items() if isinstance(value, Mapping)}
    every = set().union(*keys.values())
    return not any(own == every for own in keys.values())


def lost_parts(files: Iterable[RankFile]) -> Iterator[Problem]:
    """The problem of files that cannot be read: what was in them is in no other, and not even its names are known."""
    lost = sorted({f.rank for f in files if f.rank is not None and not f.is_here})
    if lost:
        whose = f"{'rank' if len(lost) == 1 else 'ranks'} {spans(lost)}"
        yield Problem(Code.MODEL_PART_MISSING, f"ranks hold parameters of their own; those of {whose} are nowhere else")


_LISTS = (("params",), ("param_names",))
"""What of a param group has one entry for each parameter."""


def join_param_groups(merge: Merge, tree: Any) -> Any:
    """Let every param group list what any rank lists in it, where ranks have parameters of their own.

    Args:
        merge: how the ranks' trees were merged; lists that are joined no longer count as differing.
        tree: what came of it.

    Returns:
        The tree with the joined lists, in the order of the ranks.
    """
    sections = find_sections(tree)
    for path in list(merge.differing):
        if path[-1:] not in _LISTS or not any(s.kind == "optimizer" and s.holds(path) for s in sections):
            continue
        listed = merge.values(path)
        if all(_knows_no_other(rank, listed, merge, sections) for rank in listed):
            tree = put(tree, path, list(dict.fromkeys(name for names in listed.values() for name in names)))
            del merge.differing[path]
    return tree


def _knows_no_other(rank: int, listed: Mapping[int, Any], merge: Merge, sections: Sequence[Section]) -> bool:
    """Whether a rank's model has none of the parameters that only other ranks list."""
    # What has no name is called by its rank, and is in no model.
    if not all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in listed.values()):
        return False
    named = {name for names in listed.values() for name in names if not name.startswith(UNNAMED)}
    others = named.difference(listed[rank])
    models = [merge.values(s.path).get(rank, {}) for s in sections if s.kind == "model"]
    return not others or (bool(models) and not any(name in model for model in models for name in others))
