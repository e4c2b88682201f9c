"""The keys of both sides in one form, paired by name without wrappers, in sections of one kind whatever their names.

`torch.optim.Optimizer.state_dict()` numbers the parameters through all param groups. A side that lists names in its
groups, in that order, gives the number of each. Both sides have the same order only if the groups have as many
parameters, the names known on both sides agree, and every state has the same slots and shapes.
Source: torch/optim/optimizer.py, `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from ckptools.diff.record import Side, Subject
from ckptools.keys.value_digests import Content
from ckptools.model.tensor import Tensor
from ckptools.text import plural

Identity = tuple[str, ...]
"""Finds a key on the other side: the kind of its section, the section, and its name there."""


class SideTensor(NamedTuple):
    """A tensor of the model, of an optimizer's state, or a large one elsewhere.

    Attributes:
        layout: how it is sharded, in words.
        number: whether its parameter has a number and no name.
        assumed: whether its parameter's name was given by order.
        problem: why its values cannot be read.
        tensor: None in a file of digests.
        sha256: of its values in row-major order; "" if it was not computed.
        traits: what it is beside its values, such as `Parameter, requires_grad`.
    """

    identity: Identity
    name: str
    subject: Subject
    dtype: str
    shape: tuple[int, ...]
    layout: str
    number: bool = False
    assumed: bool = False
    problem: str = ""
    tensor: Tensor | None = None
    sha256: str = ""
    traits: str = ""


class SideValue(NamedTuple):
    """A plain value by rank; under None if all ranks share it."""

    identity: Identity
    name: str
    subject: Subject
    contents: Mapping[int | None, Content]
    number: bool = False


class ContainerForm(NamedTuple):
    """The form of a dict, list or tuple; its values are compared by themselves.

    Attributes:
        kind: its class.
        keys: digest of its keys, whatever their order.
        order: digest of its keys in order.
        texts: digest of the texts of its keys, whatever their order.
        attributes: digest of the attributes that it was saved with; "" for none.
    """

    kind: str
    keys: str
    order: str
    texts: str
    attributes: str


class SideContainer(NamedTuple):
    """A dict, list or tuple in which other keys lie.

    Attributes:
        by_name: whether its keys may be names of parameters, whose order means nothing.
        node: itself; None in a file of digests.
        form: its form; None where the container is here.
    """

    name: str
    subject: Subject
    rank: int | None
    by_name: bool
    node: Any
    form: ContainerForm | None = None


class SideGroup(NamedTuple):
    """A param group.

    Attributes:
        params: fqns of its parameters without wrappers; `?` and a number where one has no name.
        ordered: whether its parameters are listed in the order of the optimizer, which numbers them so.
    """

    section: str
    number: int
    params: tuple[str, ...]
    settings: Mapping[str, Content]
    ordered: bool = False

    @property
    def numbered(self) -> bool:
        """Whether it lists numbers whose names are unknown."""
        return any(name.startswith("?") for name in self.params)


@dataclass
class Contents:
    """All keys of one side.

    Attributes:
        sections: names of its sections by kind.
        lost_ranks: ranks whose files are missing or cannot be read.
        by_rank: identities, cut short, below which each rank has something of its own.
        text_keys: whether keys that are numbers look the same as texts.
        written_by: what decides which classes of values it keeps: its format, and whether ckptools wrote it.
        containers: dicts, lists and tuples by identity and rank.
        left_out: which keys are too many to be compared; "" for none.
    """

    facts: Side
    sections: dict[str, list[str]] = field(default_factory=dict)
    tensors: dict[Identity, SideTensor] = field(default_factory=dict)
    values: dict[Identity, SideValue] = field(default_factory=dict)
    groups: list[SideGroup] = field(default_factory=list)
    lost_ranks: tuple[int, ...] = ()
    damage: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    by_rank: set[Identity] = field(default_factory=set)
    text_keys: bool = False
    written_by: str = ""
    containers: dict[tuple[Identity, int | None], SideContainer] = field(default_factory=dict)
    left_out: str = ""


# -- pairs ------------------------------------------------------------------------------------------------------------


PAIRED = ("model", "optimizer", "scheduler")
"""Kinds of sections that match under any name."""

OneSide = TypeVar("OneSide", SideTensor, SideValue)


def without_quotes(identity: Identity) -> Identity:
    """An identity in which a number and the text of it are the same."""
    return tuple(part[1:-1] if part[:1] == part[-1:] == "'" and part[1:-1].isdecimal() else part for part in identity)


def renamed_sections(a: Contents, b: Contents) -> dict[tuple[str, str], str]:
    """The name in A of a section of B, by its kind and name: of the only one of its kind that is left on both sides."""
    found: dict[tuple[str, str], str] = {}
    for kind in PAIRED:
        left = [name for name in a.sections.get(kind, ()) if name not in b.sections.get(kind, ())]
        right = [name for name in b.sections.get(kind, ()) if name not in a.sections.get(kind, ())]
        if len(left) == len(right) == 1:
            found[kind, right[0]] = left[0]
    return found


def as_in_a(b: Contents, names: Mapping[tuple[str, str], str]) -> Contents:
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
        containers={(at(i), rank): c for (i, rank), c in b.containers.items()},
    )


def without_classes(side: Contents) -> Contents:
    """A side without what formats keep in different ways: classes of values, the order of keys, traits of tensors."""

    def loose(content: Content) -> Content:
        return replace(content, exact="")

    def setting(group: SideGroup) -> SideGroup:
        return group._replace(settings={key: loose(content) for key, content in group.settings.items()})

    return replace(
        side,
        tensors={i: t._replace(traits="") for i, t in side.tensors.items()},
        values={
            i: v._replace(contents={rank: loose(c) for rank, c in v.contents.items()}) for i, v in side.values.items()
        },
        groups=[setting(group) for group in side.groups],
        containers={},
    )


def unlisted(side: Contents, other: Contents) -> Contents:
    """Take apart lists by rank: the third rank's `position.2.sample`, where the other side has one for each rank."""
    values: dict[Identity, SideValue] = {}
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
    n = len(below)
    return len(identity) > n and identity[:n] == below and identity[n].isdecimal()


