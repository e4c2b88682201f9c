"""Compare plain values: rank by rank if ranks differ, and param groups by their parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ckptools.diff.record import Subject, ValueDifference, Verdict
from ckptools.diff.sides import ContainerForm, Contents, SideContainer, SideGroup, SideValue
from ckptools.keys.entries import LONG
from ckptools.keys.value_digests import MAX_TEXT, UNREAD, Content, apart, digest_of, kind_of, text_of
from ckptools.model.regions import Box
from ckptools.model.tree import Found, NumpyArray, NumpyScalar, first_difference
from ckptools.option import spelled
from ckptools.text import CUT, clip, common_prefix, few, fqn_of, plural

ByRank = Mapping[int | None, Content]
KEYS = "a key is a number on one side and its text on the other"


def numbered() -> str:
    """Why a parameter without a name cannot be compared, as the detail of a row."""
    return f"only its number matches: no name is known ({spelled('names')} FROM gives them)"


def value_rows(left: SideValue | None, right: SideValue | None, a: Contents, b: Contents) -> Iterator[ValueDifference]:
    """Compare a value of A and B, as one row or one per rank; one of `left` and `right` may be missing."""
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
        yield row._replace(verdict="cannot be compared", detail=numbered()) if unsure else row
    elif None in left.contents or None in right.contents:
        texts = [_counted(one.contents) for one in (left, right)]
        why = f"A has {texts[0]}, B has {texts[1]}"
        yield ValueDifference(value.name, value.subject, "cannot be compared", why, None, *texts)
    else:
        for rank in sorted({*left.contents, *right.contents}, key=lambda r: -1 if r is None else r):
            yield _row(value, rank, left.contents.get(rank), right.contents.get(rank), a, b)


def _lost(value: SideValue, other: SideValue, side: Contents) -> bool:
    """Whether the value of a rank is unknown on the other side because that rank's file is missing or damaged."""
    return any(rank in side.lost_ranks for rank in value.contents if rank is not None and rank not in other.contents)


def _shared(contents: ByRank) -> Content | None:
    """Return the content that all ranks share; None if they differ."""
    found = set(contents.values())
    return next(iter(found)) if len(found) == 1 else None


def _counted(contents: ByRank) -> str:
    return "one for all ranks" if None in contents else f"one for each of {plural(len(contents), 'rank')}"


def _row(
    value: SideValue, rank: int | None, left: Content | None, right: Content | None, a: Contents, b: Contents
) -> ValueDifference:
    """Make the row of a value; if one side lacks it because a file is missing, it cannot be compared."""
    verdict, detail = compared(left, right)
    for letter, content, side in (("A", left, a), ("B", right, b)):
        if content is None and rank in side.lost_ranks:
            verdict, detail = "cannot be compared", f"{letter}: the file of rank {rank} is not here, or damaged"
    return ValueDifference(value.name, value.subject, verdict, detail, rank, *texts_of(left, right))


def compared(a: Content | None, b: Content | None) -> tuple[Verdict, str]:
    """Return the verdict on two contents and how they differ; one of them may be missing."""
    if a is None or b is None:
        return "only in A" if b is None else "only in B", ""
    whys = [f"{side}: {content.problem}" for side, content in (("A", a), ("B", b)) if content.problem]
    if whys:
        return "cannot be compared", "; ".join(whys)
    exact = bool(a.exact and b.exact)
    if a.digest != b.digest:
        return "differs", first_unlike(a.value, b.value, exact)
    if a.exact == b.exact or not exact:
        return "same", ""
    # The values are equal, but of different classes, such as 5 and 5.0.
    kinds = f"{a.kind} → {b.kind}" if a.kind != b.kind else "its parts are of other classes, or in another order"
    return "differs", first_unlike(a.value, b.value) or kinds


def texts_of(a: Content | None, b: Content | None) -> tuple[str | None, str | None]:
    """Return the texts of A's and B's value, extended if they look alike although the values differ."""
    if a is None or b is None or a.problem or b.problem or (a.digest, a.exact) == (b.digest, b.exact):
        return (a.text if a else None), (b.text if b else None)
    cut = a.text.endswith(CUT) and b.text.endswith(CUT)
    if not cut and (a.text != b.text or compared(a, b)[1]):
        return a.text, b.text
    texts = apart(a.value, b.value)
    if a.value is not b.value and texts[0] != texts[1]:
        return texts
    words = (a.kind, b.kind) if a.kind != b.kind else ((a.exact or a.digest)[-8:], (b.exact or b.digest)[-8:])
    return f"{a.text} ({words[0]})", f"{b.text} ({words[1]})"


