"""Comparison of plain values: rank by rank if each has its own, param groups by parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from struct import calcsize, unpack
from typing import Any

from ckptools.diff.record import Subject, ValueDifference, Verdict
from ckptools.diff.sides import Contents, SideGroup, SideValue
from ckptools.keys.rank_leaves import LONG, is_plain
from ckptools.keys.value_digests import Content, scalar_bytes, text_of
from ckptools.model.regions import Box, Ints
from ckptools.model.values import NUMPY_CODES, NumpyArray, scalar
from ckptools.text import clip, few, plural, shape

ByRank = Mapping[int | None, Content]
KEYS = "a key is a number on one side and its text on the other"
NUMBERED = "only its number matches: no name is known (--names FROM gives them)"


def value_rows(left: SideValue | None, right: SideValue | None, a: Contents, b: Contents) -> Iterator[ValueDifference]:
    """A row for a value of either side, or one for each rank; `a` and `b` are the whole sides."""
    value = left or right
    assert value is not None
    if left is None or right is None:
        same = _shared(value.contents)
        contents = value.contents if same is None or len(value.contents) == 1 else {None: same}
        for rank, one in contents.items():
            yield _row(value, rank, one if left else None, one if right else None, a, b)
        return
    shared = _shared(left.contents), _shared(right.contents)
    if left.identity != right.identity:
        both = (next(iter(side.contents.values())).text for side in (left, right))
        yield ValueDifference(value.name, value.subject, "differs", KEYS, None, *both)
    elif shared[0] and shared[1] and not _lost(left, right, b) and not _lost(right, left, a):
        row = _row(value, None, *shared, a, b)
        unsure = (left.number or right.number) and row.verdict != "cannot be compared"
        yield row._replace(verdict="cannot be compared", detail=NUMBERED) if unsure else row
    elif None in left.contents or None in right.contents:
        texts = [_counted(one.contents) for one in (left, right)]
        why = f"A has {texts[0]}, B has {texts[1]}"
        yield ValueDifference(value.name, value.subject, "cannot be compared", why, None, *texts)
    else:
        for rank in sorted({*left.contents, *right.contents}, key=lambda r: -1 if r is None else r):
            yield _row(value, rank, left.contents.get(rank), right.contents.get(rank), a, b)


def _lost(value: SideValue, other: SideValue, side: Contents) -> bool:
    """Whether the file of a rank with a value is lost on the other side, so that its value is unknown."""
    return any(rank in side.lost_ranks for rank in value.contents if rank is not None and rank not in other.contents)


def _shared(contents: ByRank) -> Content | None:
    """The content that all ranks share; None if they differ."""
    found = set(contents.values())
    return next(iter(found)) if len(found) == 1 else None


def _counted(contents: ByRank) -> str:
    return "one for all ranks" if None in contents else f"one for each of {plural(len(contents), 'rank')}"


def _row(
    value: SideValue, rank: int | None, left: Content | None, right: Content | None, a: Contents, b: Contents
) -> ValueDifference:
    """A row of a value; if one side lacks it, it cannot be compared if that side's file is lost."""
    verdict, detail = compared(left, right)
    for letter, content, side in (("A", left, a), ("B", right, b)):
        if content is None and rank in side.lost_ranks:
            verdict, detail = "cannot be compared", f"{letter}: the file of rank {rank} is not here, or damaged"
    return ValueDifference(value.name, value.subject, verdict, detail, rank, _text(left), _text(right))


def _text(content: Content | None) -> str | None:
    return content.text if content else None


def compared(a: Content | None, b: Content | None) -> tuple[Verdict, str]:
    """Whether two contents are the same, or why that is unknown; a side may have none."""
    if a is None or b is None:
        return "only in A" if b is None else "only in B", ""
    whys = [f"{side}: {content.problem}" for side, content in (("A", a), ("B", b)) if content.problem]
    if whys:
        return "cannot be compared", "; ".join(whys)
    if a.digest == b.digest:
        return "same", ""
    alike = "they are shown alike and are not" if a.text == b.text else ""
    return "differs", first_unlike(a.value, b.value) or alike


# -- param groups ------------------------------------------------------------------------------------------------


def group_rows(a: Contents, b: Contents, sections: Iterable[str]) -> Iterator[ValueDifference]:
    """A row for each hyperparameter of each group of A, compared with B's for the same parameters.

    Groups are matched by their parameters, since some formats lose the groups; if names are unknown, by position.
    """
    for section in sections:
        left = [g for g in a.groups if g.section == section]
        right = [g for g in b.groups if g.section == section]
        if not left or not right:
            yield from _groups_of_one(left or right, bool(left))
        elif any(g.numbered or not g.params for g in (*left, *right)):
            yield from _by_place(left, right)
        else:
            yield from _by_parameter(left, right)


def _name(group: SideGroup, key: str) -> str:
    return f"{group.section}.param_groups.{group.number}.{key}"


def _subject(key: str) -> Subject:
    return "lr" if key == "lr" else "hyperparameters"


def _groups_of_one(groups: Sequence[SideGroup], in_a: bool) -> Iterator[ValueDifference]:
    for group in groups:
        for key, content in group.settings.items():
            yield _setting(group, key, content if in_a else None, None if in_a else content)


