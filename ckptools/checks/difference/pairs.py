"""Which key of A is which key of B: by name without wrappers, in sections of one kind whatever they are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from ckptools.checks.difference.sides import Contents, HeldTensor, HeldValue, Identity, without_quotes

PAIRED = ("model", "optimizer", "scheduler")
"""Kinds of sections that are what they are under any name."""

Renames = Mapping[tuple[str, str], str]
"""Name in A of a section of B, by its kind and its name there."""

Held = TypeVar("Held", HeldTensor, HeldValue)


def renamed_sections(a: Contents, b: Contents) -> dict[tuple[str, str], str]:
    """The sections of B that are called otherwise in A: the only one of their kind that is left on both sides."""
    found: dict[tuple[str, str], str] = {}
    for kind in PAIRED:
        left = [name for name in a.sections.get(kind, ()) if name not in b.sections.get(kind, ())]
        right = [name for name in b.sections.get(kind, ()) if name not in a.sections.get(kind, ())]
        if len(left) == len(right) == 1:
            found[kind, right[0]] = left[0]
    return found


def as_in_a(b: Contents, names: Renames) -> Contents:
    """B with its sections under the names that they have in A."""

    def at(identity: Identity) -> Identity:
        kind, *rest = identity
        return (kind, names.get((kind, rest[0]), rest[0]), *rest[1:]) if rest else identity

    return replace(
        b,
        tensors={at(i): t._replace(identity=at(i)) for i, t in b.tensors.items()},
        values={at(i): v._replace(identity=at(i)) for i, v in b.values.items()},
        groups=[g._replace(section=names.get(("optimizer", g.section), g.section)) for g in b.groups],
        by_rank={at(i) for i in b.by_rank},
    )


def unlisted(side: Contents, other: Contents) -> Contents:
    """A side whose lists by rank, as a consolidated file has them, are taken apart where the other has each rank's own.

    Args:
        side: what may hold `position.2.sample`, the third rank's.
        other: what may hold `position.sample` of every rank.
    """
    values: dict[Identity, HeldValue] = {}
    for identity, value in side.values.items():
        cut = next((len(b) for b in other.by_rank - side.by_rank if _lists(b, identity)), None)
        if cut is None or None not in value.contents:
            values[identity] = value
            continue
        rank, own = int(identity[cut]), (*identity[:cut], *identity[cut + 1 :])
        known = values.get(own)
        name = value.name.replace(f".{rank}.", ".", 1).removesuffix(f".{rank}")
        before = known.contents if known else {}
        values[own] = value._replace(identity=own, name=name, contents={**before, rank: value.contents[None]})
    return replace(side, values=values)


def _lists(below: Identity, identity: Identity) -> bool:
    """Whether a key lies in what may be a list by rank."""
    n = len(below)
    return len(identity) > n and identity[:n] == below and identity[n].isdecimal()


def pairs(a: Mapping[Identity, Held], b: Mapping[Identity, Held]) -> Iterator[tuple[Held | None, Held | None]]:
    """What either side holds at each identity, in the order of A; what only B has comes last.

    Of two identities in which a key is a number on one side and its text on the other, each is the other's.
    """
    left = {without_quotes(identity): identity for identity in b if identity not in a}
    taken: set[Identity] = set()
    for identity, held in a.items():
        there = identity if identity in b else left.get(without_quotes(identity))
        yield held, b[there] if there is not None else None
        taken |= {there} if there is not None else set()
    yield from ((None, held) for identity, held in b.items() if identity not in taken)


def with_text_keys(side: Contents) -> Contents:
    """A side in which numbers and their texts are the same keys, as on one that has texts alone."""
    at = {i: i if without_quotes(i) in side.values else without_quotes(i) for i in side.values}
    values = {at[i]: v._replace(identity=at[i]) for i, v in side.values.items()}
    return replace(side, values=values, by_rank={without_quotes(i) for i in side.by_rank})