# -- param groups ------------------------------------------------------------------------------------------------------


def group_rows(a: Contents, b: Contents, sections: Iterable[str]) -> Iterator[ValueDifference]:
    """Compare each hyperparameter of each param group of A with B's value for the same parameters.

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
    return ValueDifference(_name(group, key), _subject(key), *compared(a, b), None, *texts_of(a, b))


def _by_place(left: Sequence[SideGroup], right: Sequence[SideGroup]) -> Iterator[ValueDifference]:
    for a, b in zip(left, right, strict=False):
        for key in dict.fromkeys([*a.settings, *b.settings]):
            yield _setting(a, key, a.settings.get(key), b.settings.get(key))
        texts = plural(len(a.params), "parameter"), plural(len(b.params), "parameter")
        verdict: Verdict = "same" if a.params == b.params else "differs"
        detail = ""
        if a.numbered or b.numbered:
            verdict = "cannot be compared"
            detail = f"parameters have numbers and no names ({spelled('names')} FROM gives them)"
        if len(a.params) != len(b.params):
            verdict, detail = "differs", "another number of parameters"
        yield ValueDifference(_name(a, "params"), "hyperparameters", verdict, detail, None, *texts)
    n = min(len(left), len(right))
    yield from _groups_of_one(left[n:], True)
    yield from _groups_of_one(right[n:], False)


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
    texts = mine.text if mine else None, clip(text, 120)
    return ValueDifference(_name(group, key), _subject(key), "differs", "one value in A, several in B", None, *texts)


def _parameters_of_one(group: SideGroup, names: Sequence[str], verdict: Verdict) -> ValueDifference:
    count = plural(len(names), "parameter")
    texts = (count, None) if verdict == "only in A" else (None, count)
    return ValueDifference(_name(group, "params"), "hyperparameters", verdict, few(names, 3), None, *texts)


def first_unlike(a: Any, b: Any, exact: bool = True) -> str:
    """Describe the first place where two values differ, with both items: `first at [3]: 7 → 5`.

    Empty for short values, which are shown whole, and if that place is not found.

    Args:
        a: a value of A.
        b: the value of B.
        exact: whether equal items of different classes, such as 5 and 5.0, differ.
    """
    if isinstance(a, NumpyArray) and isinstance(b, NumpyArray) and not a.objects:
        found = _in_arrays(a, b)
    elif any(isinstance(v, (list, tuple)) and len(v) > LONG for v in (a, b)) or _words(a) == _words(b):
        found = first_difference(a, b, lambda x, y: digest_of(x, exact) == digest_of(y, exact))
    else:
        return ""
    if found is None or not found[0]:
        lengths = [len(v) if isinstance(v, (list, tuple)) else 0 for v in (a, b)]
        alike = found is not None and lengths[0] != lengths[1] and min(lengths)
        return f"the first {min(lengths)} are the same; A has {lengths[0]}, B {lengths[1]}" if alike else ""
    place, x, y = found
    texts = apart(x, y)
    keys = ", ".join(str(key) if type(key) is int else clip(text_of(key), MAX_WORDS) for key in place)
    return f"first at [{keys}]: {texts[0]} → {texts[1]}"


MAX_WORDS = 40
"""Longest key in characters."""


def _words(value: Any) -> str:
    return clip(text_of(value), MAX_TEXT)


def _in_arrays(a: NumpyArray, b: NumpyArray) -> Found | None:
    """Find the first differing element of arrays of one dtype and shape, in the order of the bytes."""
    stated = [(array.dtype, array.shape, array.fortran_order, len(array.data)) for array in (a, b)]
    count = prod(a.shape)
    width = len(a.data) // count if count else 0
    at = common_prefix(a.data, b.data)
    if stated[0] != stated[1] or not width or at == len(a.data):
        return None
    n = at // width
    x, y = (NumpyScalar(array.dtype, array.data[n * width : (n + 1) * width]) for array in (a, b))
    if a.fortran_order:
        return Box.whole(a.shape[::-1]).index_of(n)[::-1], x, y
    return Box.whole(a.shape).index_of(n), x, y


# -- compare dicts, lists and tuples themselves: their class, the order of keys, their attributes ---------------------


def form_of(node: Any) -> ContainerForm:
    """Describe a container: its class, and digests of its keys, their order and its attributes."""
    keys = list(node) if isinstance(node, dict) else []
    plain = set(map(type, keys)) == {str}
    exact = sorted(keys) if plain else sorted(map(digest_of, keys))
    in_order = keys if plain else list(map(digest_of, keys))
    attributes = vars(node) if hasattr(node, "__dict__") else {}
    unread = "" if plain or not any(key.startswith(UNREAD) for key in exact) else UNREAD
    return ContainerForm(
        kind_of(node), unread + digest_of(exact), digest_of(in_order), digest_of(sorted(map(str, keys))),
        digest_of(dict(attributes)) if attributes else "",
    )  # fmt: skip


def container_rows(a: SideContainer, b: SideContainer, by_text: bool) -> Iterator[ValueDifference]:
    """Compare class, keys and attributes of two containers; dicts with parameter names have no order of keys.

    Args:
        a: container of one side.
        b: the same container on the other side.
        by_text: True if values inside were paired by names that do not tell a key 1 from a key "1", so that only this
            row can report such a difference.
    """
    if _alike(a.node, b.node):
        return
    forms = [side.form or form_of(side.node) for side in (a, b)]
    left, right = forms
    row = ValueDifference(a.name, a.subject, "differs", "", a.rank)
    if left.kind != right.kind and a.by_name:
        return
    if left.kind != right.kind:
        detail = f"a container of another class: {left.kind} → {right.kind}"
        yield row._replace(detail=detail, value_a=left.kind, value_b=right.kind)
    if left.keys != right.keys:
        if (a.by_name or by_text) and left.texts == right.texts:
            yield row._replace(detail=KEYS)
        return
    if left.order != right.order and not a.by_name:
        n, *keys = _first_key(a.node, b.node)
        yield row._replace(detail=f"the same keys in another order{n}", value_a=keys[0], value_b=keys[1])
    if UNREAD in (left.keys + right.keys + left.attributes + right.attributes):
        yield row._replace(verdict="cannot be compared", detail="its keys or attributes are not all known")
    elif left.attributes != right.attributes:
        yield _of_attributes(row, a.node, b.node)


def container_notes(a: Contents, b: Contents) -> Iterator[str]:
    """Note ignored differences between dicts with parameter names: the order of their keys, and their class."""
    moved, other_class = list[str](), list[str]()
    for key, one in a.containers.items():
        other = b.containers.get(key)
        if other is not None and one.by_name and not _alike(one.node, other.node):
            left, right = (side.form or form_of(side.node) for side in (one, other))
            moved += [one.name] if left.keys == right.keys and left.order != right.order else []
            other_class += [f"{one.name}: {left.kind} → {right.kind}"] if left.kind != right.kind else []
    if moved:
        yield f"keys of {few(moved, 3)} stand in another order, which does not count: parameters go by name"
    if other_class:
        yield f"the class of a dict of parameters does not count: {few(other_class, 3)}"


def _alike(x: Any, y: Any) -> bool:
    """Whether two containers have the same class and keys, judged quickly; False if unsure."""
    if x is None or type(x) is not type(y) or kind_of(x) != kind_of(y) or (hasattr(x, "__dict__") and vars(x)):
        return False
    if not isinstance(x, dict):
        return True
    return len(x) == len(y) and all(type(v) is type(w) is str and v == w for v, w in zip(x, y, strict=True))


def _first_key(x: Any, y: Any) -> tuple[str, str | None, str | None]:
    """Find where the order of keys begins to differ, and both keys there; a digest file does not list keys."""
    if x is None or y is None:
        return "", None, None
    n, v, w = next((n, v, w) for n, (v, w) in enumerate(zip(x, y, strict=True)) if digest_of(v) != digest_of(w))
    return f", from number {n} on", text_of(v), text_of(w)


def _of_attributes(row: ValueDifference, x: Any, y: Any) -> ValueDifference:
    known = x is not None and y is not None
    found = first_difference(vars(x), vars(y), lambda v, w: digest_of(v) == digest_of(w)) if known else None
    if found is None:
        return row._replace(detail="it was saved with other attributes")
    path, v, w = found
    texts = apart(v, w)
    return row._replace(detail=f"another attribute {fqn_of(path)}", value_a=texts[0], value_b=texts[1])
