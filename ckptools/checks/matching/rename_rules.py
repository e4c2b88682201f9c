"""Rules that may turn the names of a checkpoint into those of a model, suggested by pairs of names that look alike.

Nothing here knows the name of any wrapper: whatever stands in front of, or between, what both sides have is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from ckptools.contents.renames import replaced_component, replaced_prefix, without_components
from ckptools.model.matching import Rename

MOST_ALIKE = 4
"""Names of the other side that one name is compared with, where several look alike."""

MOST_TRIED = 6
"""Rules of a kind that are tried, those first that most pairs suggest."""

MAX_ASKED = 2_000
"""Names that suggest rules, evenly among all; what few names need is suggested once the others fit."""

MAX_COMPONENTS = 64
"""Names with more are left as they are: each component is tried for itself."""


def suggested(here: Collection[str], there: Collection[str]) -> list[Rename]:
    """Rules that would turn some names that only the checkpoint has into names that only the model has.

    Args:
        here: names that only the checkpoint has.
        there: names that only the model has.
    """
    mine = {name: parts for name in here if len(parts := name.split(".")) <= MAX_COMPONENTS}
    theirs = {name: parts for name in there if len(parts := name.split(".")) <= MAX_COMPONENTS}
    some, others = _some(mine), _some(theirs)
    kinds = (_prefixes(some, theirs), _gone(some, theirs), _replaced(some, theirs), _added(mine, others))
    return [rule for kind in kinds for rule, _ in Counter(kind).most_common(MOST_TRIED)]


def applied(rule: Rename, names: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Every name that a rule changes, with what it makes of it.

    Args:
        rule: of a kind that acts by name.
        names: of the checkpoint.
        wanted: of the model, for wrappers that only it has.
    """
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
    """What stands before the longest end that a name shares with one of the other side.

    Where both have something there, that end is of two components or more: `weight` alone says nothing.
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
    """Whether two texts are the same but for numbers: another layer is another tensor, not another name for it."""
    return ["" if p.isdecimal() else p for p in old.split(".")] == ["" if p.isdecimal() else p for p in new.split(".")]


def _gone(mine: Split, theirs: Split) -> Iterator[Rename]:
    """Components without which a name is one of the other side: one, or all those that no name there has."""
    known = {part for parts in theirs.values() for part in parts}
    for parts in mine.values():
        words = {part for part in parts if not part.isdecimal()}
        for gone in {*((word,) for word in words), tuple(sorted(words - known))}:
            if gone and ".".join([part for part in parts if part not in gone]) in theirs:
                yield Rename("component", ".".join(gone), "")


def _added(mine: Split, theirs: Split) -> Iterator[Rename]:
    """Components that only the other side has between those of a name."""
    return (Rename("wrapper", "", rule.old) for rule in _gone(theirs, mine))


def _replaced(mine: Split, theirs: Split) -> Iterator[Rename]:
    """Components that stand in the place of another one, where all others of the name are the same."""
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
