"""Trees of dotted names, and their folding: equal siblings become one branch with all their labels.

A folded tree unfolds into exactly the names that it was made of, each with its item.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby, takewhile
from typing import Generic, TypeVar

Item = TypeVar("Item")

MAX_LEVELS = 60
"""Levels that a name is cut into; a file may put any number of dots into one."""

_LAYER = re.compile(r"()([0-9]{1,18})()")

NUMBERED = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)", re.DOTALL)
"""A label, what stands before and behind its last number."""


@dataclass(slots=True)
class Branch(Generic[Item]):
    """A part of a tree of names, or several that are the same but for their labels.

    Attributes:
        labels: the last word of the name; of siblings that are folded, each one's, in their order.
        items: what has this very name, or one of the names that it stands for; none for a branch that only leads on.
        children: what the names go on with.
    """

    labels: tuple[str, ...]
    items: list[Item] = field(default_factory=list)
    children: list[Branch[Item]] = field(default_factory=list)


def tree_of(items: Iterable[tuple[str, Item]]) -> list[Branch[Item]]:
    """The tree that some dotted names make, in the order in which each branch is first met."""
    root: Branch[Item] = Branch(())
    known: dict[str, Branch[Item]] = {}
    for name, item in items:
        _branch_at(name, root, known).items.append(item)
    return root.children


def _branch_at(name: str, root: Branch[Item], known: dict[str, Branch[Item]]) -> Branch[Item]:
    """The branch with a name, and those that lead to it, made where they are not known yet."""
    branch = known.get(name)
    if branch is None:
        above, label = _last_word(name)
        branch = known[name] = Branch((label,))
        (root if above is None else _branch_at(above, root, known)).children.append(branch)
    return branch


def _last_word(name: str) -> tuple[str | None, str]:
    """Split a name before its last word, None where it is the only one; too deep a name keeps its dots at the end."""
    if name.count(".") > MAX_LEVELS:
        label = name.split(".", MAX_LEVELS)[-1]
        return name[: -len(label) - 1], label
    above, dot, label = name.rpartition(".")
    return above if dot else None, label


def fold(
    branches: Sequence[Branch[Item]],
    same: Callable[[Item], Hashable],
    beside: Callable[[Item], Hashable],
    by_words: Callable[[Item], bool],
) -> list[Branch[Item]]:
    """Fold a tree: siblings whose names go on in the same way, with items that are the same.

    Labels that differ only in a number fold wherever they stand; others, such as `q`, `k`, `v`, only with their
    neighbours.

    Args:
        branches: made by `tree_of`.
        same: what two items have in common that may be folded.
        beside: what they have in common as well, where they are siblings themselves and not parts of siblings.
        by_words: whether an item lets branches fold whose labels differ in more than a number; of items that have in
            common what `same` returns, all do or none.
    """
    return [branch for branch, _ in _Folding(same, beside, by_words).siblings(branches)]


def unfold(branches: Iterable[Branch[Item]]) -> Iterator[tuple[str, list[Item]]]:
    """The names that a tree stands for, each with the items of its branch; those of a branch in the items' order."""
    for branch in branches:
        for label in branch.labels:
            if branch.items:
                yield label, branch.items
            yield from ((f"{label}.{rest}", items) for rest, items in unfold(branch.children))


