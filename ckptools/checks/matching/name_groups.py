"""Names of rows folded: layers that differ in their number are one line, and a wall of keys a few prefixes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from ckptools.contents import folding
from ckptools.contents.folding import Branch, label_text
from ckptools.dtypes import short
from ckptools.model.matching import MatchGroup, MatchRow
from ckptools.text import shape

MOST = 6
"""Lines of one status and one explanation; where there are more, names lose their ends."""

STATUSES = ("shape", "unknown", "missing", "tied", "unexpected")


def groups_of(rows: Iterable[MatchRow]) -> list[MatchGroup]:
    """What differs, folded: by status first, then by what explains it; those whose dtype differs come last."""
    listed = list(rows)
    found = [g for s in STATUSES for g in _groups(s, [r for r in listed if r.status == s], _shapes)]
    return [*found, *_groups("dtype", [r for r in listed if r.dtype_differs], _dtypes)]


Facts = tuple[str, str, str]
"""Of the checkpoint, of the model, and what explains the difference."""


def _shapes(row: MatchRow) -> Facts:
    return _size(row.checkpoint_shape), _size(row.model_shape), row.note


def _size(sizes: tuple[int, ...] | None) -> str:
    return "" if sizes is None else shape(sizes)


def _dtypes(row: MatchRow) -> Facts:
    return short(row.checkpoint_dtype), short(row.model_dtype), "converted when it is loaded"


def _groups(status: str, rows: Sequence[MatchRow], facts: Callable[[MatchRow], Facts]) -> list[MatchGroup]:
    """Rows that tell the same facts, by name; where only one side has a shape it is no reason to tell them apart."""
    alike: dict[Facts, list[MatchRow]] = {}
    for row in rows:
        told = facts(row)
        key = told if status in ("shape", "dtype") else ("", "", told[2])
        alike.setdefault(key, []).append(row)
    return [group for key, some in alike.items() for group in _folded(status, some, key, facts)]


def _folded(
    status: str, rows: Sequence[MatchRow], key: Facts, facts: Callable[[MatchRow], Facts]
) -> Iterable[MatchGroup]:
    for names, members in fold([row.name or row.checkpoint_name or "" for row in rows], [facts(row) for row in rows]):
        told = {facts(rows[n])[:2] for n in members}
        checkpoint, model = told.pop() if len(told) == 1 else key[:2]
        yield MatchGroup(status, names, len(members), checkpoint, model, key[2])


def fold(names: Sequence[str], kinds: Sequence[Hashable] = ()) -> list[tuple[str, list[int]]]:
    """Names that are alike under one text, each with the numbers of those that it stands for.

    Names that go on in the same way are folded, as `tree` folds them: those of one kind, such as a shape; where that
    leaves many lines, all; where that does, they lose their ends.

    Args:
        names: what is folded.
        kinds: what each name is; none where that does not matter.
    """
    apart, alike = _tree(names, kinds or [0] * len(names)), _tree(names, [0] * len(names))
    tries = [(apart, _depth(apart)), *((alike, depth) for depth in range(_depth(alike), 0, -1))]
    found: list[tuple[str, list[int]]] = []
    for tree, depth in tries:
        found = [(names[m[0]] if len(m) == 1 else text, m) for text, m in _lines(tree, "", depth)]
        if len(found) <= MOST:
            break
    return found


def _tree(names: Sequence[str], kinds: Sequence[Hashable]) -> list[Branch[int]]:
    items = folding.tree_of((name, n) for n, name in enumerate(names))
    return folding.fold(items, kinds.__getitem__, kinds.__getitem__, lambda _: True)


def _depth(tree: Iterable[Branch[int]]) -> int:
    return max(map(_levels, tree), default=1)


def _levels(branch: Branch[int]) -> int:
    return 1 + max(map(_levels, branch.children), default=0)


def _lines(branches: Iterable[Branch[int]], before: str, depth: int) -> Iterator[tuple[str, list[int]]]:
    """A line for each branch that is a name; at the last level one for all below it."""
    for branch in branches:
        text = before + label_text(branch.labels)
        if depth == 1 and branch.children:
            yield f"{text}.*", list(_items(branch))
            continue
        if branch.items:
            yield text, branch.items
        yield from _lines(branch.children, f"{text}.", depth - 1)


def _items(branch: Branch[int]) -> Iterator[int]:
    yield from branch.items
    for child in branch.children:
        yield from _items(child)
