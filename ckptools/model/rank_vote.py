"""Several ranks hold one thing: who has which value, and which ranks does the majority contradict?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from ckptools.model.values import Device, NumpyArray, NumpyDtype, Opaque, TorchName, describe_for_error, scalar
from ckptools.text import clip, plural, printable, spans

T = TypeVar("T")

MAX_VALUES = 8
"""At most this many distinct values are grouped; ranks with further ones are counted apart."""

MAX_SHOWN = 4
"""Values that a message shows."""

MAX_WORDS = 60
"""Characters of a value in a message."""


@dataclass(frozen=True, slots=True)
class Vote(Generic[T]):
    """Which values ranks have of one thing.

    Attributes:
        groups: the distinct values, each with the ranks that have it, in the order of their first rank.
        ungrouped: ranks that have further values.
    """

    groups: tuple[tuple[T, tuple[int, ...]], ...]
    ungrouped: tuple[int, ...] = ()

    @property
    def agree(self) -> bool:
        """Whether all ranks have one value."""
        return len(self.groups) < 2

    @property
    def majority(self) -> tuple[T, tuple[int, ...]] | None:
        """The value that more than half of the ranks have, and those ranks; None where no value has so many."""
        count = sum(len(ranks) for _, ranks in self.groups) + len(self.ungrouped)
        return next((group for group in self.groups if 2 * len(group[1]) > count), None)

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that the majority contradicts; none where there is no majority."""
        usual = self.majority
        if usual is None:
            return ()
        others = chain.from_iterable(ranks for _, ranks in self.groups if ranks is not usual[1])
        return tuple(sorted((*others, *self.ungrouped)))

    def by_rank(self, words: Callable[[T], str] | None = None) -> str:
        """Who has what: `rank 1: 0.02, others: 0.003`; without a majority `rank 0: 0.003, rank 1: 0.02`.

        Args:
            words: how a value is shown; as in other messages by default.
        """
        shown, usual = words or in_words, self.majority
        groups = [group for group in self.groups if group is not usual]
        hidden = sum(len(ranks) for _, ranks in groups[MAX_SHOWN:]) + len(self.ungrouped)
        found = ", ".join(f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}: {shown(v)}" for v, ranks in groups[:MAX_SHOWN])
        more = f" and {plural(hidden, 'more rank')}" if hidden else ""
        return found + more + (f", others: {shown(usual[0])}" if usual else "")


def in_words(value: Any) -> str:
    """A plain value in a message, on one line; a dict or a foreign object by what it is."""
    value = scalar(value)
    named = isinstance(value, (Opaque, TorchName, Device, NumpyArray, NumpyDtype))
    return clip(printable(repr(value) if named else describe_for_error(value)), MAX_WORDS)


def vote(ranked: Sequence[tuple[int, T]], same: Callable[[T, T], bool]) -> Vote[T]:
    """Group ranks by the value they have."""
    groups: list[tuple[T, list[int]]] = []
    by_object: dict[int, list[int]] = {}  # what ranks repeat is often one object: a random state is compared once
    ungrouped: list[int] = []
    for rank, value in ranked:
        members = by_object.get(id(value))
        if members is None:
            members = next((members for known, members in groups if same(value, known)), None)
        if members is None and len(groups) < MAX_VALUES:
            members = []
            groups.append((value, members))
        if members is None:
            ungrouped.append(rank)
        else:
            members.append(rank)
            by_object[id(value)] = members
    return Vote(tuple((value, tuple(ranks)) for value, ranks in groups), tuple(ungrouped))