@dataclass
class _Folding(Generic[Item]):
    """Gives whatever a branch holds a number, so that two branches of any size are compared at once."""

    _same: Callable[[Item], Hashable]
    _beside: Callable[[Item], Hashable]
    _by_words: Callable[[Item], bool]
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _wordy: set[int] = field(default_factory=set)

    def siblings(self, branches: Sequence[Branch[Item]]) -> list[tuple[Branch[Item], int]]:
        """Branches with one parent, folded, each with the number of what it holds."""
        if len(branches) < 2:
            return list(map(self._numbered, branches))
        groups: dict[Hashable, list[Branch[Item]]] = {}
        for branch in branches:
            whole, number = self._numbered(branch)
            own = tuple(map(self._beside, branch.items))
            groups.setdefault((number, own, _stem(branch.labels[0]) or branch.labels[0]), []).append(whole)
        return self._neighbours([(_joined(alike), key[0]) for key, alike in groups.items()])  # type: ignore[index]

    def _numbered(self, branch: Branch[Item]) -> tuple[Branch[Item], int]:
        """A branch with its children folded, and a number that all branches have that hold the same."""
        children = self.siblings(branch.children) if branch.children else []
        holds = tuple(map(self._same, branch.items)), tuple((child.labels, number) for child, number in children)
        known = self._numbers.get(holds)
        number = self._numbers.setdefault(holds, len(self._numbers)) if known is None else known
        if known is None and (any(map(self._by_words, branch.items)) or any(n in self._wordy for _, n in children)):
            self._wordy.add(number)
        return Branch(branch.labels, branch.items, [child for child, _ in children]) if children else branch, number

    def _neighbours(self, siblings: Sequence[tuple[Branch[Item], int]]) -> list[tuple[Branch[Item], int]]:
        """Siblings with different words for labels, folded where they follow each other."""
        found: list[tuple[Branch[Item], int]] = []
        for _, run in groupby(siblings, self._word_key):
            alike = list(run)
            found.append((_joined([branch for branch, _ in alike]), alike[0][1]))
        return found

    def _word_key(self, sibling: tuple[Branch[Item], int]) -> Hashable:
        branch, number = sibling
        return number if number in self._wordy and not _stem(branch.labels[0]) else branch.labels


@lru_cache(maxsize=4096)
def _stem(label: str) -> tuple[str, str] | None:
    """The text before and behind the last number of a label; None where it has none."""
    found = NUMBERED.fullmatch(label)
    return (found[1], found[3]) if found else None


def layer_and_role(name: str) -> tuple[str | None, str]:
    """The number of the layer that a name is of, as it stands there, and the name with `*` in its place.

    That is the first word which is a number (`blocks.3.up.weight`), else the last number of the first word that holds
    one (`layer3.conv.weight`); None and the name itself where it holds none.
    """
    words = name.split(".")
    for pattern in (_LAYER, NUMBERED):
        for at, word in enumerate(words):
            if found := pattern.fullmatch(word):
                return found[2], ".".join([*words[:at], f"{found[1]}*{found[3]}", *words[at + 1 :]])
    return None, name


def _joined(branches: Sequence[Branch[Item]]) -> Branch[Item]:
    """Branches that hold the same, as one with all their labels; its items stand in the order of the names."""
    if len(branches) == 1:
        return branches[0]
    return replace(_under(branches), labels=tuple(label for branch in branches for label in branch.labels))


def _under(branches: Sequence[Branch[Item]]) -> Branch[Item]:
    """Branches with the same labels, in several places that are folded, as one."""
    places = zip(*(branch.children for branch in branches), strict=True)
    items = [item for branch in branches for item in branch.items]
    return Branch(branches[0].labels, items, [_under(children) for children in places])


def label_text(labels: Sequence[str], most: int = 8) -> str:
    """Folded labels in a word: `{0..23}`, `norm{1,2}`, `{q,k,v,o}_proj`; a limited number of runs or words of them."""
    if len(labels) == 1:
        return labels[0]
    stems = {_stem(label) for label in labels}
    stem = stems.pop() if len(stems) == 1 else None
    before, behind = stem or ("", _common_end(labels))
    words = [label[len(before) : len(label) - len(behind)] for label in labels]
    shown = runs_of(words) if stem else words
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return f"{before}{{{','.join(shown[:most])}{more}}}{behind}"


def _common_end(labels: Sequence[str]) -> str:
    """The common end of all labels, from a `_` on: `_proj`; "" where one label is nothing else."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*map(reversed, labels), strict=False))
    end = "".join(letters[0] for letters in alike)[::-1]
    behind = end[end.index("_") :] if "_" in end else ""
    return "" if behind in labels else behind


def runs_of(numbers: Sequence[str]) -> list[str]:
    """Numbers in ascending order, three or more in a row as `0..23`; behind them those with leading zeros."""
    plain = sorted(int(n) for n in numbers if str(int(n)) == n)
    runs: list[tuple[int, int]] = []
    for n in plain:
        follows = bool(runs) and n == runs[-1][1] + 1
        runs[-1 if follows else len(runs) :] = [(runs[-1][0] if follows else n, n)]
    words = [[str(a)] if a == b else [str(a), str(b)] if b == a + 1 else [f"{a}..{b}"] for a, b in runs]
    return [word for run in words for word in run] + [n for n in numbers if str(int(n)) != n]
