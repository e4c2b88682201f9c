"""Several ranks hold one thing: which of them hold another than most do?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

MAX_VALUES = 8
"""Different values that are told apart; where there are more, every rank has its own."""


def minority_ranks(ranked: Sequence[tuple[int, T]], same: Callable[[T, T], bool]) -> list[int]:
    """The ranks that do not have the value that most have; of values that as many have, the lowest rank's counts."""
    groups: list[tuple[T, list[int]]] = []
    by_object: dict[int, list[int]] = {}  # what ranks repeat is often one object: a random state is compared once
    odd: list[int] = []
    for rank, value in ranked:
        members = by_object.get(id(value))
        if members is None:
            members = next((members for known, members in groups if same(value, known)), None)
        if members is None and len(groups) < MAX_VALUES:
            members = []
            groups.append((value, members))
        if members is None:
            odd.append(rank)
        else:
            members.append(rank)
            by_object[id(value)] = members
    most = max((members for _, members in groups), key=len, default=[])
    return sorted([*odd, *(rank for _, members in groups if members is not most for rank in members)])