def pairs(
    a: Mapping[Identity, OneSide], b: Mapping[Identity, OneSide]
) -> Iterator[tuple[OneSide | None, OneSide | None]]:
    """Pair the keys in the order of A, numbers with their texts too; keys of B alone come last."""
    left = {without_quotes(identity): identity for identity in b if identity not in a}
    taken: set[Identity] = set()
    for identity, key in a.items():
        there = identity if identity in b else left.get(without_quotes(identity))
        yield key, b[there] if there is not None else None
        taken |= {there} if there is not None else set()
    yield from ((None, key) for identity, key in b.items() if identity not in taken)


def with_text_keys(side: Contents) -> Contents:
    """Turn keys that are numbers into texts, as on a side that has texts alone."""
    at = {i: i if without_quotes(i) in side.values else without_quotes(i) for i in side.values}
    values = {at[i]: v._replace(identity=at[i]) for i, v in side.values.items()}
    return replace(side, values=values, by_rank={without_quotes(i) for i in side.by_rank})


# -- numbered ---------------------------------------------------------------------------------------------------------


UNSURE = "one side has numbers, the other names, and their order is not proven (--names FROM gives them)"

Names = Mapping[str, str]
"""The name on the other side of a number such as `?3`."""


def named_by_order(a: Contents, b: Contents) -> tuple[Contents, Contents, list[str], set[str]]:
    """Give names to the numbers for which the other side proves them.

    Also returns a note for each optimizer that got names, and the sections in which one side still has numbers and the
    other names, so that a key of one side alone may exist on the other.
    """
    notes, unsure = [], set[str]()
    for section in dict.fromkeys(group.section for group in a.groups):
        mine, others = (tuple(g for g in side.groups if g.section == section) for side in (a, b))
        if _numbered(mine) == _numbered(others) or not others:
            continue
        names = _names(section, a, b) if _numbered(mine) else _names(section, b, a)
        if names is None:
            unsure.add(section)
            continue
        a, b = (_with_names(side, section, names) if _numbered(g) else side for side, g in ((a, mine), (b, others)))
        which = "A's numbers are B's names" if _numbered(mine) else "B's numbers are A's names"
        notes.append(f"{section}: {which} in the order of its groups, which {plural(len(names), 'shape')} agree with")
    return a, b, notes, unsure


def _numbered(groups: Sequence[SideGroup]) -> bool:
    return any(group.numbered for group in groups)


def _names(section: str, numbered: Contents, named: Contents) -> Names | None:
    """The name of each number; None if the order is not proven."""
    mine, others = ([g for g in side.groups if g.section == section] for side in (numbered, named))
    sizes = [len(group.params) for group in mine]
    if not all(g.ordered for g in (*mine, *others)) or sizes != [len(group.params) for group in others]:
        return None
    pairs = [pair for g, h in zip(mine, others, strict=True) for pair in zip(g.params, h.params, strict=True)]
    if any(not number.startswith("?") and number != name for number, name in pairs):
        return None
    here, there = _shapes(section, numbered), _shapes(section, named)
    if any(here.get(number) != there.get(name) for number, name in pairs):
        return None
    return {number: name for number, name in pairs if number.startswith("?")}


def _shapes(section: str, side: Contents) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shape of every slot by parameter; () for a plain number, as for a tensor of one element."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for identity, key in (*side.tensors.items(), *side.values.items()):
        if _is_state(identity, section):
            found.setdefault(identity[2], {})[identity[3]] = getattr(key, "shape", ())
    return found


def _is_state(identity: Identity, section: str) -> bool:
    return len(identity) == 4 and identity[:2] == ("optimizer", section)


def _with_names(side: Contents, section: str, names: Names) -> Contents:
    def named(key: OneSide) -> OneSide:
        kind, *rest = key.identity
        if not _is_state(key.identity, section) or rest[1] not in names:
            return key
        return key._replace(identity=(kind, rest[0], names[rest[1]], rest[2]), number=False)

    def group(one: SideGroup) -> SideGroup:
        params = tuple(names.get(name, name) for name in one.params)
        return one._replace(params=params) if one.section == section else one

    return replace(
        side,
        tensors={key.identity: key for key in map(named, side.tensors.values())},
        values={key.identity: key for key in map(named, side.values.values())},
        groups=list(map(group, side.groups)),
    )
