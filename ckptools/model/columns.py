"""Columns: equally long lists, where element `i` of each belongs to thing `i`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from operator import itemgetter
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def by_value(column: Iterable[K]) -> dict[K, list[int]]:
    """The places of each value of a column."""
    found: dict[K, list[int]] = defaultdict(list)
    for place, value in enumerate(column):
        found[value].append(place)
    return dict(found)


def take(column: Sequence[V], places: Sequence[int]) -> Sequence[V]:
    """The elements of a column at some places, in their order."""
    if places == range(len(column)):
        return column
    if len(places) < 2:
        return [column[place] for place in places]
    found: tuple[V, ...] = itemgetter(*places)(column)
    return found
