"""Plain values of two sides held against each other: by rank where each has its own, param groups by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptools.checks.difference.sides import Contents, HeldGroup, HeldValue
from ckptools.contents.unlike_items import first_unlike
from ckptools.contents.value_digests import Content
from ckptools.model.difference import Subject, ValueDifference, Verdict
from ckptools.text import clip, few, plural

ByRank = Mapping[int | None, Content]
KEYS = "a key is a number on one side and its text on the other"
NUMBERED = "only its number matches: no name is known (--names FROM tells them)"


def value_rows(left: HeldValue | None, right: HeldValue | None, a: Contents, b: Contents) -> Iterator[ValueDifference]:
    """A row for a value of either side, or for each rank's; A and B are the sides that hold them."""
    held = left or right
    assert held is not None
    if left is None or right is None:
        yield from _only(held, right is None, b if right is None else a)
        return
    shared = _shared(left.contents), _shared(right.contents)
    numbered = NUMBERED if left.number or right.number else ""
    if left.identity != right.identity:
        yield ValueDifference(held.name, held.subject, "differs", KEYS, None, *(_any_text(h) for h in (left, right)))
    elif shared[0] and shared[1] and not _lost(left, right, b) and not _lost(right, left, a):
        yield _compared(held, None, shared[0], shared[1], numbered)
    elif None in left.contents or None in right.contents:
        texts = [_counted(one.contents) for one in (left, right)]
        why = f"A has {texts[0]}, B has {texts[1]}"
        yield ValueDifference(held.name, held.subject, "cannot be compared", why, None, *texts)
    else:
        for rank in sorted({*left.contents, *right.contents}, key=lambda r: -1 if r is None else r):
            yield _of_rank(held, rank, left.contents, right.contents, a, b)


def _any_text(held: HeldValue) -> str:
    return next(iter(held.contents.values())).text


def _lost(held: HeldValue, other: HeldValue, side: Contents) -> bool:
    """Whether a rank that has a value has a file on the other side that is lost, so that its value is not known."""
    return any(rank in side.lost_ranks for rank in held.contents if rank is not None and rank not in other.contents)


def _shared(contents: ByRank) -> Content | None:
    """What all ranks have alike; None where they differ, or it cannot be told."""
    found = set(contents.values())
    return next(iter(found)) if len(found) == 1 else None


def _counted(contents: ByRank) -> str:
    return "one for all ranks" if None in contents else f"one for each of {plural(len(contents), 'rank')}"


def _of_rank(
    held: HeldValue, rank: int | None, left: ByRank, right: ByRank, a: Contents, b: Contents
) -> ValueDifference:
    if rank in left and rank in right:
        return _compared(held, rank, left[rank], right[rank])
    return _alone(held, rank, left.get(rank) or right[rank], rank in left, b if rank in left else a)


def _only(held: HeldValue, in_a: bool, other: Contents) -> Iterator[ValueDifference]:
    shared = _shared(held.contents)
    if shared is not None and len(held.contents) > 1:
        yield _alone(held, None, shared, in_a, other)
    else:
        yield from (_alone(held, rank, content, in_a, other) for rank, content in held.contents.items())


def _alone(held: HeldValue, rank: int | None, content: Content, in_a: bool, other: Contents) -> ValueDifference:
    """What one side has and the other has not; of a rank whose file is lost nobody knows."""
    texts = (content.text, None) if in_a else (None, content.text)
    if rank is not None and rank in other.lost_ranks:
        why = f"{'B' if in_a else 'A'}: the file of rank {rank} is not here, or damaged"
        return ValueDifference(held.name, held.subject, "cannot be compared", why, rank, *texts)
    verdict: Verdict = "only in A" if in_a else "only in B"
    return ValueDifference(held.name, held.subject, verdict, "", rank, *texts)


def _compared(held: HeldValue, rank: int | None, a: Content, b: Content, unsure: str = "") -> ValueDifference:
    verdict, detail = compared(a, b)
    if unsure and verdict != "cannot be compared":
        verdict, detail = "cannot be compared", unsure
    return ValueDifference(held.name, held.subject, verdict, detail, rank, a.text, b.text)


def compared(a: Content, b: Content) -> tuple[Verdict, str]:
    """Whether two contents are the same, and why that cannot be told where it cannot."""
    whys = [f"{side}: {content.problem}" for side, content in (("A", a), ("B", b)) if content.problem]
    if whys:
        return "cannot be compared", "; ".join(whys)
    if a.digest == b.digest:
        return "same", ""
    alike = "they are shown alike and are not" if a.text == b.text else ""
    return "differs", first_unlike(a.value, b.value) or alike