def _setting(group: SideGroup, key: str, a: Content | None, b: Content | None) -> ValueDifference:
    return ValueDifference(_name(group, key), _subject(key), *compared(a, b), None, _text(a), _text(b))


def _by_place(left: Sequence[SideGroup], right: Sequence[SideGroup]) -> Iterator[ValueDifference]:
    for a, b in zip(left, right, strict=False):
        for key in dict.fromkeys([*a.settings, *b.settings]):
            yield _setting(a, key, a.settings.get(key), b.settings.get(key))
        yield _params_by_place(a, b)
    n = min(len(left), len(right))
    yield from _groups_of_one(left[n:], True)
    yield from _groups_of_one(right[n:], False)


def _params_by_place(a: SideGroup, b: SideGroup) -> ValueDifference:
    texts = plural(len(a.params), "parameter"), plural(len(b.params), "parameter")
    verdict: Verdict = "same" if a.params == b.params else "differs"
    detail = ""
    if a.numbered or b.numbered:
        verdict, detail = "cannot be compared", "parameters have numbers and no names (--names FROM gives them)"
    if len(a.params) != len(b.params):
        verdict, detail = "differs", "another number of parameters"
    return ValueDifference(_name(a, "params"), "hyperparameters", verdict, detail, None, *texts)


def _by_parameter(left: Sequence[SideGroup], right: Sequence[SideGroup]) -> Iterator[ValueDifference]:
    of = {name: group for group in right for name in group.params}
    for group in left:
        there = [of[name] for name in group.params if name in of]
        keys = dict.fromkeys(key for one in (group, *there) for key in one.settings)
        for key in keys:
            yield _of_parameters(group, key, there)
        gone = [name for name in group.params if name not in of]
        if gone:
            yield _parameters_of_one(group, gone, "only in A")
    mine = {name for group in left for name in group.params}
    for group in right:
        new = [name for name in group.params if name not in mine]
        if len(new) == len(group.params):
            yield from _groups_of_one([group], False)
        if new:
            yield _parameters_of_one(group, new, "only in B")


def _of_parameters(group: SideGroup, key: str, there: Sequence[SideGroup]) -> ValueDifference:
    mine, values = group.settings.get(key), [other.settings.get(key) for other in there]
    counts = Counter(values)
    if len(counts) <= 1:
        return _setting(group, key, mine, next(iter(counts), None))
    text = few([f"{value.text if value else 'none'} ({plural(n, 'parameter')})" for value, n in counts.items()], 3)
    return ValueDifference(
        _name(group, key), _subject(key), "differs", "one value in A, several in B", None, _text(mine), clip(text, 120)
    )


def _parameters_of_one(group: SideGroup, names: Sequence[str], verdict: Verdict) -> ValueDifference:
    count = plural(len(names), "parameter")
    texts = (count, None) if verdict == "only in A" else (None, count)
    return ValueDifference(_name(group, "params"), "hyperparameters", verdict, few(names, 3), None, *texts)


MAX_WORDS = 40
"""Characters of an item."""


def first_unlike(a: Any, b: Any) -> str:
    """The first place where two values differ, with both items: `first at [3]: 7 → 5`.

    Empty for a list short enough to be shown, and if both items have the same text.
    """
    found = None
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and max(len(a), len(b)) > LONG:
        found = _in_lists(a, b, ())
        if found is None and len(a) != len(b):
            return f"the first {min(len(a), len(b))} are the same; A has {len(a)}, B {len(b)}"
    elif isinstance(a, NumpyArray) and isinstance(b, NumpyArray):
        found = _in_arrays(a, b)
    if found is None:
        return ""
    place, x, y = found
    return f"first at {shape(place)}: {clip(text_of(x), MAX_WORDS)} → {clip(text_of(y), MAX_WORDS)}"


def _in_lists(a: Any, b: Any, above: Ints) -> tuple[Ints, Any, Any] | None:
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)) and len(x) == len(y):
            found = _in_lists(x, y, (*above, n))
            if found is not None:
                return found
        elif is_plain(x) and is_plain(y) and scalar_bytes(scalar(x)) != scalar_bytes(scalar(y)):
            return (*above, n), x, y
    return None


def _in_arrays(a: NumpyArray, b: NumpyArray) -> tuple[Ints, Any, Any] | None:
    """The first differing element of arrays of one dtype and shape, in the order of the bytes."""
    code = NUMPY_CODES.get(a.dtype.lstrip("<>|="))
    alike = (a.dtype, a.shape, a.fortran_order, len(a.data)) == (b.dtype, b.shape, b.fortran_order, len(b.data))
    if code is None or not alike or a.fortran_order or len(a.data) != calcsize(code) * prod(a.shape):
        return None
    width, order = calcsize(code), ">" if a.dtype.startswith(">") else "<"
    pairs = ((n, a.data[n : n + width], b.data[n : n + width]) for n in range(0, len(a.data), width))
    place = next(((n, x, y) for n, x, y in pairs if x != y), None)
    if place is None:
        return None
    values = (unpack(order + code, data)[0] for data in place[1:])
    return Box.whole(a.shape).index_of(place[0] // width), next(values), next(values)
