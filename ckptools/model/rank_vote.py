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
    odd: list[int] = []
    for rank, value in ranked:
        members = next((members for known, members in groups if same(value, known)), None)
        if members is not None:
            members.append(rank)
        elif len(groups) < MAX_VALUES:
            groups.append((value, [rank]))
        else:
            odd.append(rank)
    most = max((members for _, members in groups), key=len, default=[])
    return sorted([*odd, *(rank for _, members in groups if members is not most for rank in members)])