# -- param groups ------------------------------------------------------------------------------------------------


def group_rows(a: Contents, b: Contents, sections: Iterable[str]) -> Iterator[ValueDifference]:
    """A row for each hyperparameter of each group: that of A's parameters, wherever B has them.

    Groups are held against each other by the parameters in them, for some formats lose which groups there were. Where
    names are not known, by their place.
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


def _name(group: HeldGroup, key: str) -> str:
    return f"{group.section}.param_groups.{group.number}.{key}"


def _subject(key: str) -> Subject:
    return "lr" if key == "lr" else "hyperparameters"


def _groups_of_one(groups: Sequence[HeldGroup], in_a: bool) -> Iterator[ValueDifference]:
    for group in groups:
        for key, content in group.settings.items():
            yield _setting(group, key, content if in_a else None, None if in_a else content)


def _setting(group: HeldGroup, key: str, a: Content | None, b: Content | None, detail: str = "") -> ValueDifference:
    verdict: Verdict = "only in A" if b is None else "only in B"
    if a is not None and b is not None:
        verdict, why = compared(a, b)
        detail = detail or why
    texts = a.text if a else None, b.text if b else None
    return ValueDifference(_name(group, key), _subject(key), verdict, detail, None, *texts)


def _by_place(left: Sequence[HeldGroup], right: Sequence[HeldGroup]) -> Iterator[ValueDifference]:
    for a, b in zip(left, right, strict=False):
        for key in dict.fromkeys([*a.settings, *b.settings]):
            yield _setting(a, key, a.settings.get(key), b.settings.get(key))
        yield _params_by_place(a, b)
    n = min(len(left), len(right))
    yield from _groups_of_one(left[n:], True)
    yield from _groups_of_one(right[n:], False)


def _params_by_place(a: HeldGroup, b: HeldGroup) -> ValueDifference:
    texts = plural(len(a.params), "parameter"), plural(len(b.params), "parameter")
    verdict: Verdict = "same" if a.params == b.params else "differs"
    detail = ""
    if a.numbered or b.numbered:
        verdict, detail = "cannot be compared", "parameters have numbers and no names (--names FROM tells them)"
    if len(a.params) != len(b.params):
        verdict, detail = "differs", "another number of parameters"
    return ValueDifference(_name(a, "params"), "hyperparameters", verdict, detail, None, *texts)


def _by_parameter(left: Sequence[HeldGroup], right: Sequence[HeldGroup]) -> Iterator[ValueDifference]:
    of = {name: group for group in right for name in group.params}
    for group in left:
        there = [of[name] for name in group.params if name in of]
        keys = dict.fromkeys([*group.settings, *(key for other in _distinct(there) for key in other.settings)])
        for key in keys if there else group.settings:
            yield _of_parameters(group, key, there)
        gone = [name for name in group.params if name not in of]
        if gone:
            yield _parameters_of_one(group, gone, "only in A")
    mine = {name for group in left for name in group.params}
    for group in right:
        new = [name for name in group.params if name not in mine]
        if new:
            yield _parameters_of_one(group, new, "only in B")


def _distinct(groups: Sequence[HeldGroup]) -> list[HeldGroup]:
    return list({group.number: group for group in groups}.values())


def _of_parameters(group: HeldGroup, key: str, there: Sequence[HeldGroup]) -> ValueDifference:
    """A hyperparameter of A's group, and what B has for the same parameters."""
    mine, values = group.settings.get(key), [other.settings.get(key) for other in there]
    distinct = list(dict.fromkeys(values))
    if len(distinct) <= 1:
        return _setting(group, key, mine, distinct[0] if distinct else None)
    counts = [(value, values.count(value)) for value in distinct]
    text = few([f"{value.text if value else 'none'} ({plural(n, 'parameter')})" for value, n in counts], 3)
    return ValueDifference(
        _name(group, key), _subject(key), "differs", "one value in A, several in B", None,
        mine.text if mine else None, clip(text, 120),
    )  # fmt: skip


def _parameters_of_one(group: HeldGroup, names: Sequence[str], verdict: Verdict) -> ValueDifference:
    texts = (
        (plural(len(names), "parameter"), None) if verdict == "only in A" else (None, plural(len(names), "parameter"))
    )
    return ValueDifference(_name(group, "params"), "hyperparameters", verdict, few(names, 3), None, *texts)
