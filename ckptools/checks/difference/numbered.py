"""Optimizer state that one side keeps by number and the other by name: which number is which name.

`torch.optim.Optimizer.state_dict()` numbers the parameters through all param groups. A side that lists names in its
groups, in that order, tells the number of each. Both sides have the same order only where the groups have as many
parameters, what either side knows of a name agrees, and every state has the slots and shapes of the other one.
Source: torch/optim/optimizer.py, `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptools.checks.difference.sides import Contents, HeldGroup, Identity
from ckptools.text import plural

UNSURE = "one side has numbers, the other names, and their order is not proven (--names FROM tells them)"

Names = Mapping[str, str]
"""What a number, such as `?3`, is called on the other side."""


def named_by_order(a: Contents, b: Contents) -> tuple[Contents, Contents, list[str], set[str]]:
    """Both sides with names for the numbers of which the other side proves them.

    Returns:
        The two sides, a note for each optimizer that got names, and the sections in which numbers are left beside
        names, so that what only one side has may be there on the other.
    """
    notes, unsure = [], set[str]()
    for section in dict.fromkeys(group.section for group in a.groups):
        mine, others = (tuple(g for g in side.groups if g.section == section) for side in (a, b))
        if _numbered(mine) == _numbered(others) or not others:
            continue
        names = _names(section, a, b) if _numbered(mine) else _names(section, b, a)
        if names is None:
            unsure.add(section)
            continue
        a, b = (_with_names(side, section, names) if _numbered(g) else side for side, g in ((a, mine), (b, others)))
        which = "A's numbers are B's names" if _numbered(mine) else "B's numbers are A's names"
        notes.append(f"{section}: {which} in the order of its groups, which {plural(len(names), 'shape')} agree with")
    return a, b, notes, unsure


def _numbered(groups: Sequence[HeldGroup]) -> bool:
    return any(group.numbered for group in groups)


def _names(section: str, numbered: Contents, named: Contents) -> Names | None:
    """The name of each number; None where the order is not proven."""
    mine, others = ([g for g in side.groups if g.section == section] for side in (numbered, named))
    sizes = [len(group.params) for group in mine]
    if not all(g.ordered for g in (*mine, *others)) or sizes != [len(group.params) for group in others]:
        return None
    pairs = [pair for g, h in zip(mine, others, strict=True) for pair in zip(g.params, h.params, strict=True)]
    if any(not number.startswith("?") and number != name for number, name in pairs):
        return None
    here, there = _shapes(section, numbered), _shapes(section, named)
    if any(here.get(number) != there.get(name) for number, name in pairs):
        return None
    return {number: name for number, name in pairs if number.startswith("?")}


def _shapes(section: str, side: Contents) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shape of every slot, by parameter; a plain number has none, as a tensor of one element."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for identity, held in (*side.tensors.items(), *side.values.items()):
        if _is_state(identity, section):
            found.setdefault(identity[2], {})[identity[3]] = getattr(held, "shape", ())
    return found


def _is_state(identity: Identity, section: str) -> bool:
    return len(identity) == 4 and identity[:2] == ("optimizer", section)


def _with_names(side: Contents, section: str, names: Names) -> Contents:
    def at(identity: Identity) -> Identity:
        if not _is_state(identity, section) or identity[2] not in names:
            return identity
        return (*identity[:2], names[identity[2]], identity[3])

    return replace(
        side,
        tensors={at(i): t if at(i) == i else t._replace(identity=at(i), number=False) for i, t in side.tensors.items()},
        values={at(i): v if at(i) == i else v._replace(identity=at(i), number=False) for i, v in side.values.items()},
        groups=list(_groups_with_names(side, section, names)),
    )


def _groups_with_names(side: Contents, section: str, names: Names) -> Iterator[HeldGroup]:
    for group in side.groups:
        params = tuple(names.get(name, name) for name in group.params)
        yield group._replace(params=params) if group.section == section else group
