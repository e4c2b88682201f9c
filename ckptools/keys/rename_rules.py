"""Rules that may turn the names of a checkpoint into those of a model, suggested by pairs of similar names.

No names of wrappers are built in: any text before or between the components common to both sides is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from ckptools.keys.name_map import replaced_component, replaced_prefix, without_components
from ckptools.model.records import displayed
from ckptools.text import plural

MOST_ALIKE = 4
"""A name is compared with at most this many similar names of the other side."""

MOST_TRIED = 6
"""At most this many rules of a kind are tried, the most frequently suggested first."""

MAX_ASKED = 2_000
"""At most this many names, evenly spread, suggest rules; rare rules are suggested once the others fit."""

MAX_COMPONENTS = 64
"""Names with more components are skipped: each component is tried separately."""


RenameKind = Literal["prefix", "component", "wrapper", "offset", "shape", "order"]


@displayed
class Rename(NamedTuple):
    """One rule that turns names of the checkpoint into those of the model. It is a guess, never applied by itself.

    Attributes:
        kind: `prefix` (`old` at the beginning becomes `new`), `component` (`old` between dots becomes `new`; or each
            component of `old` is removed), `wrapper` (the model also has the components of `new`), `offset` (the
            numbers after `old` are all shifted by the same amount), `shape` (only one name on each side has the shape),
            `order` (shapes agree one after the other, in the order of the module).
        old: the replaced text; "" if text is only added.
        new: its replacement; "" if text is only removed.
        fixes: number of names of the model that gain a tensor of the right shape.
        example: a name of the checkpoint, and its new name.
        offset: the shift of the numbers, for the kind `offset`.
        fit: number of selected names of the model that then have a tensor of their shape.
        assumed: whether shapes, or an order, are the only evidence.
    """

    kind: RenameKind
    old: str
    new: str
    fixes: int = 0
    changes: int = 0
    example: tuple[str, str] = ("", "")
    offset: int = 0
    fit: int = 0
    assumed: bool = False


def suggested(here: Collection[str], there: Collection[str]) -> list[Rename]:
    """Suggest rules that turn names that only the checkpoint has into names that only the model has."""
    mine = {name: parts for name in here if len(parts := name.split(".")) <= MAX_COMPONENTS}
    theirs = {name: parts for name in there if len(parts := name.split(".")) <= MAX_COMPONENTS}
    some = _some(mine)
    added = (Rename("wrapper", "", rule.old) for rule in _gone(_some(theirs), mine))
    kinds = (_prefixes(some, theirs), _gone(some, theirs), _replaced(some, theirs), added)
    return [rule for kind in kinds for rule, _ in Counter(kind).most_common(MOST_TRIED)]


def applied(rule: Rename, names: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Every name that a rule by name changes, with its new name; `wanted` are names of the model, for its wrappers."""
    if rule.kind == "wrapper":
        gone = rule.new.split(".")
        bare = {without_components(name, gone): name for name in wanted if any(part in name for part in gone)}
        made = {name: bare[name] for name in names if name in bare}
    elif rule.kind == "prefix":
        made = {name: replaced_prefix(name, rule.old, rule.new) for name in names if name.startswith(rule.old)}
    elif rule.new:
        made = {name: replaced_component(name, rule.old, rule.new) for name in names if rule.old in name}
    else:
        gone = rule.old.split(".")
        made = {name: without_components(name, gone) for name in names if any(part in name for part in gone)}
    return {old: new for old, new in made.items() if old != new}


Split = Mapping[str, Sequence[str]]
"""Names with their components."""


def _some(names: Split) -> Split:
    step = -(-len(names) // MAX_ASKED) or 1
    return {name: names[name] for name in islice(names, 0, None, step)}


def _prefixes(mine: Split, theirs: Split) -> Iterator[Rename]:
    """The texts before the longest end that a name shares with one of the other side.

    If both have a text there, the end must have two components or more: `weight` alone says nothing.
    """
    ends: dict[str, list[str]] = {}
    for name, parts in theirs.items():
        for end in _ends(parts):
            ends.setdefault(end, []).append(name)
    for name, parts in mine.items():
        longest = next((end for end in _ends(parts) if end in ends), "")
        for other in islice(ends.get(longest, ()), MOST_ALIKE):
            old, new = name[: len(name) - len(longest)], other[: len(other) - len(longest)]
            if not (old and new) or ("." in longest and not _only_numbers_differ(old, new)):
                yield Rename("prefix", old, new)


def _ends(parts: Sequence[str]) -> Iterator[str]:
    """The ends of a name at its dots, the longest first."""
    return (".".join(parts[n:]) for n in range(len(parts)))


def _only_numbers_differ(old: str, new: str) -> bool:
    """Whether two texts are the same except for numbers: another layer is another tensor, not another name."""
    return ["" if p.isdecimal() else p for p in old.split(".")] == ["" if p.isdecimal() else p for p in new.split(".")]


def _gone(mine: Split, theirs: Split) -> Iterator[Rename]:
    """Components whose removal gives a name of the other side: one, or all those that no name there has."""
    known = {part for parts in theirs.values() for part in parts}
    for parts in mine.values():
        words = {part for part in parts if not part.isdecimal()}
        for gone in {*((word,) for word in words), tuple(sorted(words - known))}:
            if gone and ".".join([part for part in parts if part not in gone]) in theirs:
                yield Rename("component", ".".join(gone), "")


def _replaced(mine: Split, theirs: Split) -> Iterator[Rename]:
    """Components that replace another one while all others of the name stay the same."""
    places: dict[tuple[int, str], list[str]] = {}
    for parts in theirs.values():
        for n, part in enumerate(parts):
            places.setdefault((n, _without(parts, n)), []).append(part)
    for parts in mine.values():
        for n, old in enumerate(parts):
            for new in islice(places.get((n, _without(parts, n)), ()), MOST_ALIKE):
                if not old.isdecimal() and not new.isdecimal():
                    yield Rename("component", old, new)


def _without(parts: Sequence[str], n: int) -> str:
    return ".".join((*parts[:n], *parts[n + 1 :]))


def rename_words(rename: Rename) -> str:
    """Describe a rename in words."""
    old, new = rename.old, rename.new
    if rename.kind == "prefix":
        if old and new:
            return f"prefix {old!r} is {new!r}"
        return f"drop prefix {old!r}" if old else f"add prefix {new!r}"
    if rename.kind == "component":
        return f"{old!r} between dots is {new!r}" if new else f"drop {_components(old)} between dots"
    if rename.kind == "wrapper":
        return f"add {_components(new)} where the model has it"
    if rename.kind == "offset":
        way = "higher" if rename.offset > 0 else "lower"
        return f"numbers {f'behind {old!r}' if old else 'in front'} are {abs(rename.offset)} {way}"
    count = plural(rename.changes, "name")
    if rename.kind == "shape":
        return f"{count} by shape alone, which only one on each side has"
    return f"{count} one after the other, in the order of the modules, as shapes agree"


def _components(text: str) -> str:
    return " and ".join(map(repr, text.split(".")))
